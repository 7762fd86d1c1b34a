"""Scaling of rewards before advantages: running normalization, clipping, and the difficulty of prompts. On the host."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

SMALLEST_DEVIATION = 1e-6  # is added to the running standard deviation


@dataclass
class RunningMoments:
    """Mean and variance of all values of a run so far, updated batch by batch (Chan et al., 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def update(self, values: np.ndarray) -> None:
        """Add values [any number]."""
        if not len(values):
            return
        added, total = len(values), self.count + len(values)
        distance = float(values.mean()) - self.mean
        self.squares += float(((values - values.mean()) ** 2).sum()) + distance**2 * self.count * added / total
        self.mean += distance * added / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Return the unbiased standard deviation; 0 for fewer than two values."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """Return the values' distances from the mean, in standard deviations."""
        return (values - self.mean) / (self.deviation + SMALLEST_DEVIATION)


def clip(values: np.ndarray, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Return values clipped to [-bound, bound], and where they were outside: [values] each. NaN stays NaN."""
    return np.clip(values, -bound, bound), np.abs(values) > bound


def is_within_difficulty(rewards: np.ndarray, groups: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return whether the mean reward of each completion's prompt lies between low and high: bool [completions].

    rewards [completions], NaN where no reward function scores one; groups [completions]: prompts' numbers. The bounds
    themselves are outside. A prompt without any reward is within.
    """
    is_within = np.ones(len(rewards), bool)
    for group in np.unique(groups):
        scores = rewards[(groups == group) & ~np.isnan(rewards)]
        is_within[groups == group] = not len(scores) or low < scores.mean() < high
    return is_within
