"""Features of tiles put together, beside transformers' function: images of all shapes, at the published sizes."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.layers.tile_features import plan_indicators, plan_tile_features

from tests.bridge.vision.reference import anyres_layout, reduced_size

NEWLINE = -7.0


def packed(sizes: list[tuple[int, int]], features: list[torch.Tensor], tile: int, side: int, most: int) -> Any:
    """Return what transformers makes of the features of images."""
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    pinpoints = [[tile * rows, tile * columns] for rows in range(1, 6) for columns in range(1, 7)]
    vision = SimpleNamespace(image_size=tile, patch_size=tile // side)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints))
    arguments = features, torch.tensor(sizes), torch.full((3,), NEWLINE), f"anyres_max_{most}"
    return LlavaOnevisionModel.pack_image_features(model, *arguments)[0]


@pytest.mark.parametrize(("tile", "side", "most"), [(384, 27, 9), (42, 3, 2)])
def test_features_are_those_of_transformers(tile: int, side: int, most: int) -> None:
    """Of 40 images, some of which are reduced."""
    random_ = random.Random(tile)
    sizes = [(random_.randint(5, 4 * tile), random_.randint(5, 4 * tile)) for _ in range(38)]
    sizes += [(tile * 5, tile * 6), (tile, tile)]
    layouts = [anyres_layout(size, side, tile, 6) for size in sizes]
    features = [torch.randn(1 + layout[0] * layout[1], side**2, 3) for layout in layouts]
    expected = packed(sizes, features, tile, side, most)
    counts = [len(part) for part in expected]
    reduced = [reduced_size(height, width, side, most) for _, _, height, width in layouts]
    assert [side**2 + height * (width + 1) for height, width in reduced] == counts
    plain = [number for number, size in enumerate(reduced) if size == layouts[number][2:]]
    assert 0 < len(plain) < len(sizes)
    for chosen in (range(len(sizes)), plain):
        grids = torch.tensor([(len(features[number]), side, side) for number in chosen])
        values = (torch.tensor([of[number] for number in chosen]) for of in (layouts, counts))
        plan = plan_tile_features(grids, *values, most, torch.device("cpu"))
        of_tiles = torch.cat([features[number] for number in chosen]).flatten(0, 1)
        found = plan.apply(of_tiles, torch.full((1, 3), NEWLINE))
        wanted = torch.cat([expected[number] for number in chosen])
        assert (found - wanted).abs().max() < 1e-4
        assert (plan.weights is None) == torch.equal(found, wanted) == (chosen is plain)


@pytest.mark.parametrize("side", [27, 2])
def test_features_of_videos_are_those_of_transformers(side: int) -> None:
    """Of two videos beside an image."""
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    vision, half = SimpleNamespace(image_size=side * 4, patch_size=4), (side + 1) // 2
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    features = torch.randn(2 + 3 + 5, side**2, 3)
    newline = torch.full((1, 3), NEWLINE)
    videos = [LlavaOnevisionModel.apply_pooling(model, part).flatten(0, 1) for part in (features[2:5], features[5:])]
    grids = torch.tensor([(frames, side, side) for frames in (2, 3, 5)])
    layouts = torch.tensor([(1, 1, side, side), *[(-1, half, half, 0)] * 2])
    counts = torch.tensor([side**2 + side * (side + 1), *(len(video) + 1 for video in videos)])
    plan = plan_tile_features(grids, layouts, counts, 9, torch.device("cpu"))
    found = plan.apply(features.flatten(0, 1), newline)[int(counts[0]) :]
    assert (found - torch.cat([part for video in videos for part in (video, newline)])).abs().max() < 1e-5


def test_a_broken_image_has_as_many_features() -> None:
    grids, counts = torch.tensor([(3, 2, 2), (2, 2, 2)]), torch.tensor([19, 5])
    layouts = torch.zeros(2, 4, dtype=torch.int64)
    plan = plan_tile_features(grids, layouts, counts, 1, torch.device("cpu"))
    found = plan.apply(torch.arange(20.0)[:, None], torch.tensor([[NEWLINE]]))
    assert found.flatten().tolist() == [*range(12), *range(7), *range(12, 17)]


def test_a_broken_image_of_visual_words_has_as_many_features() -> None:
    """One beside it keeps the learned features around it."""
    grids, counts = torch.tensor([(3, 2, 2), (1, 4, 2)]), torch.tensor([19, 5])
    layouts = torch.tensor([(0, 0, 0, 0), (1, 1, 2, 1)])
    plan = plan_indicators(grids, layouts, counts, 2, torch.device("cpu"))
    found = plan.apply(torch.arange(5.0)[:, None], -torch.arange(1.0, 6.0)[:, None])
    assert found.flatten().tolist() == [*[0, 1, 2] * 6, 0, -1, 3, 4, -2, -5]
