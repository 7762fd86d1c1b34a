"""Tokens to the experts of other ranks and back through shared memory; the ranks are threads that take turns."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# tokens of each rank, experts per rank, topk, width
SHAPES = {
    "uneven": ([37, 5], 3, 2, 24),
    "one choice": ([9, 70], 4, 1, 8),
    "topk 8, wide rows": ([20, 33], 8, 8, 2056),
    "four ranks": ([12, 1, 0, 30], 2, 3, 16),
    "three ranks, one expert each": ([4, 70, 11], 1, 2, 20),
    "no token": ([0, 0], 4, 2, 8),
}
SLOW = "topk 8, wide rows", "four ranks"


@pytest.fixture(autouse=True)
def small_regions(device, monkeypatch):
    """Few programs are interpreted."""
    from megaswift.bridge.kernels import exchange as kernels

    if device == "cpu":
        monkeypatch.setattr(kernels, "GRANULE", 4)


class Turns:
    """Order in which emulated ranks run: each up to its next barrier, one after another."""

    def __init__(self, ranks: int):
        self.changed, self.running, self.ended = threading.Condition(), 0, [False] * ranks
        self.numbers = [0] * ranks

    def wait(self, rank: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.running == rank, timeout=240), "a rank waits for ever"

    def pass_on(self) -> None:
        with self.changed:
            for _ in self.ended:
                self.running = (self.running + 1) % len(self.ended)
                if not self.ended[self.running]:
                    break
            self.changed.notify_all()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.ended)

        def call(rank: int) -> None:
            self.wait(rank)
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
            self.ended[rank] = True
            self.pass_on()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class EmulatedMemory:
    """`PeerMemory` of the ranks of one process."""

    def __init__(self, turns: Turns, rank: int, shared: list[torch.Tensor], device: str):
        self.turns, self.rank, self.ranks, self.shared, self.device = turns, rank, len(turns.ended), shared, device

    def wait_for_all(self) -> None:
        self.turns.pass_on()
        self.turns.wait(self.rank)

    def barrier(self) -> None:
        self.wait_for_all()

    def allocate(self, size: int) -> list[int]:
        self.wait_for_all()
        self.shared[self.rank] = torch.full((size,), 255, dtype=torch.uint8, device=self.device)
        self.wait_for_all()
        return [tensor.data_ptr() for tensor in self.shared]

    def maximum(self, number: int) -> int:
        self.wait_for_all()
        self.turns.numbers[self.rank] = number
        self.wait_for_all()
        return max(self.turns.numbers)


def on_ranks(ranks: int, device: str, work: Callable[[int, Any], Any]) -> list[Any]:
    """Call work(rank, exchange) on every rank."""
    from megaswift.bridge.layers.peer_exchange import PeerExchange

    turns, shared = Turns(ranks), [torch.empty(0)] * ranks
    return turns.run(
        lambda rank: work(rank, PeerExchange(EmulatedMemory(turns, rank, shared, device), torch.device(device)))
    )


def inputs(tokens, experts, topk, width, dtype, device, seed=0, *, repeats=True) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's tokens, experts and weights; the last expert has no token, and every 7th token a single expert."""
    generator = torch.Generator().manual_seed(seed)
    by_rank = []
    for number in tokens:
        scores = torch.rand(number, experts, generator=generator)
        scores[:, -1] = -1.0
        chosen = scores.topk(topk, dim=1).indices.to(torch.int32)
        if repeats:
            chosen[::7] = chosen[::7, :1]
        x = torch.randn(number, width, generator=generator).to(dtype)
        by_rank.append(tuple(part.to(device) for part in (x, chosen, torch.rand(number, topk, generator=generator))))
    return by_rank


def whole(ranks: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*ranks, strict=True))


def choices_of(chosen: torch.Tensor, rank: int, local_experts: int) -> torch.Tensor:
    """The choices (token * topk + k) of all tokens that are of a rank's experts, by expert, then token."""
    order = chosen.flatten().argsort(stable=True)
    return order[chosen.flatten()[order] // local_experts == rank]


@pytest.mark.parametrize(
    ("tokens", "local", "topk", "width"),
    [pytest.param(*shape, id=name, marks=[pytest.mark.long] * (name in SLOW)) for name, shape in SHAPES.items()],
)
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 0), (torch.bfloat16, 4096)], ids=["fp32", "bf16"])
def test_rows_of_local_experts_and_back(device, monkeypatch, tokens, local, topk, width, dtype, expected):
    """In fp32 fewer rows are expected than there are: they are copied again."""
    from megaswift.bridge.kernels import exchange as kernels

    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 4)  # so that programs take several steps
    monkeypatch.setattr(kernels, "CHOICES", 16)
    ranks = len(tokens)
    parts = inputs(tokens, ranks * local, topk, width, dtype, device)
    x, chosen, weights = whole(parts)
    slopes = torch.randn(chosen.numel(), width, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def work(rank, exchange):
        mine = choices_of(chosen, rank, local)
        rows, row_weights, plan = exchange.dispatch(*parts[rank], local, expected)
        spread = exchange.spread(parts[rank][0] * 2, plan)
        summed, weight_slopes = exchange.combine(slopes[mine], plan, row_weights * 3)
        return rows, row_weights, plan.counts, spread, summed, weight_slopes

    sums = slopes.view(-1, topk, width).float().sum(1).split(tokens)
    for rank, result in enumerate(on_ranks(ranks, device, work)):
        rows, row_weights, counts, spread, summed, weight_slopes = result
        mine = choices_of(chosen, rank, local)
        assert torch.equal(rows, x[mine // topk])
        assert torch.equal(row_weights, weights.flatten()[mine])
        here = chosen.flatten().long().bincount(minlength=ranks * local)[rank * local : (rank + 1) * local]
        assert torch.equal(counts.long(), here)
        assert torch.equal(spread, rows * 2)
        bound = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(summed.float(), sums[rank], atol=bound, rtol=bound)
        torch.testing.assert_close(weight_slopes, parts[rank][2] * 3)


BATCHES = ([20, 33], [5, 70], [150, 1], [40, 40])  # the memory is enlarged for the second and third


@pytest.mark.parametrize(
    "fault", [None, *(pytest.param(fault, marks=pytest.mark.long) for fault in ("no barrier", "one half"))]
)
def test_layers_take_turns_in_the_memory(device, monkeypatch, fault):
    """All batches are dispatched before the first one comes back."""
    from megaswift.bridge.layers.peer_exchange import PeerExchange

    parts = [inputs(tokens, 6, 2, 16, torch.float32, device, seed) for seed, tokens in enumerate(BATCHES)]
    if fault == "no barrier":
        monkeypatch.setattr(EmulatedMemory, "barrier", lambda memory: None)
    if fault == "one half":
        monkeypatch.setattr(PeerExchange, "turn", property(lambda _: 0, lambda _, turn: None), raising=False)

    def work(rank, exchange):
        dispatched = [exchange.dispatch(*batch[rank], 3, 64) for batch in parts]
        return [exchange.combine(rows * 2, plan)[0] for rows, _, plan in dispatched]

    distances = [
        (output - batch[rank][0] * 4).abs().max().item()
        for rank, outputs in enumerate(on_ranks(2, device, work))
        for output, batch in zip(outputs, parts, strict=True)
    ]
    assert (max(distances) < 1e-5) == (fault is None), distances


def dispatcher_config(experts: int, topk: int, width: int):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_token_dispatcher_type="alltoall",
    )


def through_experts(dispatcher, x, chosen, weights, matrices) -> torch.Tensor:
    """Tokens x [tokens, 1, width] through experts that multiply by matrices [experts, width, width]."""
    rows, row_weights = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, chosen, weights))
    rows, counts, row_weights = dispatcher.dispatch_postprocess(rows, row_weights)
    parts = rows.split(counts.tolist())
    rows = torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)]).tanh()
    rows = dispatcher.combine_preprocess(rows * row_weights.unsqueeze(1))
    return dispatcher.combine_postprocess(dispatcher.token_combine(rows))


@pytest.mark.parametrize(
    "tokens",
    [pytest.param([37, 12], id="two ranks"), pytest.param([3, 70, 0, 9], id="four ranks", marks=pytest.mark.long)],
)
def test_trains_as_the_dispatcher_of_one_rank(device, tokens):
    """Outputs and gradients, with every layer computed again in the backward pass."""
    if device == "cuda":
        pytest.skip("autograd has one thread per GPU, in which ranks cannot take turns")
    from megaswift.bridge import runtime
    from megaswift.bridge.layers.moe import Dispatcher
    from megaswift.bridge.layers.peer_exchange import PeerDispatcher
    from torch.utils.checkpoint import checkpoint

    runtime.enable()
    ranks, local, topk, width = len(tokens), 3, 2, 12
    config = dispatcher_config(ranks * local, topk, width)
    single = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=single, expt_tp=single, tp_ep=single)
    parts = [
        (x.unsqueeze(1).requires_grad_(), chosen, weights.requires_grad_())
        for x, chosen, weights in inputs(tokens, ranks * local, topk, width, torch.float32, device, repeats=False)
    ]
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(2, ranks * local, width, width, generator=generator).requires_grad_()

    def model(dispatchers, x, chosen, weights, matrices):
        for dispatcher, layer in zip(dispatchers, matrices, strict=True):
            x = x + checkpoint(through_experts, dispatcher, x, chosen, weights, layer, use_reentrant=True)
        return x.square()

    def work(rank, exchange):
        dispatchers = [PeerDispatcher(exchange, local, config, groups) for _ in range(2)]
        mine = matrices.detach()[:, rank * local : (rank + 1) * local].clone().requires_grad_()
        x, chosen, weights = parts[rank]
        output = model(dispatchers, x, chosen, weights, mine)
        output.sum().backward()
        return output, mine.grad

    results = on_ranks(ranks, device, work)
    x, chosen, weights = (part.detach() for part in whole(parts))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    dispatchers = [Dispatcher(ranks * local, list(range(ranks * local)), config, groups) for _ in range(2)]
    output = model(dispatchers, x, chosen, weights, matrices)
    output.sum().backward()
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat([result[0] for result in results]), output, **close)
    torch.testing.assert_close(torch.cat([part[0].grad for part in parts]), x.grad, **close)
    torch.testing.assert_close(torch.cat([part[2].grad for part in parts]), weights.grad, **close)
    torch.testing.assert_close(torch.cat([result[1] for result in results], dim=1), matrices.grad, **close)
