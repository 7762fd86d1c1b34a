"""What a run says of its kernels: a package that is missed is named, with its cure."""

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.kernels import flash_attention
from megaswift.bridge.layers import fla_kernels
from megaswift.bridge.model.kernel_selection import choose_kernels
from megaswift.bridge.options import BuildOptions

from tests import tiny

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("family", "dtype", "on_gpu", "installed", "deterministic", "text", "warns"),
    [
        ("qwen3_next", BF16, True, True, False, "; gated delta nets: flash-linear-attention", False),
        ("qwen3_next", BF16, True, False, False, "; gated delta nets: plain PyTorch, since flash-linear", True),
        ("qwen3_5_text", BF16, True, False, False, "NOT INSTALLED", True),
        ("qwen3_next", BF16, True, False, True, "; gated delta nets: plain PyTorch", False),  # it would not be used
        ("qwen3_next", FP32, True, False, False, "; gated delta nets: plain PyTorch", False),
        ("qwen3_next", BF16, False, False, False, "; gated delta nets: plain PyTorch", False),
        ("kimi_linear", BF16, True, True, False, "; Kimi delta attention: flash-linear-attention", False),
        ("minimax", BF16, True, True, False, "; lightning attention: flash-linear-attention", False),
        ("minimax", BF16, True, False, False, "NOT INSTALLED", True),
        ("lfm2", BF16, True, True, False, "; short convolutions: flash-linear-attention", False),
        ("granitemoehybrid", BF16, True, True, False, "; Mamba-2: flash-linear-attention", False),
        ("falcon_h1", BF16, True, False, False, "NOT INSTALLED", True),
        ("qwen3", BF16, True, False, False, "", False),
    ],
)  # fmt: skip
def test_flash_linear_attention_is_never_missed_silently(
    monkeypatch, family, dtype, on_gpu, installed, deterministic, text, warns
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: installed and name == "fla")
    about = tiny.config(family).to_dict()
    options = BuildOptions(deterministic_mode=deterministic, moe_permute_fusion=False)
    kernels = choose_kernels(options, family_of(about).describe(about), dtype)
    assert text in str(kernels)
    assert bool(kernels.mixers) == bool(text)
    assert ("NOT INSTALLED" in str(kernels)) == warns
    assert ["pip install flash-linear-attention" in line for line in kernels.warnings] == [True] * warns


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "installed", "text", "warns"),
    [
        (BF16, True, True, "; Mamba-2: mamba-ssm", False),
        (BF16, True, False, "; Mamba-2: plain PyTorch, since flash-linear-attention is NOT INSTALLED", True),
        (FP32, True, True, "; Mamba-2: plain PyTorch", False),
        (BF16, False, False, "; Mamba-2: plain PyTorch", False),
    ],
)
def test_mamba_ssm_is_preferred(monkeypatch, dtype, on_gpu, installed, text, warns):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: installed and name == "mamba_ssm")
    about = tiny.config("nemotron_h").to_dict() | {"time_step_limit": [0.0, 1.0]}
    kernels = choose_kernels(BuildOptions(moe_permute_fusion=False), family_of(about).describe(about), dtype)
    assert text in str(kernels)
    assert ("NOT INSTALLED" in str(kernels)) == warns
    assert ["this model's Mamba-2" in line for line in kernels.warnings] == [True] * warns


def test_attention_to_selected_keys_is_named():
    about = tiny.config("deepseek_v32").to_dict()
    kernels = choose_kernels(BuildOptions(), family_of(about).describe(about), FP32)
    assert "; of documents beyond 24 tokens: plain PyTorch, to selected keys" in str(kernels)


@pytest.mark.parametrize(
    ("family", "flags", "attention"),
    [
        ("qwen3", {}, "flash"),
        ("qwen3", {"attention_backend": "flash_4"}, "flash"),
        ("gpt_oss", {}, "flash"),  # sinks
        ("deepseek_v3", {}, "sdpa"),  # its heads have 18 and 14 dimensions
        ("qwen3", {"attention_backend": "local"}, "varlen"),
        ("qwen3", {"attention_backend": "flash_2"}, "varlen"),
        ("qwen3", {"attention_dropout": 0.1}, "varlen"),
        ("qwen3", {"context_parallel_size": 2}, "flash"),
        ("qwen3", {"context_parallel_size": 2, "cp_comm_type": "p2p"}, "varlen"),
    ],
)
def test_flash_attention_runs_where_it_supports_the_model(monkeypatch, family, flags, attention):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash_attention, "is_usable", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    about = tiny.config(family, head_dim=64).to_dict()
    kernels = choose_kernels(BuildOptions(moe_permute_fusion=False, **flags), family_of(about).describe(about), BF16)
    assert kernels.attention == attention
    assert ("FlashAttention-4" in str(kernels)) == (attention == "flash")
