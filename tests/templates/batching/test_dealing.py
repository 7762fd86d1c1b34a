"""Samples of a step, dealt to ranks and micro batches by cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.templates.batching.dealing import deal_by_cost


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)),
    seed=st.integers(0, 2**16),
)
def test_each_sample_is_dealt_once(shape, seed):
    generator = np.random.default_rng(seed)
    samples = generator.permutation(1000)[: np.prod(shape)]
    dealt = deal_by_cost(samples, generator.integers(0, 3, len(samples)), shape)
    assert sorted(dealt) == sorted(samples)


def test_by_hand():
    """Two micro batches of three ranks, two samples each; a sample's number is its cost."""
    samples = np.array([3, 11, 0, 7, 5, 9, 1, 10, 2, 8, 4, 6])
    dealt = deal_by_cost(samples, samples, (2, 3, 2))
    assert dealt.reshape(2, 3, 2).tolist() == [[[11, 0], [10, 1], [9, 2]], [[6, 5], [7, 4], [8, 3]]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_wait_less_for_each_other(size, ranks):
    """The time of a micro batch is that of its slowest rank."""
    generator = np.random.default_rng(0)
    shape = (8, ranks, size)
    costs = generator.integers(0, 5, np.prod(shape)) * generator.uniform(256, 1024, np.prod(shape))

    def waits(order: np.ndarray) -> tuple[float, float]:
        of_micro_batches = costs[order].reshape(shape).sum(2)
        of_ranks = of_micro_batches.sum(0)
        return of_micro_batches.max(1).sum() / of_micro_batches.mean(1).sum(), of_ranks.max() / of_ranks.mean()

    (before, sum_before), (after, sum_after) = (
        waits(np.arange(len(costs))),
        waits(deal_by_cost(np.arange(len(costs)), costs, shape)),
    )
    assert after - 1 < (before - 1) / 3
    assert sum_after - 1 < (sum_before - 1) / 2
