"""Losses of tokens, as sums: the step divides by the global batch."""

from torch import Tensor


def cross_entropy(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weighted negative log-likelihoods: log_probs and weights [rows, length] fp32 -> scalar."""
    return -(log_probs * weights).sum()
