"""A checkpoint in FP8 blocks, as DeepSeek-V3 comes: the model has its values unquantised, and goes out with them."""

import json
import shutil

import pytest

from tests.bridge import families
from tests.bridge.families.test_families import folder_of, one_process  # noqa: F401

pytestmark = pytest.mark.slow
BLOCK = (16, 12)  # divides few of the sizes


def quantised(matrix):
    """In e4m3 with a scale for each block, and what these are together."""
    import torch

    rows, columns = (-(-size // block) for size, block in zip(matrix.shape, BLOCK, strict=True))
    scales = torch.empty(rows, columns)
    stored, values = torch.empty_like(matrix, dtype=torch.float8_e4m3fn), torch.empty_like(matrix)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scales[row, column] = matrix[part].abs().max() / 448
            stored[part] = (matrix[part] / scales[row, column]).to(torch.float8_e4m3fn)
            values[part] = stored[part].float() * scales[row, column]
    return stored, scales, values


def test_a_model_in_fp8_blocks(tmp_path, folder_of, one_process):  # noqa: F811
    import torch
    from megaswift.bridge.checkpoint.hub import read_config
    from megaswift.bridge.checkpoint.save import save_weights
    from megaswift.bridge.mapping.local_params import collect_params
    from safetensors.torch import load_file, save_file

    from tests.bridge.families import worker

    assert "deepseek_v3" in families.tinies()
    source = folder_of("deepseek_v3") / "fp32"
    plain, fp8 = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = fp8[name] = tensor
        if tensor.ndim == 2 and not any(word in name for word in ("embed", "head", "gate.weight", "eh_proj")):
            fp8[name], fp8[name + "_scale_inv"], plain[name] = quantised(tensor)
    assert sum(name.endswith("_scale_inv") for name in fp8) > 30
    folders = {}
    for form, tensors in (("plain", plain), ("fp8", fp8)):
        folders[form] = tmp_path / form
        shutil.copytree(source, folders[form], ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, folders[form] / "model.safetensors")
    settings = read_config(source) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}
    (folders["fp8"] / "config.json").write_text(json.dumps(settings))

    ours, expected = (worker.open_model(folders[form], one_process, torch.float32) for form in ("fp8", "plain"))
    theirs = collect_params(expected.chunks)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in collect_params(ours.chunks).items())

    (tmp_path / "out").mkdir()
    settings = read_config(folders["fp8"])
    save_weights(ours.chunks, settings, folders["fp8"], tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=30_000)
    saved = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert saved.keys() == plain.keys()
    assert "quantization_config" not in read_config(tmp_path / "out")
    for name, tensor in saved.items():
        kept = "correction_bias" in name or name.endswith(
            (".eh_proj.weight", ".4.enorm.weight", ".4.shared_head.head.weight")
        )
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, plain[name].to(tensor.dtype)), name
