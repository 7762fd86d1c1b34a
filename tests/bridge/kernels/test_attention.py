"""The attention kernels against torch's softmax in fp64, document by document."""

import pytest
import torch
from megaswift.bridge.layers.packed_seqs import AttentionSpan, make_segments

CASES = {
    "documents": {"lengths": (5, 130, 1)},
    "many heads to a key": {"lengths": (70, 3), "heads": 8},
    "windows": {"lengths": (90, 7), "reach": AttentionSpan(window=50)},
    "capped scores": {"lengths": (70, 3), "cap": 0.8, "reach": AttentionSpan(window=50)},
    "capped scores of wide heads": {"lengths": (40, 3), "cap": 0.8, "dim": 136},
    "one of two ranks": {"lengths": (8, 140), "cp_size": 2},
    "one of two ranks, windows": {"lengths": (8, 132), "cp_size": 2, "reach": AttentionSpan(window=21)},
}


def plain(query, key, value, segments, scale, cap):
    outputs, log_sums = [], []
    repeat = query.shape[1] // key.shape[1]
    for q, k, v in zip(
        query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), strict=True
    ):
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        at = torch.arange(len(q), device=q.device).unsqueeze(1) + len(k) - len(q)
        row = torch.arange(len(k), device=q.device)
        met = row <= at
        if segments.window:
            met &= row > at - segments.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores if cap is None else cap * (scores / cap).tanh()
        scores = scores.masked_fill(~met, -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        log_sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(log_sums, 1)


@pytest.mark.parametrize("case", CASES)
def test_attention(case, device):
    from megaswift.bridge.kernels.attention import BLOCK, attend, attend_backward

    cp_size = CASES[case].get("cp_size", 1)
    bounds = [0, *torch.tensor(CASES[case]["lengths"]).cumsum(0).tolist()]
    segments = make_segments(
        bounds, cp_size - 1, cp_size, torch.device(device), CASES[case].get("reach", AttentionSpan())
    )
    generator = torch.Generator().manual_seed(0)

    def random(tokens, heads):
        # Heads lie in wider rows, as where they are views.
        return torch.randn(tokens, 2 * heads, dim, generator=generator, dtype=torch.float64)[:, ::2].requires_grad_()

    heads, dim, cap = (CASES[case].get(key, value) for key, value in (("heads", 4), ("dim", 16), ("cap", None)))
    inputs = random(sum(segments.queries), heads), random(sum(segments.keys), 2), random(sum(segments.keys), 2)
    expected, log_sum = plain(*inputs, segments, 0.3, cap)
    slopes = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad(expected, inputs, slopes)

    # A GPU's products of fp32 are in TF32.
    dtype, bound = (torch.float32, 2e-5) if device == "cpu" else (torch.float16, 1e-2)

    def here(x):
        return x.detach().to(device, dtype)

    tiles, key_tiles = segments.tiles(BLOCK)
    query, key, value = map(here, inputs)
    found = attend(query, key, value, tiles, 0.3, segments.window, cap)
    grads = attend_backward(here(slopes), query, key, value, *found, tiles, key_tiles, 0.3, segments.window, cap)
    for mine, reference in zip((*found, *grads), (expected, log_sum, *exact), strict=True):
        torch.testing.assert_close(mine.double().cpu(), reference.detach(), rtol=bound, atol=bound)
