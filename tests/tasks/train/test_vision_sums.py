"""Log values of encoding, from micro batches with chosen costs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.tasks.observability.audio_flops import AudioFlops
from megaswift.tasks.observability.flops import Flops, VisionFlops
from megaswift.tasks.train.metrics import VisionSums
from megaswift.templates.batching.media_batch import CachedFeatures, MediaBatch

# Two FLOPs a patch, for each of 5 weights; neither attention nor mergers.
FLOPS = Flops(0, 0, vision=VisionFlops(5, 0, 0, 1, 0, 0, 4, trains_layers=False, trains_mergers=False))
SEEING: Any = SimpleNamespace(vision=True, audio=None)  # an architecture


def batch(sizes: list[int], encoders: list[int], is_read: list[bool] | None = None) -> SimpleNamespace:
    """A micro batch of images of these numbers of patches."""
    empty, cached = torch.empty(0), None
    if is_read is not None:
        cached = CachedFeatures([""] * len(is_read), torch.tensor(is_read), empty)
    grids, counts = torch.tensor([[1, 2, size // 2] for size in sizes]), torch.tensor(sizes) // 4
    values, positions = (empty, empty, empty), torch.zeros(sum(sizes) // 4)
    uses = torch.arange(len(sizes))
    media = MediaBatch(grids, empty, counts, torch.tensor(encoders), *values, uses, empty, positions, cached=cached)
    return SimpleNamespace(media=media)


def groups(tp: int, pp: int, rank: int = 0) -> SimpleNamespace:
    sizes, ranks = {"tp": tp, "cp": 1, "pp": pp}, {"tp": rank % tp, "cp": 0, "pp": rank // tp}

    def group(name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: sizes[name], rank=lambda: ranks[name])

    return SimpleNamespace(**{name: group(name) for name in sizes})


def test_the_imbalance_is_that_of_each_micro_batch() -> None:
    sums = VisionSums()
    batches = [batch([40, 20, 20], [0, 1, 2]), SimpleNamespace(media=None), batch([80, 40], [3, 0])]
    assert sums.add(batches, FLOPS, groups(2, 2)) == 10 * 200
    means = sums.means(2, SEEING)
    assert means["images"] == 2.5
    assert means["visual_tokens"] == 25
    assert means["vision_imbalance"] == pytest.approx((40 + 80) / (80 / 4 + 120 / 4))
    assert "cached_images" not in means


def test_one_rank_has_no_imbalance_and_counts_what_it_reads() -> None:
    sums = VisionSums()
    sums.add([batch([40, 20, 20], [1, 0, 1], [True, False])], FLOPS, groups(1, 2, rank=1))
    assert (sums.cached, sums.cached_flops) == (1, 400)
    alone = VisionSums()
    alone.add([batch([40, 20], [0, 0], [True, True])], FLOPS, groups(1, 1))
    assert alone.means(1, SEEING) == {"images": 2.0, "visual_tokens": 15.0, "cached_images": 2.0}


def test_audios_are_counted_by_themselves() -> None:
    """Of an image of 10 tokens and two audios, of which one is in two documents."""
    empty = torch.empty(0)
    audio = AudioFlops(0, 100, 13, 26, 3, 0, 0, 1, trains_layers=False, trains_mergers=False)
    media = MediaBatch(
        grids=torch.tensor([[1, 2, 20]]),
        frames=torch.tensor([200, 100]),
        counts=torch.tensor([10, 26, 13]),
        encoders=torch.tensor([0, 1, 0]),
        image_pixels=empty,
        video_pixels=empty,
        spectrograms=empty,
        uses=torch.tensor([0, 1, 1, 2]),
        context_ranks=empty,
        positions=torch.zeros(10 + 2 * 26 + 13),
    )
    sums = VisionSums()
    total = sums.add([SimpleNamespace(media=media)], replace(FLOPS, audio=audio), groups(2, 1))
    assert total == 10 * 40 + 6 * (26 + 13)
    both: Any = SimpleNamespace(vision=True, audio=True)
    assert sums.means(1, both) == {
        "images": 1.0, "visual_tokens": 10.0, "audios": 2.0, "audio_tokens": 65.0,
        "vision_imbalance": (400 + 78) / ((400 + 78 + 156) / 2),
    }  # fmt: skip
