"""INT4 of compressed-tensors: against values that are packed here by the format's definition, and by its package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.quantized import open_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bridge.families.test_families import one_process  # noqa: F401

GROUP = 8
WEIGHTS = {
    "num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": GROUP, "actorder": None,
    "dynamic": False,
}  # fmt: skip


def int4(**changes: Any) -> dict[str, Any]:
    """Return config.json's part as Kimi-K2-Thinking has it, but for the size of groups."""
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS | changes}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {"group_0": group},
        }
    }  # fmt: skip


def pack(values: Tensor) -> Tensor:
    """Pack integers from -8 to 7, [out, in], one by one."""
    words = []
    for row in values.tolist():
        starts = range(0, len(row), 8)
        numbers = [sum((value + 8) << 4 * place for place, value in enumerate(row[i : i + 8])) for i in starts]
        words.append([number - 2**32 if number >= 2**31 else number for number in numbers])
    return torch.tensor(words, dtype=torch.int32)


def quantized(name: str, outputs: int, inputs: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a matrix, and the matrix in bf16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, inputs // GROUP, generator=generator) * 0.1).bfloat16()
    whole = torch.stack([values[:, i] * scales[:, i // GROUP] for i in range(inputs)], 1)
    packed = {"_packed": pack(values), "_scale": scales, "_shape": torch.tensor([outputs, inputs])}
    return {name + end: tensor for end, tensor in packed.items()}, whole


def test_slices(tmp_path: Path) -> None:
    tensors, whole = quantized("w.weight", 5, 48)
    save_file(tensors | {"norm.weight": torch.randn(7)}, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, int4())
    assert {name: (at.shape, at.dtype) for name, at in source.tensors.items()} == {
        "w.weight": ((5, 48), torch.bfloat16),
        "norm.weight": ((7,), torch.float32),
    }
    for dim, length in enumerate(whole.shape):
        for start in range(length):
            for stop in range(start + 1, length + 1):
                for step in (1, 2):
                    found = source.read("w.weight", dim, start, stop, step=step)
                    wanted = whole.narrow(dim, start, stop - start).movedim(dim, 0)[::step].movedim(0, dim)
                    assert found.dtype == torch.bfloat16
                    assert torch.equal(found, wanted), (dim, start, stop, step)


def test_values_are_those_of_the_package(tmp_path: Path) -> None:
    """Where compressed-tensors is installed."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    from compressed_tensors.quantization import QuantizationArgs  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization.lifecycle import forward  # pyright: ignore[reportMissingImports]

    weight, settings = torch.randn(12, 64).bfloat16(), QuantizationArgs(**WEIGHTS)
    scales = (weight.float().unflatten(1, (-1, GROUP)).abs().amax(-1) / 7.5).bfloat16()
    points = torch.zeros_like(scales, dtype=torch.int8)
    values = forward.quantize(weight, scales, points, settings, dtype=torch.int8)
    packed = helpers.pack_to_int32(values, 4)
    assert torch.equal(packed, pack(values))
    tensors = {"w.weight_packed": packed, "w.weight_scale": scales, "w.weight_shape": torch.tensor([12, 64])}
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_weights(tmp_path, int4()).read("w.weight", 0, 0, 12)
    assert torch.equal(found, forward.dequantize(values, scales, points, settings))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bits": 8}, "has num_bits 8; known is"),
        ({"symmetric": False}, "has symmetric False"),
        ({"strategy": "channel", "group_size": None}, "has strategy 'channel', group_size None"),
        ({"actorder": "weight"}, "has actorder 'weight'"),
        ({"group_size": 12}, "has group_size 12"),
    ],
)
def test_other_forms_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_file(quantized("w.weight", 5, 48)[0], tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        open_weights(tmp_path, int4(**changes))
    config = int4()
    config["quantization_config"]["format"] = "int-quantized"
    with pytest.raises(ValueError, match="has format 'int-quantized'"):
        open_weights(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"w.weight_scale": None}, "known are w.weight_packed, .weight_scale and .weight_shape together"),
        ({"w.weight_zero_point": torch.zeros(1)}, "has w.weight_zero_point, and known are"),
        ({"w.weight_scale": torch.ones(5, 2)}, r"with shape \[5, 6\], and for scales \[5, 2\] of groups of 8"),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors = {name: t for name, t in (quantized("w.weight", 5, 48)[0] | changes).items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        open_weights(tmp_path, int4())


@pytest.mark.slow
@pytest.mark.parametrize("vision", [False, True])
def test_a_quantised_kimi_is_saved_unquantised(vision: bool, tmp_path: Path, one_process) -> None:  # noqa: F811
    """Kimi-K2.5 with its tower, whose text_config has the settings: the dequantized folder byte for byte."""
    from megaswift.bridge.checkpoint.load import load_weights
    from megaswift.bridge.checkpoint.pretrained import check_weights
    from megaswift.bridge.checkpoint.save import save_weights
    from megaswift.bridge.model.build import build_model

    from tests import tiny_vision
    from tests.bridge.families.worker import tensors_of

    folder = tiny_vision.FAMILIES["kimi_k25"](tmp_path / "packed")
    plain: dict[str, Tensor] = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    packed = dict(plain)
    for number, name in enumerate(sorted(plain)):
        if ".experts." in name and ".shared" not in name:
            parts, plain[name] = quantized(name, *packed.pop(name).shape, seed=number)
            packed |= parts
    assert len(packed) > len(plain)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= int4()
    (folder / "config.json").write_text(json.dumps(config))
    check_weights(folder)
    (tmp_path / "saved").mkdir()
    model = build_model(config, one_process, torch.bfloat16, vision=vision)
    load_weights(model.parts, config, folder)
    save_weights(model.parts, config, folder, tmp_path / "saved", dtype=torch.bfloat16, max_shard_bytes=10**9)
    saved = tensors_of(tmp_path / "saved")
    assert saved.keys() == plain.keys()
    assert not [name for name in plain if not torch.equal(saved[name], plain[name])]
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())["text_config"]
