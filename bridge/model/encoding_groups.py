"""Numbers of micro batches that a tower encodes together.

All ranks of a replica compute the same numbers, from patches of all of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from .media_inputs import MediaInputs

# Patches that the tower takes at a time, unless one medium has more: where it is recomputed for a backward pass, and
# where there is none or activations are kept anyway. Also limits of a rank's micro batches that are encoded together.
CALL_PATCHES, FORWARD_CALL_PATCHES = 16384, 32768
FRAME_PATCHES = 4  # frames of a spectrogram that count as a patch in these limits


def patch_counts(batches: Sequence[MediaInputs | None]) -> list[int]:
    """Return the patches of each micro batch on all ranks of a replica. Frames of audios count too."""
    return [
        0 if batch is None else int(batch.grids.prod(1).sum() + batch.frames.sum() // FRAME_PATCHES)
        for batch in batches
    ]


def count_evenly(ends: list[int], limit: int) -> int:
    """Return how many of the first micro batches are encoded together: one, or some that have at most `limit` patches.

    ends: patches of each and those before it. As few encodings of all as the limit allows have similar sizes.
    """
    encodings = -(-ends[-1] // max(limit, 1))
    nearest = ends[bisect_left(ends, ends[-1] / max(encodings, 1))]
    return max(bisect_right(ends, min(nearest, limit)), 1)


def count_kept(ends: list[int], room: float, limit: int) -> int:
    """Return how many of the first micro batches are encoded together and keep their activations; 0: none.

    ends: as of `count_evenly`. room: patches whose activations fit into memory. limit: of an encoding, unless one micro
    batch has more
    """
    return bisect_right(ends, min(room, max(limit, ends[0])))
