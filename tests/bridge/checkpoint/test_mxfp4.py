"""GPT-OSS's experts in MXFP4: against transformers' own unquantising, bit for bit."""

import json
from functools import partial

import pytest
import torch
from megaswift.bridge.checkpoint.quantized import open_weights
from safetensors.torch import load_file, save_file

from tests.bridge.families import Tiny, gpt_oss
from tests.bridge.families.test_families import one_process  # noqa: F401

MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
NAME = "mlp.experts.gate_up_proj"


def quantized(experts: int, outputs: int, groups: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes; scales from the least to the greatest (255 would be no number)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (experts, outputs, groups), dtype=torch.uint8, generator=generator)
    scales[0, :3, 0] = torch.tensor([0, 1, 254])
    return blocks, scales


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    return one.dtype == other.dtype == torch.bfloat16 and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture
def folder(tmp_path):
    """A folder with one tensor of three experts, [96, 10] each, and a bias; the tensor as transformers has it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = quantized(3, 10, 3)
    tensors = {NAME + "_blocks": blocks, NAME + "_scales": scales, NAME + "_bias": torch.randn(3, 10)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, convert_moe_packed_tensors(blocks, scales)


def test_slices(folder):
    path, whole = folder
    source = open_weights(path, MXFP4)
    assert {name: at.shape for name, at in source.tensors.items()} == {NAME: (3, 96, 10), NAME + "_bias": (3, 10)}
    parts = [(None, whole), *enumerate(whole)]
    for place, part in parts:
        for dim, length in enumerate(part.shape):
            for start in range(0, length, 1 if length < 96 else 7):
                for stop in range(start + 1, length + 1, 1 if length < 96 else 13):
                    for step in (1, 2):
                        found = source.read(NAME, dim, start, stop, place, step)
                        wanted = part.narrow(dim, start, stop - start)
                        wanted = wanted.movedim(dim, 0)[::step].movedim(0, dim)
                        assert found.shape == wanted.shape
                        assert same_bits(found, wanted), (place, dim, start, stop, step)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_blocks": (2, 4, 3, 16)}, "has w_blocks, and the folder has not both w_blocks and w_scales"),
        ({"w_blocks": (2, 4, 3, 16), "w_scales": (2, 4, 2)}, r"w_scales \[2, 4, 2\]: they are to be"),
        ({"w_blocks": (4, 3, 16), "w_scales": (4, 3)}, r"w_blocks has shape \[4, 3, 16\]"),
    ],
)
def test_blocks_and_scales_that_do_not_fit(tmp_path, tensors, message):
    made = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in tensors.items()}
    save_file(made, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path, MXFP4)


@pytest.mark.slow
def test_a_quantised_model_is_saved_unquantised(tmp_path, one_process):  # noqa: F811
    """As the folder that transformers makes of it, byte for byte, and without a word of MXFP4."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from tests.bridge.families import reference, worker

    model = reference.random_model(Tiny(partial(gpt_oss.config, hidden_size=64, intermediate_size=32)), seed=0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(plain)
    for name in list(plain):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = packed.pop(name).shape
            blocks, scales = quantized(experts, outputs, inputs // 32)
            scales = scales % 4 + 122
            packed |= {name + "_blocks": blocks, name + "_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config | MXFP4))
    save_file(packed, tmp_path / "packed" / "model.safetensors")

    loaded = worker.open_model(tmp_path / "packed", one_process, torch.bfloat16)
    saved = worker.save(loaded, tmp_path / "packed", tmp_path / "saved", torch.bfloat16, 10**9)
    assert saved.keys() == plain.keys()
    assert not [name for name in plain if not torch.equal(saved[name], plain[name])]
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
