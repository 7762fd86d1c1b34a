"""On a GPU: vLLM takes FP8 exports, and says what transformers does with their weights, as far as FP8 inputs allow.

pytest -m gpu tests/bridge/checkpoint/test_gpu.py      # vLLM starts once, for four models: three minutes
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.bridge.families import ROPE
from tests.prepared import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
BLOCK, DEVICE = 128, "cuda"
COMMON: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 1024, "rope_parameters": ROPE}
# Sizes of heads that vLLM's kernels take, and whole blocks.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "deepseek_v3": {
        "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 256,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "head_dim": 64,
        "num_mtp_layers": 0, "num_nextn_predict_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
PROMPTS = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 97, 160, 200)]


def save_model(folder: Path, family: str) -> None:
    """Write a model whose activations keep their size from layer to layer."""
    model = tiny.model(family, **COMMON, **SIZES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # of std 0.2
            if "norm" not in name and "embed_tokens" not in name and parameter.dim() > 1:
                parameter.mul_(5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)


def dequantize(folder: Path, out: Path) -> list[str]:
    """Write a checkpoint of FP8 blocks with plain fp32 weights. Return the modules that were quantized."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    plain, modules = {}, []
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        plain[name] = tensor.float()
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            rows, columns = tensor.shape
            plain[name] *= scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            modules.append(name.removesuffix(".weight"))
    out.mkdir()
    save_file(plain, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return modules


def to_fp8_and_back(inputs: torch.Tensor) -> torch.Tensor:
    """Round activations as FP8 layers do: each token's groups of 128 by their largest value."""
    groups = inputs.unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)


@torch.no_grad()
def log_probs(folder: Path, modules: list[str]) -> torch.Tensor:
    """Return transformers' log-probabilities of the prompts. modules: linear layers with inputs rounded to FP8"""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.to(DEVICE)
    for name, module in model.named_modules():
        if name in modules:
            module.register_forward_pre_hook(lambda _, inputs: (to_fp8_and_back(inputs[0]),))
    parts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        parts.append(model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(parts)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def by_vllm(root: Path) -> dict[str, list[float]]:
    """vLLM's log-probabilities of each FP8 export, and of one with a wrong scale."""
    folders = []
    for family in SIZES:
        save_model(root / family, family)
        words = f"-m megaswift.cli.main swift export --model {family} --quant_method fp8 --output_dir {family}-fp8"
        subprocess.run([sys.executable, *words.split()], cwd=root, check=True)
        shutil.copytree(root / f"{family}-fp8", root / f"{family}-wrong")
        for file in (root / f"{family}-wrong").glob("*.safetensors"):
            tensors = load_file(file)
            if (scales := tensors.get("model.layers.0.mlp.down_proj.weight_scale_inv")) is not None:
                scales[0, 0] *= 4
                save_file(tensors, file, {"format": "pt"})
        folders += [f"{family}-fp8", f"{family}-wrong"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/bridge/checkpoint/fp8_vllm_worker.py"), *folders],
        cwd=root,
        env=os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", SIZES)
def test_vllm_is_as_near_as_fp8_inputs_are(family: str, root: Path, by_vllm: dict[str, list[float]]) -> None:
    modules = dequantize(root / f"{family}-fp8", root / f"{family}-plain")
    expected = log_probs(root / f"{family}-plain", [])
    rounding = (log_probs(root / f"{family}-plain", modules) - expected).abs().mean()
    error, planted = ((torch.tensor(by_vllm[f"{family}-{kind}"]) - expected).abs().mean() for kind in ("fp8", "wrong"))
    print(f"{family}: vLLM {error:.4f}, FP8 inputs {rounding:.4f}, planted {planted:.4f}")
    assert 0.2 * rounding < error < 2 * rounding < planted
