import time

import numpy as np
import pytest
from megaswift.templates.dataset.packing import pack, pack_evenly


def best_fit_decreasing(lengths, capacity) -> int:
    """Return the number of packs of the textbook's algorithm."""
    rooms = []
    for length in sorted(lengths.tolist(), reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            rooms.append(capacity - length)
        else:
            rooms[rooms.index(room)] -= length
    return len(rooms)


@pytest.mark.parametrize("longest", [16, 32, 64, 100])
@pytest.mark.parametrize("seed", range(3))
def test_as_good_as_the_textbook(longest, seed):
    lengths = np.random.default_rng(seed).integers(1, longest + 1, 500)
    packs = pack(lengths, 100, seed)
    assert sorted(packs.items.tolist()) == list(range(500))
    assert max(lengths[packs[i]].sum() for i in range(len(packs))) <= 100
    assert min(len(packs[i]) for i in range(len(packs))) > 0
    assert len(packs) == best_fit_decreasing(lengths, 100)


def test_fill_and_speed():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 1025, 1000)  # up to a quarter of the pack
    assert lengths.sum() / (4096 * len(pack(lengths, 4096))) >= 0.98
    million = random.integers(1, 8193, 10**6)
    start = time.process_time()
    pack(million, 8192)
    assert time.process_time() - start < 10


def test_the_seed_alone_decides():
    lengths = np.random.default_rng(0).integers(1, 20, 300)
    assert np.array_equal(pack(lengths, 64, 1).items, pack(lengths, 64, 1).items)
    assert not np.array_equal(pack(lengths, 64, 1).items, pack(lengths, 64, 2).items)


def test_edges():
    assert len(pack(np.array([], np.int64), 8)) == 0
    assert len(pack(np.array([8, 8]), 8)) == 2
    with pytest.raises(ValueError, match="a sample of 9 tokens does not fit into a pack of 8"):
        pack(np.array([9]), 8)


@pytest.mark.parametrize(("multiple", "count"), [(1, 3), (2, 4), (4, 4), (5, 5), (8, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_even_packs(multiple, count, seed):
    """Items of 2.2 times the capacity."""
    lengths = np.random.default_rng(seed).permutation([1, 2, 3, 4, 6, 7, 9, 12] * 5)
    capacity = 100
    assert lengths.sum() == 220
    packs = pack_evenly(lengths, capacity, multiple)
    assert sorted(packs.items.tolist()) == list(range(40))
    assert len(packs) == count
    assert max(lengths[members].sum() for members in packs) <= 1.05 * 220 / count
    assert max(lengths[members].sum() for members in pack(lengths, capacity)) > 1.2 * 220 / 3


def test_even_packs_of_few_items():
    assert len(pack_evenly(np.array([], np.int64), 8, 4)) == 0
    assert sorted(map(len, pack_evenly(np.array([5, 5, 1]), 8, 4))) == [1, 1, 1]
    with pytest.raises(ValueError, match="does not fit into a pack of 8"):
        pack_evenly(np.array([9]), 8)
