"""Slow ranks are found among those that have the same work."""

import pytest
from megaswift.tasks.train.step_times import slow_ranks


@pytest.mark.parametrize(
    ("times", "groups", "named"),
    [
        ([1.0, 1.1, 1.0, 0.9], [[0, 1, 2, 3]], []),
        ([1.0, 1.1, 2.0, 0.9], [[0, 1, 2, 3]], [2]),
        ([1.0, 3.0, 2.0, 0.9], [[0, 1, 2, 3]], [1, 2]),
        ([1.0, 2.0, 1.0, 2.0], [[0, 2], [1, 3]], []),  # stages of a pipeline have other work
        ([1.0, 2.0, 1.6, 2.0], [[0, 2], [1, 3]], [2]),
        ([0.010, 0.019], [[0, 1]], []),  # milliseconds are noise
        ([0.0, 0.0], [[0, 1]], []),
        ([1.0, 2.0], [], []),
    ],
)
def test_slow_ranks(times: list[float], groups: list[list[int]], named: list[int]) -> None:
    text = slow_ranks([(seconds, seconds / 2) for seconds in times], groups)
    assert [int(part.split()[1]) for part in text.split("; ") if part.startswith("rank")] == named


def test_the_text() -> None:
    assert slow_ranks([(0.5, 0.1), (1.62, 1.1), (0.5, 0.1)], [[0, 1, 2]]) == (
        "rank 1 takes 1.62 s a step, 1.1 s of them for its data; the median of the ranks with the same work is 0.5 s"
    )
