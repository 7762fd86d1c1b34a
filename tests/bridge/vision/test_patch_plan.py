"""Plans of patches against the functions of transformers, for images, videos and both."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.layers.patch_plan import plan_patches
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.architecture import Projector, Vision
from torch.testing import assert_close
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)


def make_vision(**settings) -> Vision:
    return Vision(
        num_layers=1, hidden_size=48, ffn_hidden_size=64, num_heads=2, output_size=32, patch_size=14,
        temporal_patch_size=2, **{"merge_size": 2, **settings},
    )  # fmt: skip


def random_grids(seed: int, side: int) -> torch.Tensor:
    """Return grids of images and videos, some of one square, some thin, some larger than several windows."""
    rng = random.Random(seed)
    sizes = [(rng.choice([1, 1, 2, 3]), rng.randint(1, 14) * side, rng.randint(1, 14) * side) for _ in range(6)]
    return torch.tensor([(1, side, side), (2, side, 9 * side), *sizes])


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_positions_and_taps_equal_transformers(seed: int, side: int) -> None:
    vision, grids = make_vision(merge_size=side, grid_side=7), random_grids(seed, side)
    plan = plan_patches(grids, vision, torch.device("cpu"))
    positions = get_vision_position_ids(grids, side)
    frequencies = 1 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    angles = (positions.unsqueeze(-1) * frequencies).flatten(1).unsqueeze(1)
    assert_close(plan.cos, angles.cos(), atol=1e-6, rtol=0)
    assert_close(plan.sin, angles.sin(), atol=1e-6, rtol=0)
    bounds = get_vision_cu_seqlens(grids)
    assert plan.full.cu_seqlens.equal(bounds)
    assert plan.full.lengths == bounds.diff().tolist()
    assert plan.taps is not None
    assert plan.tap_weights is not None
    taps, weights = get_vision_interpolation_indices_and_weights(
        grids, 7, "bilinear", align_corners=True, spatial_merge_size=side
    )
    # Taps with a weight of zero may differ: compare what the patches take from each row of the table.
    shares, expected = (
        torch.zeros(len(taps), 49).scatter_add_(1, index, weight)
        for index, weight in ((plan.taps, plan.tap_weights), (taps, weights))
    )
    assert_close(shares, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("side", [1, 2])
def test_alternate_frequencies_equal_pixtral(side: int) -> None:
    from transformers import PixtralVisionConfig
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    rope: dict = {"rope_type": "axial", "rope_theta": 77.0}
    rotary = PixtralVisionRotaryEmbedding(
        PixtralVisionConfig(hidden_size=48, num_attention_heads=2, rope_parameters=rope)
    )
    grids = random_grids(0, side)
    cos, sin = rotary(torch.zeros(1), get_vision_position_ids(grids, side))
    vision = make_vision(merge_size=side, rope_alternates=True, rope_base=77.0)
    plan = plan_patches(grids, vision, torch.device("cpu"))
    assert_close(torch.cat((plan.cos, plan.cos), dim=-1)[:, 0], cos, atol=1e-6, rtol=0)
    assert_close(torch.cat((plan.sin, plan.sin), dim=-1)[:, 0], sin, atol=1e-6, rtol=0)


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_cubic_taps_equal_grid_sample(seed: int, side: int) -> None:
    """Position embeddings as GLM-4V's class resamples them, of tables larger and smaller than the images."""
    grids, table = random_grids(seed, side), torch.randn(7 * 7, 3)
    plan = plan_patches(grids, make_vision(merge_size=side, grid_side=7, interpolation="bicubic"), torch.device("cpu"))
    assert plan.taps is not None
    assert plan.tap_weights is not None
    sizes = grids[:, 1:].repeat_interleave(grids.prod(1), dim=0)
    places = ((get_vision_position_ids(grids, side) + 0.5) / sizes * 2 - 1).flip(1)
    planes = table.view(1, 7, 7, 3).permute(0, 3, 1, 2)
    expected = torch.nn.functional.grid_sample(
        planes, places[None, :, None], mode="bicubic", align_corners=False, padding_mode="border"
    )
    found = (table[plan.taps] * plan.tap_weights.unsqueeze(2)).sum(1)
    assert_close(found, expected[0, :, :, 0].t(), atol=1e-5, rtol=0)


GATED = {
    "grid_side": 5, "interpolation": "bicubic", "patch_norm": True, "gated_merger_size": 40, "layer_bias": False,
    "final_norm": True,
    "qkv_bias": False, "gated": True, "normalization": "RMSNorm", "activation": "silu",
}  # fmt: skip
PROJECTOR = {"patch_norm": True, "rope_alternates": True, "projector": Projector(1e-5, True, "gelu", True)}
TILES = {
    "grid_side": 5, "rope_base": None, "class_token": True, "layer_scale": True,
    "projector": Projector(1e-5, True, "gelu", False),
}  # fmt: skip
SETTINGS = {
    "taps": {"grid_side": 5, "deep_layers": (0,)},
    "windows": {"window": 56, "full_layers": (1,), "deep_layers": (0,)},
    "gated merger": GATED,
    "projector": PROJECTOR,
    "class tokens": TILES,
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_padding_changes_neither_features_nor_gradients(settings: dict) -> None:
    vision = replace(make_vision(**settings), num_layers=3)
    config = SimpleNamespace(params_dtype=torch.float64, attention_kernel="torch")
    torch.manual_seed(0)
    tower = TowerPart(vision, None, config, torch.device("cpu")).vision  # type: ignore[arg-type]
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    grids = random_grids(0, 2)
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14, dtype=torch.float64)
    results = []
    for step in (1, 37):
        plan = plan_patches(grids, vision, torch.device("cpu"), step)
        assert (len(patches) + plan.padding) % (4 * step) == 0
        features = tower.merge(tower.encode(patches, plan), plan)
        tower.zero_grad()
        (features * torch.linspace(-1, 1, features.numel(), dtype=torch.float64).view_as(features)).sum().backward()
        results.append((features.detach(), [parameter.grad for parameter in tower.parameters()]))
    (features, gradients), (padded_features, padded_gradients) = results
    assert plan.padding
    assert_close(padded_features, features, atol=1e-9, rtol=1e-9)
    for padded, gradient in zip(padded_gradients, gradients, strict=True):
        assert_close(padded, gradient, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("pixels", [56, 112])
@pytest.mark.parametrize("seed", range(3))
def test_windows_equal_transformers(seed: int, pixels: int) -> None:
    vision, grids = make_vision(window=pixels), random_grids(seed, 2)
    plan = plan_patches(grids, vision, torch.device("cpu"))
    index, bounds = get_vision_window_index(grids, 2, pixels, 14)
    patch_order = (index.unsqueeze(1) * 4 + torch.arange(4)).flatten()
    assert plan.windows is not None
    assert plan.windows.cu_seqlens.equal(bounds)
    assert plan.windows.lengths == bounds.diff().tolist()
    assert plan.patch_order is not None
    assert plan.patch_order.equal(patch_order)
    assert plan.feature_order is not None
    assert plan.feature_order.equal(index.argsort())
    rows = get_vision_position_ids(grids, 2)[patch_order, 0]
    assert_close(plan.cos[:, 0, 0], rows.float().cos(), atol=1e-6, rtol=0)  # the first frequency is 1
