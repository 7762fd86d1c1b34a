"""Run under torchrun on GPUs: our exchange between GPUs beside NCCL's all-to-all, on the same tokens.

    torchrun --nproc-per-node 2 -m tests.bridge.layers.exchange_worker results.json

results.json: {case: {what: distance, relative to the largest number there}}, of the rank that is furthest off.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge.layers.moe import Dispatcher
from megaswift.bridge.layers.peer_exchange import PeerDispatcher, exchange_of
from megaswift.bridge.options import BuildOptions
from megaswift.bridge.parallel import current_groups, destroy, initialize
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

EXPERTS, TOPK, WIDTH = 64, 8, 1024
LAYERS = 24  # one after another, without a wait: whoever reads too late or too early meets another layer's rows
# Tokens of even and of odd ranks. The memory is enlarged twice.
CASES = {"equal": (512, 512), "uneven": (1500, 37), "no token on one rank": (0, 2100), "few": (3, 1)}


def dispatchers(group_size: int) -> tuple[PeerDispatcher, Dispatcher]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=group_size,
    )
    groups, local = current_groups(), EXPERTS // group_size
    exchange = exchange_of(groups.ep)
    assert exchange is not None, "these GPUs do not read each other's memory"
    first = groups.ep.rank() * local
    return (
        PeerDispatcher(exchange, local, config, groups),
        Dispatcher(local, list(range(first, first + local)), config, groups),
    )


def through_experts(dispatcher, x: Tensor, experts: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Tokens [tokens, 1, width] through experts that scale by scales [local experts, width] and bend."""
    rows, row_weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, experts, weights))
    rows, counts, row_weights = dispatcher.dispatch_postprocess(rows, row_weights)
    rows = (rows * scales.repeat_interleave(counts.to(x.device), dim=0)).tanh() * row_weights.unsqueeze(1)
    rows = dispatcher.combine_preprocess(rows.to(x.dtype))
    return dispatcher.combine_postprocess(dispatcher.token_combine(rows))


def results_of(dispatcher, tokens: int, dtype: torch.dtype, rank: int, local: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(10 + rank)
    x = torch.randn(tokens, 1, WIDTH, device="cuda", generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(LAYERS, tokens, EXPERTS, device="cuda", generator=generator)
    experts = scores.topk(TOPK, dim=-1).indices.to(torch.int32)
    weights = torch.rand(LAYERS, tokens, TOPK, device="cuda", generator=generator).requires_grad_()
    scales = torch.rand(LAYERS, local, WIDTH, device="cuda", generator=generator).to(dtype).requires_grad_()
    y = x
    for layer in range(LAYERS):
        y = y + 0.25 * through_experts(dispatcher, y, experts[layer], weights[layer], scales[layer])
    y.float().square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert scales.grad is not None
    return {"output": y.detach(), "inputs": x.grad, "weights": weights.grad, "experts": scales.grad}


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item() if a.numel() else 0.0


def main(path: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    initialize(BuildOptions(expert_model_parallel_size=size), seed=1)
    ours, reference = dispatchers(size)
    rank, results = dist.get_rank(), {}
    for name, tokens in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            arguments = tokens[rank % 2], dtype, rank, EXPERTS // size
            got, expected = results_of(ours, *arguments), results_of(reference, *arguments)
            distances = {what: distance(got[what].float(), expected[what].float()) for what in got}
            gathered: list[dict[str, float]] = [{}] * size
            dist.all_gather_object(gathered, distances)
            kind = str(dtype).removeprefix("torch.")
            results[f"{name} {kind}"] = {what: max(one[what] for one in gathered) for what in distances}
    if rank == 0:
        path.write_text(json.dumps(results, indent=1))
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
