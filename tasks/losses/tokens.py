"""Losses of tokens. Sums, never means: the step divides by the global batch."""

from torch import Tensor


def cross_entropy(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Weighted negative log-likelihood, summed: log_probs and weights [rows, length] fp32 -> scalar."""
    return -(log_probs * weights).sum()
