"""Attention by cuDNN's kernel directly: as Transformer Engine's module, and against plain attention in fp32."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge.kernels import cudnn_attention
from megaswift.bridge.kernels.cudnn_attention import Mask, PackedAttention


def test_module_runs_where_it_chooses_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention, "_runs_cudnn", lambda: False)
    attention = PackedAttention(module=None, scale=None, mask=Mask(is_causal=True))
    calls = []

    def run_module() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(6, 8)

    query, ends = torch.zeros(6, 2, 4), torch.tensor([0, 6], dtype=torch.int32)
    for _ in range(3):
        assert attention(query, query, query, ends, 6, run_module).shape == query.shape
    assert len(calls) == 3


def plain(query, key, value, ends, mask: Mask, scale: float):
    outputs = []
    for start, end in pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        allowed = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
        if mask.is_causal:
            allowed = allowed.tril()
        if mask.window is not None:
            allowed = allowed.triu(-mask.window)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale).transpose(0, 1))
    return torch.cat(outputs)


MASKS = {"causal": Mask(True), "window": Mask(True, 100), "full": Mask(False)}
CASES = [(kind, dim, groups) for kind in MASKS for dim in (64, 72, 128) for groups in (2, 8)]
CASES += [("causal", dim, groups) for dim in (192, 256) for groups in (1, 2, 8)]  # kernels of their own above 128


@pytest.mark.gpu
@pytest.mark.parametrize(("mask", "dim", "groups"), [(MASKS[kind], *sizes) for kind, *sizes in CASES])
def test_cudnn_attention(mask: Mask, dim: int, groups: int) -> None:
    engine = pytest.importorskip("transformer_engine.pytorch")
    ends = [0, 300, 310, 1024]
    boundaries = torch.tensor(ends, dtype=torch.int32, device="cuda")
    kind = "padding_causal" if mask.is_causal else "padding"
    window = None if mask.window is None else (mask.window, 0)
    module = engine.DotProductAttention(
        8, dim, num_gqa_groups=groups, attn_mask_type=kind, window_size=window, qkv_format="thd", attention_dropout=0.0
    )
    attention, scale = PackedAttention(module, None, mask), dim**-0.5
    torch.manual_seed(0)
    states = [torch.randn(1024, heads, dim, device="cuda").bfloat16() for heads in (8, groups, groups)]
    slope = torch.randn(1024, 8, dim, device="cuda").bfloat16()
    lengths = {"max_seqlen_q": 1024, "max_seqlen_kv": 1024}

    def run(function, dtype=torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in states]
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, slope.to(dtype))]

    def run_module(*leaves):
        return module(*leaves, cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, **lengths).view(slope.shape)

    def fail():
        raise AssertionError("the module ran")

    def direct(*leaves):
        return attention(*leaves, boundaries, 1024, fail)

    by_module = run(run_module)
    attention(*states, boundaries, 1024, lambda: run_module(*states))  # chooses
    exact = run(lambda *leaves: plain(*leaves, ends, mask, scale), torch.float32)
    for ours, theirs, reference in zip(run(direct), by_module, exact, strict=True):
        error = (ours.float() - reference).norm() / reference.norm()
        assert error < 1.1 * (theirs.float() - reference).norm() / reference.norm() + 1e-6
        assert error < 1e-2
