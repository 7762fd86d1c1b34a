"""Distillation loss: GKD, https://arxiv.org/abs/2306.13649."""

from torch import Tensor

from .tokens import cross_entropy


def distillation_loss(
    divergences: Tensor, weights: Tensor, loss_tokens: float, *, log_probs: Tensor | None = None, sft_alpha: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's share of the mean divergence over the trained tokens of the global batch, and its metrics.

    divergences [rows, length]: of the student from the teacher (bridge/layers/divergence.py)
    weights [rows, length]: loss weights of the tokens
    loss_tokens: sum of the weights over the global batch
    log_probs [rows, length]: of the labels, for off-policy answers; adds `sft_alpha` times the mean cross entropy
    """
    tokens = max(loss_tokens, 1.0)
    loss = (divergences * weights).sum() / tokens
    metrics = {"jsd": loss.detach()}
    if log_probs is not None and sft_alpha:
        nll_loss = cross_entropy(log_probs, weights) / tokens
        loss = loss + sft_alpha * nll_loss
        metrics["nll_loss"] = nll_loss.detach()
    return loss, {"loss": loss.detach()} | metrics
