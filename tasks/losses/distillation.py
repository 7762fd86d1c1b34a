"""Losses of students that learn from a teacher: GKD, https://arxiv.org/abs/2306.13649."""

from torch import Tensor

from .tokens import cross_entropy


def distillation_loss(
    divergences: Tensor, weights: Tensor, loss_tokens: float, *, log_probs: Tensor | None = None, sft_alpha: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's share of the mean divergence over the trained tokens of the global batch, and its metrics.

    divergences [rows, length]: of the student from the teacher (bridge/layers/divergence.py); weights [rows, length]:
    of the tokens; loss_tokens: their sum over the global batch. `sft_alpha` times the mean cross entropy of the labels
    is added where `log_probs` [rows, length] of them are given: of answers that the student has not written itself.
    """
    tokens = max(loss_tokens, 1.0)
    loss = (divergences * weights).sum() / tokens
    metrics = {"jsd": loss.detach()}
    if log_probs is not None and sft_alpha:
        likelihood = cross_entropy(log_probs, weights) / tokens
        loss = loss + sft_alpha * likelihood
        metrics["nll_loss"] = likelihood.detach()
    return loss, {"loss": loss.detach()} | metrics
