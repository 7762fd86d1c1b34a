"""Mixture of datasets by probabilities: the order of `datasets.interleave_datasets`."""

from dataclasses import dataclass

import numpy as np

from ..options import DataOptions

DRAWN = 1000  # datasets that are drawn at a time, as `datasets` does


@dataclass(frozen=True)
class Mixture:
    """Rule by which samples are drawn from datasets.

    repeats: whether a dataset that is used up begins anew until all are; else the first one used up ends the mixture
    """

    probabilities: tuple[float, ...]
    repeats: bool
    seed: int

    @classmethod
    def of(cls, options: DataOptions) -> "Mixture | None":
        if not options.interleave_prob:
            return None
        return cls(tuple(options.interleave_prob), options.stopping_strategy == "all_exhausted", options.data_seed)

    def order(self, sizes: list[int]) -> np.ndarray:
        """Return the samples in order, by their number among those of all datasets of these sizes.

        Raises ValueError for an empty dataset.
        """
        if 0 in sizes:
            raise ValueError("--interleave_prob: one of --dataset has no sample that can be used. Remove it.")
        random, starts = np.random.default_rng(self.seed), np.cumsum([0, *sizes[:-1]])
        used = np.zeros(len(sizes), np.int64)  # samples drawn, of a dataset's successive passes
        is_used_up, drawn = np.zeros(len(sizes), bool), []
        is_finished = np.all if self.repeats else np.any
        while True:
            for number in random.choice(len(sizes), size=DRAWN, p=self.probabilities).tolist():
                if is_finished(is_used_up):
                    return np.array(drawn, np.int64)
                drawn.append(starts[number] + used[number] % sizes[number])
                used[number] += 1
                is_used_up[number] |= used[number] >= sizes[number]
