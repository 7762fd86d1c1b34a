"""Estimates of the KL divergence of a policy from its reference, by token, and the adaptive coefficient of a penalty.

k1, k2 and k3 are those of http://joschu.net/blog/kl-approx.html.
"""

from torch import Tensor

LARGEST_EXPONENT = 30.0  # above it k3 stays what it is there: finite, with a gradient of 0
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
LARGEST_ERROR = 0.2  # relative distance from the target that the coefficient answers to


def kl_estimates(log_probs: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(policy | reference) from each token: [tokens].

    log_probs, ref [tokens]: log-probabilities of tokens that the policy drew. With d = log_probs - ref:
    k1: d, unbiased; k2: d^2 / 2, whose gradient is unbiased; k3: exp(-d) + d - 1, unbiased and never below 0;
    abs: the absolute value of d.
    """
    match estimator:
        case "k1":
            return log_probs - ref
        case "k2":
            return (log_probs - ref).square() / 2
        case "k3":
            difference = (ref - log_probs).clamp(max=LARGEST_EXPONENT)
            return difference.expm1() - difference
        case "abs":
            return (log_probs - ref).abs()
    raise ValueError(f"--kl_estimator {estimator}: it has {', '.join(KL_ESTIMATORS)}.")


def adapted_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, completions: int) -> float:
    """Return the coefficient of the KL penalty for the next rollout batch: larger where the divergence is.

    kl: divergence of this batch, as `target`. horizon: completions after which the coefficient has moved by as much as
    its relative distance from the target, which counts as LARGEST_ERROR at most.
    Source: https://arxiv.org/abs/1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * completions / horizon)
