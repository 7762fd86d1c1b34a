"""Quantised weights, read by slices: against the whole tensor times its scales, written out."""

import pytest
import torch
from megaswift.bridge.checkpoint.quantized import open_weights
from safetensors.torch import save_file

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 6]}}


@pytest.fixture
def folder(tmp_path):
    """A matrix and a stack of three in blocks whose last ones are cut, and a norm that is not quantised."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {
        "a.weight": random(11, 20).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": random(3, 4).exp(),
        "stack": random(3, 8, 7).to(torch.float8_e4m3fn),
        "stack_scale_inv": random(3, 2, 2).exp(),
        "norm.weight": random(20).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, tensors


def whole(matrix, scales):
    """Element (i, j) belongs to block (i // 4, j // 6)."""
    result = matrix.float().clone()
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[1]):
            result[i, j] *= scales[i // 4, j // 6]
    return result


def test_slices_of_fp8_blocks(folder):
    path, tensors = folder
    source = open_weights(path, FP8)
    assert source.tensors.keys() == {"a.weight", "stack", "norm.weight"}
    assert source.tensors["a.weight"].shape == (11, 20)
    wanted = whole(tensors["a.weight"], tensors["a.weight_scale_inv"])
    for dim, length in enumerate((11, 20)):
        for start in range(length):
            for stop in range(start + 1, length + 1):
                assert torch.equal(source.read("a.weight", dim, start, stop), wanted.narrow(dim, start, stop - start))
    for place in range(3):
        wanted = whole(tensors["stack"][place], tensors["stack_scale_inv"][place])
        assert torch.equal(source.read("stack", 0, 3, 8, place), wanted[3:])
        assert torch.equal(source.read("stack", 1, 2, 7, place), wanted[:, 2:])
    assert torch.equal(source.read("norm.weight", 0, 2, 9), tensors["norm.weight"][2:9])


def test_as_transformers_unquantises(tmp_path):
    """transformers' own class, which knows whole blocks only."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scales = torch.randn(8, 12).to(torch.float8_e4m3fn), torch.randn(2, 2).exp()
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    assert torch.equal(open_weights(tmp_path, FP8).read("w.weight", 0, 0, 8), theirs)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_that_are_powers_of_two(tmp_path, dtype):
    weight, scales = torch.randn(8, 12).to(torch.float8_e4m3fn), torch.tensor([[0.25, 2.0], [1.0, 2.0**-9]])
    stored = scales.to(torch.float8_e8m0fnu).view(dtype)
    save_file({"w.weight": weight, "w.weight_scale_inv": stored}, tmp_path / "model.safetensors")
    assert torch.equal(open_weights(tmp_path, FP8).read("w.weight", 0, 2, 8), whole(weight, scales)[2:])


def test_unquantised(folder):
    assert "a.weight_scale_inv" in open_weights(folder[0], {}).tensors


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "'fp8' without weight_block_size"),
        ({"bits": 4}, "quant_method None"),
    ],
)
def test_other_ways_are_refused_by_name(folder, quantization, message):
    with pytest.raises(ValueError, match=message):
        open_weights(folder[0], {"quantization_config": quantization})
    with pytest.raises(ValueError, match=message):  # as Kimi-K2.5 has it
        open_weights(folder[0], {"text_config": {"quantization_config": quantization}})


def test_scales_that_do_not_fit(tmp_path):
    weight = torch.zeros(8, 12).to(torch.float8_e4m3fn)
    save_file({"w.weight": weight, "w.weight_scale_inv": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"w.weight_scale_inv has shape \[2, 3\], .* it has \[2, 2\]"):
        open_weights(tmp_path, FP8)
    save_file({"w.weight_scale_inv": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor that it is for"):
        open_weights(tmp_path, FP8)
