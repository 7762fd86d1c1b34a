"""Division of a step's samples over data-parallel ranks and micro batches by the time that their media take."""

import numpy as np


def deal_by_cost(samples: np.ndarray, costs: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Return a permutation of a step's samples in which costs are even.

    The ranks of a micro batch get samples of similar cost, because some layers wait for all ranks. A micro batch gets
    costly and cheap samples, so that none needs much more memory than the others.

    samples, costs: [global batch]
    shape: micro batches, ranks, and samples of a micro batch, in the order in which the result is read
    """
    micro_batches, ranks, size = shape
    # The costliest samples of each rank and micro batch, then the next ones, ...: each time in falling order.
    blocks = samples[np.argsort(-costs, kind="stable")].reshape(size, micro_batches, ranks)
    blocks[1::2] = blocks[1::2, ::-1, ::-1]
    blocks[:, 1::2] = blocks[:, 1::2, ::-1]
    return blocks.transpose(1, 2, 0).ravel()
