"""Losses of tokens, as sums: the step divides by the global batch."""

from torch import Tensor


def cross_entropy(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weighted negative log-likelihoods: log_probs and weights [rows, length] fp32 -> scalar."""
    return -(log_probs * weights).sum()


def weigh_by_probability(log_probs: Tensor) -> Tensor:
    """Return log-probabilities times the probabilities, without gradients: DFT, https://arxiv.org/abs/2508.05629."""
    return log_probs * log_probs.detach().exp()
