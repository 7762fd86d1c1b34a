"""Losses of preference training: DPO and its variants, ORPO, CPO, SimPO, KTO, reward models.

Log-probabilities are sums over an answer's tokens, fp32. Values agree with TRL's (1.16), with two differences:
`sigmoid` supports label smoothing (cDPO), and losses and gradients stay finite far from the reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# Scores of some divergences are exponentials. This bound on exponents keeps even squared scores (ipo) finite in fp32.
LARGEST_EXPONENT = 30.0


class Pairs(NamedTuple):
    """Log-probabilities of whole answers, and their numbers of tokens: [pairs] each."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


@dataclass(frozen=True)
class Dpo:
    """Settings of `dpo_losses`, named as the flags."""

    beta: float = 0.1
    loss_type: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] | None = None  # per loss type; None: 1 each
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    reference_free: bool = False  # all answers are equally likely under the reference; ref_* of pairs are ignored

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Pairs (loss type, weight) in order."""
        weights = (1.0,) * len(self.loss_type) if self.loss_weights is None else self.loss_weights
        return tuple(zip(self.loss_type, weights, strict=True))


class _LogRatios(NamedTuple):
    """Log ratios of policy to reference, and their scores under the f-divergence: [pairs] each."""

    pairs: Pairs
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    chosen_score: Tensor
    rejected_score: Tensor

    def logits(self, options: Dpo) -> Tensor:
        return options.beta * (self.chosen_score - self.rejected_score)


def _clamped_expm1(exponent: Tensor) -> Tensor:
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT))


def _score(ratio: Tensor, options: Dpo) -> Tensor:
    """Return f'(policy / reference) up to a constant, from the log ratio: f-DPO, https://arxiv.org/abs/2309.16240."""
    power = options.f_alpha_divergence_coef - 1.0
    match options.f_divergence_type:
        case "forward_kl":
            return -_clamped_expm1(-ratio)
        case "js_divergence":
            return math.log(2.0) + logsigmoid(ratio)
        case "alpha_divergence" if abs(power) >= 1e-6:
            return _clamped_expm1(power * ratio) / power
    return ratio  # the reverse KL, and the limit of the alpha divergence


def _log_ratios(pairs: Pairs, options: Dpo) -> _LogRatios:
    if options.reference_free:
        pairs = pairs._replace(ref_chosen=torch.zeros_like(pairs.chosen), ref_rejected=torch.zeros_like(pairs.rejected))
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return _LogRatios(pairs, chosen, rejected, _score(chosen, options), _score(rejected, options))


def _smoothed_loss(logits: Tensor, smoothing: float) -> Tensor:
    """Return the cross entropy of the preference label, which is wrong with probability `smoothing`."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _sigmoid(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2305.18290, equation 7; smoothed: cDPO, https://ericmitchell.ai/cdpo.pdf."""
    return _smoothed_loss(ratios.logits(options), options.label_smoothing)


def _hinge(ratios: _LogRatios, options: Dpo) -> Tensor:
    """SLiC, https://arxiv.org/abs/2305.10425, in the form of https://arxiv.org/abs/2309.06657."""
    return torch.relu(1 - ratios.logits(options))


def _length_normalized_margin(ratios: _LogRatios) -> Tensor:
    """Return the difference of scores, each divided by its answer's number of tokens."""
    chosen_tokens, rejected_tokens = ratios.pairs.chosen_tokens.clamp(min=1), ratios.pairs.rejected_tokens.clamp(min=1)
    return ratios.chosen_score / chosen_tokens - ratios.rejected_score / rejected_tokens


def _ipo(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2310.12036, equation 17, with means over tokens as in TRL; beta is the paper's tau."""
    return (_length_normalized_margin(ratios) - 1 / (2 * options.beta)) ** 2


def _sigmoid_norm(ratios: _LogRatios, options: Dpo) -> Tensor:
    """DPO with length normalisation, https://arxiv.org/abs/2411.15124 (Tulu 3)."""
    return -logsigmoid(options.beta * _length_normalized_margin(ratios))


def _exo_pair(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2402.00856, equation 16: the KL of the policy's preference from the smoothed one."""
    logits, smoothing = ratios.logits(options), options.label_smoothing
    right = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-smoothing))
    wrong = torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(smoothing))
    return right + wrong


def _nca_pair(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2402.05369, for two answers, one of them chosen."""
    chosen, rejected = options.beta * ratios.chosen_ratio, options.beta * ratios.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _robust(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2403.00409: unbiased where labels are flipped with probability `label_smoothing`."""
    logits, flipped = ratios.logits(options), options.label_smoothing
    return (flipped * logsigmoid(-logits) - (1 - flipped) * logsigmoid(logits)) / (1 - 2 * flipped)


def _bco_pair(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2404.04656, without its shift of rewards."""
    return -logsigmoid(options.beta * ratios.chosen_ratio) - logsigmoid(-options.beta * ratios.rejected_ratio)


def _sppo_hard(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2405.00675, equation 4.7, with a certain win of the chosen answer."""
    half = 0.5 / options.beta
    return (ratios.chosen_ratio - half) ** 2 + (ratios.rejected_ratio + half) ** 2


def _aot(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.05882: the sorted margins of the policy against those of the reference."""
    pairs = ratios.pairs
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return _smoothed_loss(options.beta * (policy.sort().values - reference.sort().values), options.label_smoothing)


def _aot_unpaired(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.05882: sorted log ratios of the chosen answers against those of the rejected."""
    margins = ratios.chosen_ratio.sort().values - ratios.rejected_ratio.sort().values
    return _smoothed_loss(options.beta * margins, options.label_smoothing)


def _apo_zero(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2408.06266, equation 7: chosen answers are better than the model's."""
    return torch.sigmoid(-options.beta * ratios.chosen_ratio) + torch.sigmoid(options.beta * ratios.rejected_ratio)


def _apo_down(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2408.06266, equation 8: chosen answers too are worse than the model's."""
    margin = ratios.chosen_ratio - ratios.rejected_ratio
    return torch.sigmoid(options.beta * ratios.chosen_ratio) + torch.sigmoid(-options.beta * margin)


def _discopop(ratios: _LogRatios, options: Dpo) -> Tensor:
    """https://arxiv.org/abs/2406.08414, equation 5: logistic where the policy is wrong, else exponential."""
    logits = ratios.logits(options)
    right = logits / options.discopop_tau
    exponential = (logsigmoid(right) - logits).clamp(max=LARGEST_EXPONENT).exp()  # a single exponent avoids 0 x inf
    return -logsigmoid(logits) * torch.sigmoid(-right) + exponential


_DPO: dict[str, Callable[[_LogRatios, Dpo], Tensor]] = {
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
    """Return the weighted sum of each pair's losses over loss types: [pairs]. `sft` is per token, and 0 here.

    The aot losses sort all pairs given, so only the sum over pairs is meaningful. Label smoothing must be above 0 for
    exo_pair, below 0.5 for robust.
    """
    ratios = _log_ratios(pairs, options)
    total = torch.zeros_like(pairs.chosen)
    for name, weight in options.terms:
        if name != "sft":
            total = total + weight * _DPO[name](ratios, options)
    return total


def dpo_rewards(pairs: Pairs, options: Dpo) -> tuple[Tensor, Tensor]:
    """Return the rewards (beta x log ratio) of chosen and rejected answers for the log: [pairs] each, no gradients."""
    ratios = _log_ratios(pairs, options)
    return options.beta * ratios.chosen_ratio.detach(), options.beta * ratios.rejected_ratio.detach()


class OrpoTerms(NamedTuple):
    """Terms of ORPO without the chosen answers' cross-entropy: [pairs] each."""

    losses: Tensor  # weighted by beta
    log_odds: Tensor  # how much likelier the chosen answer is, in log odds
    log_odds_ratio: Tensor  # log sigmoid of these


def orpo_terms(chosen: Tensor, rejected: Tensor, beta: float) -> OrpoTerms:
    """Return the odds ratio's loss and what the log has of it: https://arxiv.org/abs/2403.07691, equation 7.

    chosen, rejected [pairs]: mean log-probabilities over the tokens of each answer.
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = logsigmoid(log_odds)
    return OrpoTerms(-beta * ratio, log_odds, ratio)


def _log1mexp(log_prob: Tensor) -> Tensor:
    """Return log(1 - exp(log_prob)) without cancellation, and finite where the probability rounds to 1."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    is_likely = log_prob > -math.log(2.0)
    # Each branch gets only what it can take: `where` multiplies the other one's gradient by 0.
    likely, unlikely = log_prob.clamp(min=-math.log(2.0)), log_prob.clamp(max=-math.log(2.0))
    return torch.where(is_likely, torch.log(-torch.expm1(likely)), torch.log1p(-torch.exp(unlikely)))


@dataclass(frozen=True)
class Cpo:
    """Settings of `cpo_losses`, named as the flags."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    simpo_gamma: float = 1.0

    @property
    def compares_means(self) -> bool:
        """Whether log-probabilities are means over an answer's tokens instead of sums."""
        return self.loss_type in ("simpo", "ipo")


def cpo_losses(chosen: Tensor, rejected: Tensor, options: Cpo) -> Tensor:
    """Return the loss of each pair, without the chosen answers' cross-entropy: [pairs].

    sigmoid: CPO, https://arxiv.org/abs/2401.08417, equation 3; simpo: https://arxiv.org/abs/2405.14734, equation 6;
    hinge and ipo: as in DPO, without a reference.
    chosen, rejected [pairs]: log-probabilities of the answers, means where `options.compares_means`.
    """
    margin = chosen - rejected
    match options.loss_type:
        case "sigmoid":
            return _smoothed_loss(options.beta * margin, options.label_smoothing)
        case "simpo":
            return _smoothed_loss(options.beta * margin - options.simpo_gamma, options.label_smoothing)
        case "hinge":
            return torch.relu(1 - options.beta * margin)
        case "ipo":
            return (margin - 1 / (2 * options.beta)) ** 2
    raise ValueError(f"--loss_type {options.loss_type}: CPO has sigmoid, hinge, ipo and simpo.")


def kto_kl(policy: Tensor, ref: Tensor) -> Tensor:
    """Return the log ratios of mismatched answers, KTO's estimates of the KL divergence: [samples], no gradients.

    `kto_losses` takes their mean over the global batch, clamped at 0 from below.
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
    """Return the loss of each sample: [samples].

    `kto`: https://arxiv.org/abs/2402.01306, equation 7. `apo_zero_unpaired`: the same without the KL
    (https://arxiv.org/abs/2408.06266, equation 7, per answer).

    log_probs, ref [samples]: sums over each answer; desirable [samples] bool; kl: scalar, at least 0.
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
    """Return the Bradley-Terry loss of scalar rewards, [pairs] each: https://arxiv.org/abs/2203.02155, equation 1.

    margins [pairs]: desired reward differences (https://arxiv.org/abs/2307.09288, equation 2); the coefficient keeps
    rewards near 0 (https://arxiv.org/abs/2312.09244, equation 2).
    """
    difference = chosen - rejected
    losses = -logsigmoid(difference if margins is None else difference - margins)
    if center_rewards_coefficient is not None:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return losses
