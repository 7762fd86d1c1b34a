"""Gemma 4's tower in bf16 on a GPU, with each attention, against transformers' in fp32: features and gradients."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.patch_plan import plan_patches
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.mapping.param_mapping import expand_mappings
from torch import Tensor

from tests.bridge.vision.test_gpu import error
from tests.bridge.vision.test_tower import whole

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GRIDS = torch.tensor([[1, 30, 63], [1, 6, 9], [1, 48, 39], [1, 63, 63]])
SIDE, PATCH, OUTPUT = 3, 16, 256


def reference(hidden_size: int) -> tuple[dict[str, Any], Any]:
    """config.json, and transformers' model of one layer of text behind the tower."""
    from transformers import Gemma4Config, Gemma4Model

    tower = {
        "num_hidden_layers": 4, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size + 48,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": hidden_size // 4, "patch_size": PATCH,
        "pooling_kernel_size": SIDE, "position_embedding_size": 70, "standardize": True,
    }  # fmt: skip
    text = {
        "hidden_size": OUTPUT, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 100, "head_dim": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    }  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config=tower, audio_config=None)
    torch.manual_seed(0)
    model = Gemma4Model._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    for name, tensor in model.state_dict(keep_vars=True).items():
        mean = float("norm" in name or name.endswith("std_scale"))
        torch.nn.init.normal_(tensor.data, mean=mean, std=0.05)
        tensor.data.copy_(tensor.data.bfloat16())
    return config.to_dict() | {"architectures": ["Gemma4ForConditionalGeneration"]}, model.to(DEVICE)


def run_reference(model: Any, patches: Tensor, slopes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Features and gradients. The patches of an image are in our order: squares after each other."""
    model.zero_grad()
    pixels = patches.float().view(-1, 3, PATCH, PATCH).permute(0, 2, 3, 1).flatten(1) / 2 + 0.5
    lengths = GRIDS.prod(1).tolist()
    values = torch.zeros(len(lengths), max(lengths), pixels.shape[1], device=DEVICE)
    positions = torch.full((len(lengths), max(lengths), 2), -1)
    for number, part in enumerate(pixels.split(lengths)):
        _, height, width = GRIDS[number].tolist()
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        squares = places.view(height // SIDE, SIDE, width // SIDE, SIDE, 2).transpose(1, 2)
        values[number, : len(part)] = part
        positions[number, : len(part)] = squares.reshape(-1, 2)
    features = torch.cat(model.get_image_features(values, positions.to(DEVICE)).pooler_output)
    (features * slopes.to(features.dtype)).sum().backward()
    gradients = {f"model.{n}": p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return features.detach().float(), gradients


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("attention", ["transformer_engine", "torch"])
@pytest.mark.parametrize("hidden_size", [256, 288], ids=["64 dims", "72 dims"])
def test_tower_equals_transformers(hidden_size: int, attention: str, has_main_grad: bool) -> None:
    if attention == "transformer_engine":
        pytest.importorskip("transformer_engine.pytorch")
    config, model = reference(hidden_size)
    patches = torch.randn(int(GRIDS.prod(1).sum()), 3 * PATCH**2, device=DEVICE).bfloat16().float()
    slopes = torch.randn(len(patches) // SIDE**2, OUTPUT, device=DEVICE).bfloat16().float()
    features, gradients = run_reference(model, patches, slopes)
    bf16_features, bf16_gradients = run_reference(copy.deepcopy(model).bfloat16(), patches, slopes)

    family = family_of(config)
    architecture = family.describe(config, vision=True)
    assert architecture.vision
    settings: Any = SimpleNamespace(params_dtype=torch.bfloat16, attention_kernel=attention)
    part: Any = TowerPart(architecture.vision, None, settings, torch.device(DEVICE))
    weights = {f"model.{name}": tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}
    rows = expand_mappings(family, config, architecture, weights)
    tensors = collect_params([part])
    for key, tensor in tensors.items():
        tensor.data.copy_(whole(rows[key], weights, tuple(tensor.shape), architecture))
        if has_main_grad:
            tensor.main_grad = torch.zeros(tensor.shape, device=DEVICE)
    plan = plan_patches(GRIDS, architecture.vision, torch.device(DEVICE), squares_step=128)
    assert plan.padding
    output = part.vision.merge(part.vision.encode(patches.bfloat16(), plan), plan)[0]
    (output * slopes.bfloat16()).sum().backward()
    assert error(output.float(), features) < 1.2 * error(bf16_features, features) + 1e-3
    for key, tensor in tensors.items():
        if not tensor.requires_grad:
            continue
        is_accumulated = getattr(tensor, "grad_added_to_main_grad", False)
        gradient = tensor.main_grad if is_accumulated else tensor.grad.float()
        exact, half = (whole(rows[key], g, tuple(tensor.shape), architecture) for g in (gradients, bf16_gradients))
        assert error(gradient, exact) < 1.5 * error(half, exact) + 5e-3, key
