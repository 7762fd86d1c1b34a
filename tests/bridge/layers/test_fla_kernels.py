"""What the mixers give to flash-linear-attention's kernels, and on GPUs what these give back.

pytest -m gpu -s tests/bridge/layers/test_fla_kernels.py      # prints errors and times of the kernels and of PyTorch
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge.layers.delta_rule import make_delta_layout
from megaswift.bridge.layers.fla_kernels import FlaKernels, delta_rule_by_channels, fla_kernels

from tests.bridge.layers.linear_attention import KERNEL, cases

CPU = torch.device("cpu")
# A document of one token, ones about a chunk long, one of several chunks, and one alone in several rows.
PACKS = [([0, 1, 64, 130, 331], 1), ([0, 63, 127, 192, 394], 2), ([0, 200], 3), ([0, 2], 2)]
TINY = cases(groups=3, heads=2, dim=6, state=5)
SIZED = cases(groups=16, heads=2, dim=128, state=128)  # as in published models, with fewer heads than in some


def by_document(compute, ends, ends_on_cpu, *inputs):
    """compute, of each document by itself: inputs [1, tokens, ...]."""
    assert ends_on_cpu is None or ends.tolist() == ends_on_cpu.tolist()
    assert all(x.is_contiguous() for x in inputs)
    cuts = list(pairwise(ends.tolist()))
    return torch.cat([compute(*(x[:, start:end] for x in inputs)) for start, end in cuts], dim=1), None


def conv(*, x, weight, bias, activation, cu_seqlens, cu_seqlens_cpu):
    def compute(x):
        convolved = F.conv1d(F.pad(x.mT, (KERNEL - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[-1]).mT
        return F.silu(convolved) if activation == "silu" else convolved

    assert activation in ("silu", None)
    return by_document(compute, cu_seqlens, cu_seqlens_cpu, x)


def recurrence(q, k, v, g, beta=None, scale=None):
    """Linear attention, a token at a time: q, k [1, tokens, heads, K]; g like k; with beta by the delta rule."""
    state = v.new_zeros(1, *k.shape[2:], v.shape[-1])
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for at in range(q.shape[1]):
        state = state * g[:, at].exp().unsqueeze(-1)
        update = v[:, at] if beta is None else v[:, at] - torch.einsum("bhk,bhkv->bhv", k[:, at], state)
        update = update if beta is None else update * beta[:, at].unsqueeze(-1)
        state = state + k[:, at].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, at] * scale, state))
    return torch.stack(outputs, dim=1)


def normalized(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # the eps of fla's l2norm


def delta_rule(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu):
    assert use_qk_l2norm_in_kernel
    copies = v.shape[2] // k.shape[2]

    def compute(q, k, v, g, beta):
        q, k = (normalized(x).repeat_interleave(copies, dim=2) for x in (q, k))
        return recurrence(q, k, v, g.unsqueeze(-1), beta)

    return by_document(compute, cu_seqlens, cu_seqlens_cpu, q, k, v, g, beta)


def channel_delta_rule(
    q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu, use_gate_in_kernel=False, **gate
):
    assert use_qk_l2norm_in_kernel
    assert g.shape == (*v.shape[:3], k.shape[-1])
    copies = v.shape[2] // k.shape[2]
    if use_gate_in_kernel:
        shape = g.shape[2:]
        assert gate["A_log"].shape == shape[:1]
        assert gate["dt_bias"].shape == (shape.numel(),)
        g = -gate["A_log"].exp().view(-1, 1) * F.softplus(g + gate["dt_bias"].view(shape))
    else:
        assert not gate

    def compute(q, k, v, g, beta):
        q, k = (normalized(x).repeat_interleave(copies, dim=2) for x in (q, k))
        return recurrence(q, k, v, g, beta)

    return by_document(compute, cu_seqlens, cu_seqlens_cpu, q, k, v, g, beta)


def decayed_attention(q, k, v, *, g=None, g_gamma=None, scale, cu_seqlens):
    assert (g is None) != (g_gamma is None)
    assert g_gamma is None or g_gamma.shape == (q.shape[2],)
    g = g_gamma.expand(v.shape[:3]).contiguous() if g is None else g

    def compute(q, k, v, g):
        return recurrence(q, k, v, g.unsqueeze(-1), scale=scale)

    return by_document(compute, cu_seqlens, None, q, k, v, g)


STANDINS = FlaKernels(conv, delta_rule, channel_delta_rule, decayed_attention)
BY_CHANNELS = STANDINS._replace(delta_rule=partial(delta_rule_by_channels, channel_delta_rule))


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.float() - expected).abs().max() / expected.abs().max()).item()


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.float() - expected).norm() / expected.norm()).item()


def results(run, inputs: list[torch.Tensor], layout) -> list[torch.Tensor]:
    """The output of run(*inputs, layout), and the gradients of the inputs that require them."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    output = run(*inputs, layout).flatten(1)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    return [output.detach(), *torch.autograd.grad(output, [x for x in inputs if x.requires_grad], weight)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), [*((name, STANDINS) for name in TINY), ("gated delta net", BY_CHANNELS)])
@pytest.mark.parametrize(("bounds", "rows"), PACKS)
def test_what_goes_to_the_kernels_is_what_they_take(name, kernels, bounds, rows):
    """By the arguments of fla's functions, computed by recurrences: the layer's two ways agree."""
    torch.manual_seed(3)
    layer, inputs = TINY[name].layer, TINY[name].inputs(bounds[-1] * rows, torch.float32)
    layout = make_delta_layout(bounds, rows, 1, KERNEL, CPU)
    expected = results(layer._run_torch, inputs, layout)
    fused = results(partial(layer._run_fla, kernels), inputs, layout)
    assert max(map(relative, fused, expected)) < 1e-5


@pytest.fixture
def kernels():
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    return fla_kernels()


def on_gpu(inputs: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [x.detach().to("cuda", dtype).requires_grad_(x.requires_grad) for x in inputs]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize(("bounds", "rows"), PACKS)
def test_kernels_compute_what_plain_pytorch_does(name, bounds, rows, kernels):
    """Output and gradients in bf16, of packed documents: kernels and plain PyTorch, both against it in fp32."""
    torch.manual_seed(3)
    layer, inputs = SIZED[name].layer, SIZED[name].inputs(bounds[-1] * rows, torch.bfloat16)
    layout = make_delta_layout(bounds, rows, 1, KERNEL, torch.device("cuda"))
    exact = results(layer._run_torch, on_gpu(inputs, torch.float32), layout)
    plain, fused = (
        [distance(x, y) for x, y in zip(results(run, on_gpu(inputs), layout), exact, strict=True)]
        for run in (layer._run_torch, partial(layer._run_fla, kernels))
    )
    print(f"\n{name}, {bounds} x {rows}: plain {plain}, fla {fused}")
    assert max(fused) < 3e-2  # fla's own tests allow 0.02 for gradients of decays


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZED)
def test_kernels_are_faster(name, kernels):
    """Forward and backward of 8,192 tokens in documents of 2,048."""
    tokens = 8192
    torch.manual_seed(3)
    layer, inputs = SIZED[name].layer, on_gpu(SIZED[name].inputs(tokens, torch.bfloat16))
    layout = make_delta_layout([*range(0, tokens + 1, 2048)], 1, 1, KERNEL, torch.device("cuda"))
    plain = partial(layer._recompute, layer._run_torch) if layer.is_recomputed else layer._run_torch
    times = [milliseconds(run, inputs, layout) for run in (plain, partial(layer._run_fla, kernels))]
    print(f"\n{name}, {tokens} tokens: plain PyTorch {times[0]:.2f} ms, fla {times[1]:.2f} ms")
    assert times[1] < times[0]


def milliseconds(run, inputs: list[torch.Tensor], layout) -> float:
    """Return the time of a forward and a backward pass, after some that compile kernels and choose their settings."""
    output = run(*inputs, layout)
    gradient, leaves = torch.randn_like(output), [x for x in inputs if x.requires_grad]
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.autograd.grad(run(*inputs, layout), leaves, gradient)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[3:])
