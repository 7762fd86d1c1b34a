"""FlashAttention-4's kernels, as the layers call them, against torch's softmax in fp64."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge.kernels import flash_attention
from megaswift.bridge.layers.packed_seqs import AttentionSpan, make_segments
from megaswift.bridge.layers.sinks import varlen_attention
from megaswift.bridge.layers.vision_tower import FAST_HEAD_DIMS, attend_by_flash

from .test_attention import plain


class Case(NamedTuple):
    lengths: tuple[int, ...] = (300, 10, 714)
    heads: int = 8
    groups: int = 2
    dim: int = 128
    value_dim: int | None = None
    span: AttentionSpan = AttentionSpan()
    cp_size: int = 1
    sinks: bool = False


CAUSAL = {
    "groups of heads": Case(),
    "a key head per query head": Case(groups=8, dim=64),
    "one document": Case((1024,)),
    "two thousand documents": Case((1, 3) * 1000, dim=64),
    "short documents": Case((40, 20)),
    "wide heads": Case(dim=256, heads=4),
    "latent attention": Case(dim=192, value_dim=128, groups=8),
    "windows": Case(span=AttentionSpan(window=100)),
    "chunks": Case(span=AttentionSpan(chunk=128)),
    "one of two ranks": Case((400, 624), cp_size=2),
    "windows, one of two ranks": Case((400, 624), span=AttentionSpan(window=60), cp_size=2),
    "sinks": Case(sinks=True, dim=64),
    "sinks and windows": Case(sinks=True, dim=64, span=AttentionSpan(window=100)),
}
BOUND = 2e-2  # of the largest value; bf16 has 8 bits


@pytest.fixture
def flash():
    if not flash_attention.is_usable():
        pytest.skip("FlashAttention-4 is not installed, or has not been measured on this device")


def compare(function, reference, states, expected_dim):
    slope = torch.randn(len(states[0]), states[0].shape[1], expected_dim, device="cuda", dtype=torch.bfloat16)

    def run(call, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in states]
        output = call(*leaves)
        return [output, *torch.autograd.grad(output, leaves, slope.to(dtype))]

    names = "output", "query", "key", "value", "sinks"
    for name, result, exact in zip(names, run(function, torch.bfloat16), run(reference, torch.float64), strict=False):
        error = (result.double() - exact).abs().max() / exact.abs().max()
        assert error < BOUND, (name, float(error))


@pytest.mark.gpu
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
def test_causal(case: Case, is_deterministic: bool, flash):
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
    segments = make_segments(bounds, case.cp_size - 1, case.cp_size, torch.device("cuda"), case.span)
    value_dim = case.value_dim or case.dim
    queries, keys = sum(segments.queries), sum(segments.keys)
    shapes = (queries, case.heads, case.dim), (keys, case.groups, case.dim), (keys, case.groups, value_dim)
    # Heads lie in wider rows, as where they are views of one matrix.
    states = [torch.randn(n, 2 * heads, dim, device="cuda").bfloat16()[:, ::2] for n, heads, dim in shapes]
    if case.sinks:
        states.append(torch.randn(case.heads, device="cuda").bfloat16())

    def by_flash(query, key, value, sinks=None):
        flags = {"uses_flash": True, "is_deterministic": is_deterministic}
        return varlen_attention(query, key, value, segments, 0.1, sinks, **flags)

    def by_softmax(query, key, value, sinks=None):
        output, log_sum = plain(query, key, value, segments, 0.1, None)
        if sinks is None:
            return output
        return output * (log_sum - torch.logaddexp(log_sum, sinks.unsqueeze(1))).exp().t().unsqueeze(-1)

    compare(by_flash, by_softmax, states, value_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("lengths", [(300, 10, 714), (64,) * 200, (2304,)], ids=["pictures", "windows", "one"])
def test_in_both_directions(lengths: tuple[int, ...], dim: int, flash):
    torch.manual_seed(0)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    blocks = SimpleNamespace(cu_seqlens=ends, lengths=list(lengths))
    states = [torch.randn(sum(lengths), 4, dim, device="cuda").bfloat16() for _ in range(3)]

    def by_softmax(query, key, value):
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        scores = ((torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5, v) for q, k, v in parts)
        return torch.cat([torch.einsum("hqk,khd->qhd", score.softmax(-1), v) for score, v in scores])

    def by_flash(*states):
        padding = FAST_HEAD_DIMS[dim > 64] - dim  # as the tower does for a backward pass
        states = [F.pad(x, (0, padding)) for x in states]
        return attend_by_flash(*states, blocks, scale=dim**-0.5, is_deterministic=False)[..., :dim]

    compare(by_flash, by_softmax, states, dim)
    with torch.no_grad():
        output = attend_by_flash(*states, blocks, scale=dim**-0.5, is_deterministic=False).double()
        exact = by_softmax(*(x.double() for x in states))
    assert (output - exact).abs().max() < BOUND * exact.abs().max()


@pytest.mark.gpu
def test_determinism(flash):
    segments = make_segments([0, 3000, 4096], 0, 1, torch.device("cuda"))
    states = [torch.randn(4096, heads, 128, device="cuda").bfloat16().requires_grad_() for heads in (16, 4, 4)]

    def gradients():
        output = varlen_attention(*states, segments, None, None, uses_flash=True, is_deterministic=True)
        return torch.autograd.grad(output.float().square().sum(), states)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), first))
