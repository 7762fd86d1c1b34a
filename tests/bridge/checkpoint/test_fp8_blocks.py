"""FP8 checkpoints in blocks: values against transformers' and a loop, files against transformers' model and vLLM."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.fp8_blocks import quantize_blocks
from megaswift.bridge.checkpoint.quantized import open_weights
from safetensors.torch import load_file, save_file

from tests import prepared, tiny

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
# transformers reads whole blocks only: of kv_a_proj_with_mqa too.
LATENT: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "q_lora_rank": 128, "kv_lora_rank": 128, "num_mtp_layers": 0,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 128, "qk_head_dim": 192, "v_head_dim": 64, "head_dim": 128,
}  # fmt: skip
DEEPSEEK_KEPT = {"model.layers.1.mlp.gate", "lm_head"}


def test_each_block_has_its_scale() -> None:
    """Each value to e4m3's nearest, of the block's scale; blocks at the edges are cut, one is zero."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 200, generator=generator) * torch.logspace(-6, 3, 300)[:, None]
    matrix[128:256, 128:] = 0
    values, scales = quantize_blocks(matrix)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (
        torch.float8_e4m3fn, (300, 200), torch.float32, (3, 2)
    )  # fmt: skip
    for row in range(3):
        for column in range(2):
            block = matrix[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            stored = values[128 * row : 128 * row + 128, 128 * column : 128 * column + 128].float()
            scale = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
            assert scales[row, column] == scale
            assert torch.equal(stored, (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())
            assert stored.abs().max() == (448 if block.any() else 0)


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    matrix = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=config)
    expected = Fp8Quantize(quantizer).convert({"a.weight": matrix})
    values, scales = quantize_blocks(matrix)
    torch.testing.assert_close(scales, expected["a.weight_scale_inv"], rtol=1e-6, atol=0)
    assert (values.float() != expected["a.weight"].float()).float().mean() < 1e-3  # their scale is rounded otherwise
    back = Fp8Dequantize(quantizer)._dequantize_one(values, scales)
    assert (back - matrix).abs().max() <= matrix.abs().max() / 448 * 16.01  # half of e4m3's widest step


def export(place: Path, words: str, processes: int | None = None) -> None:
    program = "swift" if processes is None else "megatron"
    done = prepared.run(
        f"-m megaswift.cli.main {program} export {words}".split(), processes=processes, cwd=place,
        environment=os.environ | {"HF_HOME": str(place / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(
        right[name].dtype == tensor.dtype and torch.equal(tensor.float(), right[name].float())
        for name, tensor in left.items()
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Tiny models of whole blocks."""
    folder = tmp_path_factory.mktemp("fp8")
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, family, sizes in (("qwen3", "qwen3", SIZES | heads), ("deepseek", "deepseek_v3", LATENT)):
        tiny.save_tokenizer(tiny.save(folder / name, family, **sizes))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", pytest.param("deepseek", marks=pytest.mark.long)])
def test_an_export_is_what_transformers_reads(name: str, place: Path) -> None:
    """Against the model in fp32: linear layers rounded to e4m3, everything else as it was."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import FineGrainedFP8Config

    export(place, f"--model {name} --quant_method fp8 --output_dir {name}-out")
    folder, plain = place / f"{name}-out", weights(place / name)
    stored, config = weights(folder), json.loads((folder / "config.json").read_text())
    quantized = {key for key, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    linear = {key for key, tensor in plain.items() if tensor.dim() == 2 and min(tensor.shape) >= 128}
    assert quantized == linear - {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(quantized) == (14 if name == "qwen3" else 40)
    assert stored.keys() == plain.keys() | {f"{key}_scale_inv" for key in quantized}
    settings = config["quantization_config"]
    assert settings.pop("modules_to_not_convert") == sorted({"lm_head"} if name == "qwen3" else DEEPSEEK_KEPT)
    assert settings == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    }  # fmt: skip
    read = open_weights(folder, config)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    experts = {f"model.layers.1.mlp.experts.{part}": value for part, value in experts_of(theirs)}
    parameters = theirs.state_dict() | experts
    for key, tensor in plain.items():
        ours = read.read(key, 0, 0, tensor.shape[0])
        torch.testing.assert_close(parameters[key].float(), ours, rtol=1e-6, atol=0)
        if key not in quantized:
            assert torch.equal(stored[key], tensor), key
        else:
            assert not torch.equal(ours, tensor)
            assert (ours - tensor).abs().max() <= tensor.abs().max() / 448 * 16.01, key

    # Read again in fp32, it is what was read; quantized again, the same.
    export(place, f"--model {name}-out --to_hf true --torch_dtype float32 --output_dir {name}-plain")
    assert "quantization_config" not in json.loads((place / f"{name}-plain" / "config.json").read_text())
    assert all(
        torch.equal(tensor, read.read(key, 0, 0, tensor.shape[0]))
        for key, tensor in weights(place / f"{name}-plain").items()
    )


def experts_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the matrices of transformers' fused experts by the checkpoint's names."""
    experts = getattr(model.model.layers[1].mlp, "experts", None)
    matrices = []
    for number in range(0 if experts is None else experts.num_experts):
        gate, up = experts.gate_up_proj[number].chunk(2)
        for name, matrix in (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down_proj[number])):
            matrices.append((f"{number}.{name}.weight", matrix))
    return matrices


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_every_layout_and_source_gives_the_same_file(name: str, place: Path) -> None:
    """TP2 splits blocks between ranks (64 rows each); from megatron-core's format; with ms-swift's flags."""
    line = "--quant_method fp8 --torch_dtype float32"
    export(place, f"--model {name} {line} --output_dir {name}-one")
    experts = "" if name == "qwen3" else "--expert_model_parallel_size 2"
    flags = "--to_hf true --fp8_recipe blockwise --fp8_format e4m3 --fp8_param_gather true"
    export(place, f"--model {name} {flags} --tensor_model_parallel_size 2 {experts} --output_dir {name}-tp2", 2)
    export(place, f"--model {name} --to_mcore true --output_dir {name}-mcore")
    export(place, f"--mcore_model {name}-mcore {line} --output_dir {name}-from-mcore")
    export(place, f"--model {name}-one {line} --output_dir {name}-again")
    for other in ("tp2", "from-mcore", "again"):
        assert same(place / f"{name}-one", place / f"{name}-{other}"), other
    assert (place / f"{name}-tp2" / "config.json").read_text() == (place / f"{name}-one" / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_stacked_experts(place: Path) -> None:
    """Qwen3.5's, in one tensor of all experts: a stack of scales beside it, which the bridge reads."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    tiny.save_tokenizer(tiny.save(place / "stacked", "qwen3_5_moe_text", **sizes))
    plain, names = weights(place / "stacked"), []
    for layer in range(4):
        experts = [f"model.layers.{layer}.mlp.experts.{number}." for number in range(8)]
        stacks = [[torch.cat([plain.pop(f"{expert}{part}_proj.weight") for part in parts]) for expert in experts]
                  for parts in (("gate", "up"), ("down",))]  # fmt: skip
        names.append(f"model.layers.{layer}.mlp.experts.gate_up_proj")
        plain |= {names[-1]: torch.stack(stacks[0]), names[-1].replace("gate_up", "down"): torch.stack(stacks[1])}
    save_file(plain, place / "stacked" / "model.safetensors", {"format": "pt"})
    export(place, "--model stacked --quant_method fp8 --output_dir stacked-out")
    stored = weights(place / "stacked-out")
    for name in names:
        for tensor in (name, name.replace("gate_up_proj", "down_proj")):
            experts, rows, columns = plain[tensor].shape
            assert stored[tensor].dtype == torch.float8_e4m3fn
            assert stored[tensor + "_scale_inv"].shape == (experts, -(-rows // 128), -(-columns // 128))
            for expert in range(experts):
                values, scales = quantize_blocks(plain[tensor][expert])
                assert torch.equal(stored[tensor][expert].float(), values.float())
                assert torch.equal(stored[tensor + "_scale_inv"][expert], scales)
    export(place, "--model stacked-out --quant_method fp8 --torch_dtype float32 --output_dir stacked-again")
    assert same(place / "stacked-out", place / "stacked-again")
