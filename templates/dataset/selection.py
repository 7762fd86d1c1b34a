"""Selection of a source's rows: how many, which, and those that are set aside for evaluation."""

import numpy as np


def select_rows(available: int, total: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Return the rows of `total` to take, distinct and sorted; all if there are no more than that."""
    if shuffle and total < available:
        return np.sort(np.random.default_rng(seed).permutation(available)[:total])
    return np.arange(min(total, available))


def split_rows(rows: np.ndarray, ratio: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to train on, and those for evaluation (about the share `ratio`, at least one), both sorted."""
    order = random.permutation(rows)
    count = max(round(len(order) * ratio), 1)
    return np.sort(order[count:]), np.sort(order[:count])
