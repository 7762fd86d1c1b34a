"""Log values of encoding, from micro batches with chosen costs."""

from types import SimpleNamespace

import pytest
import torch
from megaswift.tasks.observability.flops import VisionFlops
from megaswift.tasks.train.metrics import VisionSums
from megaswift.templates.batching.media_batch import CachedFeatures, MediaBatch

# Two FLOPs a patch, for each of 5 weights; neither attention nor mergers.
FLOPS = VisionFlops(5, 0, 0, 1, 0, 0, 4, trains_layers=False, trains_mergers=False)


def batch(sizes: list[int], encoders: list[int], is_read: list[bool] | None = None) -> SimpleNamespace:
    """A micro batch of images of these numbers of patches."""
    empty, cached = torch.empty(0), None
    if is_read is not None:
        cached = CachedFeatures([""] * len(is_read), torch.tensor(is_read), empty)
    grids = torch.tensor([[1, 2, size // 2] for size in sizes])
    positions = torch.zeros(sum(sizes) // 4)
    return SimpleNamespace(
        media=MediaBatch(grids, torch.tensor(encoders), empty, empty, empty, empty, positions, cached=cached)
    )


def groups(tp: int, pp: int, rank: int = 0) -> SimpleNamespace:
    sizes, ranks = {"tp": tp, "cp": 1, "pp": pp}, {"tp": rank % tp, "cp": 0, "pp": rank // tp}

    def group(name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: sizes[name], rank=lambda: ranks[name])

    return SimpleNamespace(**{name: group(name) for name in sizes})


def test_the_imbalance_is_that_of_each_micro_batch() -> None:
    sums = VisionSums()
    batches = [batch([40, 20, 20], [0, 1, 2]), SimpleNamespace(media=None), batch([80, 40], [3, 0])]
    assert sums.add(batches, FLOPS, groups(2, 2)) == 10 * 200
    means = sums.means(steps=2)
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
    assert alone.means(1) == {"images": 2.0, "visual_tokens": 15.0, "cached_images": 2.0}
