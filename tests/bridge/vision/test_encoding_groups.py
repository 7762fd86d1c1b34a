"""Numbers of micro batches that a tower encodes together."""

from itertools import accumulate

import pytest
from megaswift.bridge.model.encoding_groups import count_evenly, count_kept


def groups(patches: list[int], limit: int) -> list[list[int]]:
    """Divide micro batches by their patches."""
    result = []
    while patches:
        count = count_evenly(list(accumulate(patches)), limit)
        result.append(patches[:count])
        patches = patches[count:]
    return result


@pytest.mark.parametrize(
    ("patches", "limit", "expected"),
    [
        ([10] * 16, 160, [[10] * 16]),
        ([10] * 16, 159, [[10] * 8] * 2),  # not 15 and 1
        ([10] * 16, 70, [[10] * 6, [10] * 5, [10] * 5]),
        ([10, 20, 30], 20, [[10], [20], [30]]),  # one micro batch may have more than the limit
        ([10, 20], 0, [[10], [20]]),
        ([0, 0, 10, 0, 10, 0], 15, [[0, 0, 10, 0], [10, 0]]),  # those without media come with others
        ([0, 0], 10, [[0, 0]]),
    ],
)
def test_encodings_of_a_step_have_similar_sizes(patches, limit, expected) -> None:
    assert groups(patches, limit) == expected


def test_activations_are_kept_while_there_is_room() -> None:
    ends = [10, 30, 30, 60]
    assert [count_kept(ends, room, limit=100) for room in (5, 10, 29, 30, 59, 1000)] == [0, 1, 1, 3, 3, 4]
    assert [count_kept(ends, 1000, limit) for limit in (5, 20, 30)] == [1, 1, 3]
