"""Attention whose keys are gathered over the ranks of a job, beside one rank that has all of them.

    torchrun --nproc-per-node 2 -m tests.bridge.layers.gathered_worker results.json

results.json: {case: {what: largest distance, relative to the largest number there, of all ranks}}; and what is counted.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megaswift.bridge.kernels.kept_outputs import KeptOutputs
from megaswift.bridge.layers.gathered_keys import Backward, Forward, gathering
from megaswift.bridge.layers.packed_seqs import AttentionSpan, Segments, gathered_positions, make_segments
from megaswift.bridge.layers.sinks import KernelAttention
from torch import Tensor

from tests.bridge.kernels.test_attention import plain

BOUNDS = [0, 16, 88, 96]
HEADS, GROUPS, DIM, VALUE_DIM, SCALE = 4, 2, 16, 24, 0.3
CASES = {
    "all before": AttentionSpan(),
    "windows": AttentionSpan(window=7),
    "chunks": AttentionSpan(chunk=12),
}
CPU = torch.device("cpu")


def passes(segments: Segments) -> tuple[Forward, Backward]:
    """A kernel in plain torch."""

    def forward(*states: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return plain(*states, segments, SCALE, None)

    def backward(grad: Tensor, *states: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in states[:3]]
        with torch.enable_grad():
            output = plain(*leaves, segments, SCALE, None)[0]
        return torch.autograd.grad(output, leaves, grad)

    return forward, backward


def full_states(span: AttentionSpan) -> list[Tensor]:
    """Queries, keys, values, and the output's gradient: [tokens, ...]; then the output, and gradients of the first."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, VALUE_DIM), (HEADS, VALUE_DIM)
    states = [torch.randn(BOUNDS[-1], *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in states[:3]]
    output = plain(*leaves, make_segments(BOUNDS, 0, 1, CPU, span), SCALE, None)[0]
    return [*states, output.detach(), *torch.autograd.grad(output, leaves, states[3])]


def part(tensor: Tensor) -> Tensor:
    """This rank's tokens, in its order."""
    world, total = dist.get_world_size(), BOUNDS[-1]
    places = torch.cat([gathered_positions(start, end - start, total, world) for start, end in pairwise(BOUNDS)])
    return tensor[places.argsort()].chunk(world)[dist.get_rank()].clone()


def compare(span: AttentionSpan) -> dict[str, float]:
    *states, slope, output, query, key, value = (part(tensor) for tensor in full_states(span))
    segments = make_segments(BOUNDS, dist.get_rank(), dist.get_world_size(), CPU, span)
    assert segments.key_index is not None
    leaves = [x.requires_grad_() for x in states]
    group = dist.group.WORLD
    assert group is not None
    saved = Counter()

    def count(tensor: Tensor) -> Tensor:
        saved["values"] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        attended = KernelAttention.apply(*leaves, None, *gathering(*passes(segments), segments, group))
    grads = torch.autograd.grad(attended, leaves, slope)
    names = "output", "query", "key", "value"
    pairs = zip(names, (attended, *grads), (output, query, key, value), strict=True)
    errors = {name: float((one - other).abs().max() / other.abs().max()) for name, one, other in pairs}
    local = sum(x.numel() for x in (*states, output)) + output.shape[0] * HEADS  # and the log-sum-exp
    return errors | {"saved": saved["values"] / local}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the exchanges by name."""
    calls = Counter()

    def count(name: str) -> Any:
        function = getattr(dist, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **settings)

        return mock.patch.object(dist, name, call)

    with count("all_gather_into_tensor"), count("reduce_scatter_tensor"):
        yield calls


def exchanges() -> dict[str, int]:
    """The exchanges of a recomputed layer that keeps its kernel's output: of its forward passes, and of all."""
    segments = make_segments(BOUNDS, dist.get_rank(), dist.get_world_size(), CPU)
    states = [part(tensor).requires_grad_() for tensor in full_states(AttentionSpan())[:3]]
    assert segments.key_index is not None
    kernel = gathering(*passes(segments), segments, dist.group.WORLD)  # type: ignore[arg-type]

    class Kept:
        def __init__(self, tensor: Tensor):
            self._tensor = tensor.detach()

        def get(self) -> Tensor:
            return self._tensor

    run = KeptOutputs(Kept).keep(lambda: KernelAttention.apply(*states, None, *kernel))
    with counted() as calls:
        run()
        output = run()
        forward = dict(calls)
        output.sum().backward()
    return {"forward": sum(forward.values()), "both": sum(calls.values())}


def lost(*arguments: Any, **settings: Any) -> None:
    """In place of `reduce_scatter_tensor`: of the other ranks' gradients nothing arrives."""
    target, source = arguments
    target.copy_(source.chunk(dist.get_world_size())[dist.get_rank()])


def main() -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {name: compare(span) for name, span in CASES.items()}
    with mock.patch.object(dist, "reduce_scatter_tensor", lost):
        results["fault"] = compare(CASES["all before"])
    results["exchanges"] = exchanges()
    collected: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(collected, results)
    worst = {case: {what: max(each[case][what] for each in collected) for what in results[case]} for case in results}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
