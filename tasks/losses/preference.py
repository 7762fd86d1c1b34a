"""Losses of preference training: DPO and its relatives, KTO, reward models.

Log-probabilities are sums over an answer's tokens, fp32. The numbers are TRL's (1.16), with two differences: `sigmoid`
takes a label smoothing too (cDPO), and losses and gradients stay finite where the model is far from its reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# Scores grow exponentially with some divergences, and stand still from here on: squared (ipo), fp32 still holds them.
LARGEST_EXPONENT = 30.0


class Pairs(NamedTuple):
    """Log-probabilities of whole answers, and how many tokens they are sums of: [pairs] each."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


@dataclass(frozen=True)
class Dpo:
    """Settings of `dpo_losses`, by the flags' names."""

    beta: float = 0.1
    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] | None = None  # one for each loss type; None: 1 each
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    reference_free: bool = False  # a reference to which all answers are equally likely; the pairs' is not read

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """(loss type, weight), in the order given."""
        weights = (1.0,) * len(self.loss_type) if self.loss_weights is None else self.loss_weights
        return tuple(zip(self.loss_type, weights, strict=True))


class _Compared(NamedTuple):
    """A policy beside its reference, [pairs] each: log ratios, and the scores that an f-divergence makes of them."""

    pairs: Pairs
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    chosen: Tensor
    rejected: Tensor

    def logits(self, options: Dpo) -> Tensor:
        return options.beta * (self.chosen - self.rejected)


def _exponential_less_one(exponent: Tensor) -> Tensor:
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT))


def _score(ratio: Tensor, options: Dpo) -> Tensor:
    """f'(policy / reference) from the log ratio, but for a constant: f-DPO, https://arxiv.org/abs/2309.16240."""
    power = options.f_alpha_divergence_coef - 1.0
    match options.f_divergence_type:
        case "forward_kl":
            return -_exponential_less_one(-ratio)
        case "js_divergence":
            return math.log(2.0) + logsigmoid(ratio)
        case "alpha_divergence" if abs(power) >= 1e-6:
            return _exponential_less_one(power * ratio) / power
    return ratio  # the reverse KL, and the limit of the alpha divergence


def _compared(pairs: Pairs, options: Dpo) -> _Compared:
    if options.reference_free:
        pairs = pairs._replace(ref_chosen=torch.zeros_like(pairs.chosen), ref_rejected=torch.zeros_like(pairs.rejected))
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return _Compared(pairs, chosen, rejected, _score(chosen, options), _score(rejected, options))


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Cross entropy of "the chosen answer is the better one", which is wrong with probability `smoothing`."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _sigmoid(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2305.18290, equation 7; smoothed: cDPO, https://ericmitchell.ai/cdpo.pdf."""
    return _smoothed(found.logits(options), options.label_smoothing)


def _hinge(found: _Compared, options: Dpo) -> Tensor:
    """SLiC, https://arxiv.org/abs/2305.10425, as https://arxiv.org/abs/2309.06657 has it beside DPO."""
    return torch.relu(1 - found.logits(options))


def _by_token(found: _Compared) -> Tensor:
    """Return the difference of scores, each divided by its answer's tokens."""
    chosen_tokens, rejected_tokens = found.pairs.chosen_tokens.clamp(min=1), found.pairs.rejected_tokens.clamp(min=1)
    return found.chosen / chosen_tokens - found.rejected / rejected_tokens


def _ipo(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2310.12036, equation 17, with means over tokens as TRL has it; beta is the paper's tau."""
    return (_by_token(found) - 1 / (2 * options.beta)) ** 2


def _sigmoid_norm(found: _Compared, options: Dpo) -> Tensor:
    """DPO with length normalisation, https://arxiv.org/abs/2411.15124 (Tulu 3)."""
    return -logsigmoid(options.beta * _by_token(found))


def _exo_pair(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2402.00856, equation 16: the KL of the policy's preference from the smoothed one."""
    logits, smoothing = found.logits(options), options.label_smoothing
    right = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-smoothing))
    wrong = torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(smoothing))
    return right + wrong


def _nca_pair(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2402.05369, for two answers of which one is chosen."""
    chosen, rejected = options.beta * found.chosen_ratio, options.beta * found.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2403.00409: unbiased where labels are flipped with probability `label_smoothing`."""
    logits, flipped = found.logits(options), options.label_smoothing
    return (flipped * logsigmoid(-logits) - (1 - flipped) * logsigmoid(logits)) / (1 - 2 * flipped)


def _bco_pair(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2404.04656, without its shift of rewards."""
    return -logsigmoid(options.beta * found.chosen_ratio) - logsigmoid(-options.beta * found.rejected_ratio)


def _sppo_hard(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2405.00675, equation 4.7, where the chosen answer surely wins."""
    half = 0.5 / options.beta
    return (found.chosen_ratio - half) ** 2 + (found.rejected_ratio + half) ** 2


def _aot(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.05882: the sorted margins of the policy against those of the reference."""
    pairs = found.pairs
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return _smoothed(options.beta * (policy.sort().values - reference.sort().values), options.label_smoothing)


def _aot_unpaired(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.05882: sorted log ratios of the chosen answers against those of the rejected."""
    margins = found.chosen_ratio.sort().values - found.rejected_ratio.sort().values
    return _smoothed(options.beta * margins, options.label_smoothing)


def _apo_zero(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2408.06266, equation 7: chosen answers are better than what the model says."""
    return torch.sigmoid(-options.beta * found.chosen_ratio) + torch.sigmoid(options.beta * found.rejected_ratio)


def _apo_down(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2408.06266, equation 8: chosen answers too are worse than what the model says."""
    margin = found.chosen_ratio - found.rejected_ratio
    return torch.sigmoid(options.beta * found.chosen_ratio) + torch.sigmoid(-options.beta * margin)


def _discopop(found: _Compared, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.08414, equation 5: logistic where the policy is wrong, else exponential."""
    logits = found.logits(options)
    right = logits / options.discopop_tau
    exponential = (logsigmoid(right) - logits).clamp(max=LARGEST_EXPONENT).exp()  # in one exponent: no 0 x infinity
    return -logsigmoid(logits) * torch.sigmoid(-right) + exponential


_DPO: dict[str, Callable[[_Compared, Dpo], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
LOSS_TYPES = (*_DPO, "sft")


def dpo_losses(pairs: Pairs, options: Dpo) -> Tensor:
    """Return each pair's sum over loss types of weight x loss: [pairs]. `sft` is per token, and 0 here.

    The aot losses are of all pairs together: what they sort are these pairs, and only their sum means something.
    Label smoothing must be above 0 for exo_pair, below 0.5 for robust.
    """
    compared = _compared(pairs, options)
    total = torch.zeros_like(pairs.chosen)
    for name, weight in options.terms:
        if name != "sft":
            total = total + weight * _DPO[name](compared, options)
    return total


def dpo_rewards(pairs: Pairs, options: Dpo) -> tuple[Tensor, Tensor]:
    """beta x log ratio of the chosen and of the rejected answers, [pairs] each, without gradients: for the log."""
    compared = _compared(pairs, options)
    return options.beta * compared.chosen_ratio.detach(), options.beta * compared.rejected_ratio.detach()


def kto_kl(policy: Tensor, ref: Tensor) -> Tensor:
    """Return KTO's estimate of the KL divergence, [samples] without gradients: log ratios of mismatched answers.

    `kto_losses` takes their mean over the global batch, 0 where that is below 0.
    """
    return (policy - ref).detach()


def kto_losses(
    log_probs: Tensor,
    ref: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO, https://arxiv.org/abs/2402.01306 equation 7, or `apo_zero_unpaired`, the same with no KL
    (https://arxiv.org/abs/2408.06266 equation 7, an answer at a time): [samples].

    log_probs, ref [samples]: sums over each answer; desirable [samples] bool; kl: scalar, not below 0.
    """
    if loss_type not in ("kto", "apo_zero_unpaired"):
        raise ValueError(f"--loss_type {loss_type}: KTO has kto and apo_zero_unpaired.")
    origin = kl if loss_type == "kto" else 0.0
    rewards = beta * (log_probs - ref - origin)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(torch.where(desirable, -rewards, rewards))


def reward_losses(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None, center_rewards_coefficient: float | None
) -> Tensor:
    """Bradley-Terry over scalar rewards, [pairs] each: https://arxiv.org/abs/2203.02155 equation 1.

    margins [pairs]: by how much the chosen one should win (https://arxiv.org/abs/2307.09288, equation 2); the
    coefficient keeps rewards around 0 (https://arxiv.org/abs/2312.09244, equation 2).
    """
    difference = chosen - rejected
    losses = -logsigmoid(difference if margins is None else difference - margins)
    if center_rewards_coefficient is not None:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return losses
