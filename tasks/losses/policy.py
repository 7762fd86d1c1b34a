"""Losses of policies that are trained on their own completions: GRPO and its relatives.

The tokens of a micro batch lie in a row, [tokens], whatever samples they are of. Under context parallelism a rank has
some of each sample's tokens: its losses are of these, and what is of a whole sample comes from `Completions.by_sample`.
A loss and every metric is this rank's share: their sums over micro batches and ranks are the global batch's. The
numbers are TRL's (1.16) where it has them, with one difference: exponents end at LARGEST_EXPONENT, where a loss stays
finite and its gradient is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kl import LARGEST_EXPONENT, kl_estimates

SMALLEST_SPREAD = 1e-4  # is added to standard deviations, as TRL has it

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
LEVELS = ("token", "sequence", "sequence_token")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# Mode that a loss has by itself. bnpo's, a mean over the tokens of each micro batch, has no name of its own.
IMPLIED_AGG_MODES = {
    **dict.fromkeys(("grpo", "sapo", "real"), "seq-mean-token-mean"),
    **dict.fromkeys(("dapo", "cispo", "fipo"), "token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
}
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class Policy:
    """Settings of `policy_losses`, by the flags' names."""

    loss_type: str = "grpo"  # of LOSS_TYPES
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: epsilon. For cispo the largest weight itself, not its distance from 1
    delta: float | None = None  # the largest weight of what is clipped on one side only; None: none
    dual_clip: float | None = None  # times a negative advantage: the least objective of a token; None: none
    loss_agg_mode: str | None = None  # one of LOSS_AGG_MODES; None: the loss's own
    importance_sampling_level: str = "token"  # of LEVELS
    beta: float = 0.04  # of the KL divergence from the reference in the loss; 0: no reference is read
    kl_estimator: str | None = None  # one of KL_ESTIMATORS; None: k3
    entropy_coef: float = 0.0  # factor of the tokens' mean entropy, which is subtracted from the loss
    tau_pos: float = 1.0  # sapo's temperatures
    tau_neg: float = 1.05
    fipo_decay_rate: float = 32.0  # fipo: tokens after which a later token's influence has halved
    fipo_clip_range: float = 0.2  # 0: a weight has no bounds
    fipo_clip_high_only: bool = True
    fipo_safety_threshold: float = 4.0
    rollout_importance_sampling_mode: str | None = None  # of CORRECTIONS; None: what the engine says is not read
    rollout_importance_sampling_threshold: float = 2.0
    log_rollout_offpolicy_metrics: bool = False
    off_policy_sequence_mask_delta: float | None = None  # None: no sample is left out
    teacher_kl_coef: float = 1.0  # of the teacher's log-probabilities in the advantages
    max_completion_length: int = 512  # what dr_grpo divides a sample by

    @property
    def highest(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class Completions(NamedTuple):
    """Trained tokens of a micro batch, and the completions they belong to."""

    sample: Tensor  # [tokens] int64: of the micro batch's samples; any where the mask is 0
    mask: Tensor  # [tokens] fp32: loss weights, 0 on prompts and padding
    counts: Tensor  # [samples] fp32: sums of each sample's mask, over all context-parallel ranks
    by_sample: Callable[[Tensor], Tensor]  # [tokens] -> [samples]: sums, over these ranks too, and of gradients as well
    # [tokens], decay -> [tokens]: sums over a token and the later ones of its sample, times decay^distance
    future_sums: Callable[[Tensor, float], Tensor] | None = None


class Totals(NamedTuple):
    """Counts of the global batch: over all micro batches of all data-parallel ranks."""

    samples: float
    tokens: float  # sum of the mask
    micro_batches: float  # with a sample
    trained_samples: float  # that have a token


class Terms(NamedTuple):
    """Values per token to be averaged: into the loss, and (without gradients) into metrics by TRL's names."""

    losses: Tensor  # [tokens]
    by_token: dict[str, Tensor]  # [tokens] each: the mean over tokens is logged
    by_sample: dict[
        str, Tensor
    ]  # [tokens] each, alike for all tokens of a sample: the mean over samples with a token is logged
    entropies: Tensor | None = None  # [tokens], with gradients if entropy_coef is above 0


def spread(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the unbiased standard deviation of the rewards of each sample's group: [samples]; 0 for a group of one."""
    count, mean = _of_groups(rewards, groups)
    return (_sums((rewards - mean) ** 2, groups) / (count - 1).clamp(min=1)).sqrt()


def advantages(rewards: Tensor, groups: Tensor, *, estimator: str = "grpo", scale: str | None = None) -> Tensor:
    """Return the advantage of each sample over its group: [samples]. Takes all samples of a rollout batch.

    rewards [samples], fp64 or fp32; groups [samples] int64: samples of one prompt have the same number (of any).
    `estimator`: grpo (https://arxiv.org/abs/2402.03300) and reinforce_plus_plus (https://arxiv.org/abs/2501.03262, with
    the groups' means as baseline) subtract the group's mean, rloo (https://arxiv.org/abs/2402.14740) the mean of the
    others; one alone in its group has 0. reinforce subtracts nothing, and scales nothing. `scale`: what this is divided
    by: the standard deviation in the group, in the batch, or nothing; of rewards, for reinforce_plus_plus of what is
    divided. None: as the estimator's paper has it.
    """
    if estimator == "reinforce":
        return rewards
    count, mean = _of_groups(rewards, groups)
    centered = rewards - mean
    if estimator == "rloo":
        centered = centered * count / (count - 1).clamp(min=1)
    match scale or {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}[estimator]:
        case "group":
            return centered / (
                spread(centered if estimator == "reinforce_plus_plus" else rewards, groups) + SMALLEST_SPREAD
            )
        case "batch":
            measured = centered if estimator == "reinforce_plus_plus" else rewards
            return centered / (spread(measured, torch.zeros_like(groups)) + SMALLEST_SPREAD)
    return centered


def _of_groups(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the size and the mean reward of each sample's group: [samples] each."""
    count = _sums(torch.ones_like(values), groups)
    return count, _sums(values, groups) / count


def _sums(values: Tensor, groups: Tensor) -> Tensor:
    """Over each sample's group: [samples]."""
    numbers, places = groups.unique(return_inverse=True)
    return values.new_zeros(len(numbers)).index_add(0, places, values)[places]


def rollout_weights(policy: Policy, old: Tensor, sampled: Tensor, completions: Completions) -> Tensor:
    """Return the importance weights of tokens that an engine sampled, not the model itself: [tokens].

    old, sampled [tokens]: log-probabilities of the model at the time, and of the engine. The importance weight
    model / engine of a token, or of its whole sample, is cut off at the threshold (`truncate`, as
    https://fengyao.notion.site/off-policy-rl has it), or those above it become 0 (`mask`).
    """
    mode, threshold = policy.rollout_importance_sampling_mode, policy.rollout_importance_sampling_threshold
    if mode not in CORRECTIONS:
        raise ValueError(f"--rollout_importance_sampling_mode {mode}: it has {', '.join(CORRECTIONS)}.")
    level, _, cut = mode.partition("_")
    ratios = _trained(old.detach() - sampled, completions)
    if level == "sequence":
        ratios = completions.by_sample(ratios * completions.mask)[completions.sample]
    weights = _exponential(ratios)
    return weights.clamp(max=threshold) if cut == "truncate" else weights * (weights <= threshold)


def kept_samples(
    policy: Policy, log_probs: Tensor, sampled: Tensor, advantages: Tensor, completions: Completions
) -> Tensor:
    """1 where a token's sample is trained on, 0 where it is too far off the policy to learn from: [tokens].

    Equation 9 of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): left out are samples that are worse than others and
    whose tokens the model holds, in the mean of log ratios, for less likely by more than delta than who has sampled
    them did. log_probs, sampled, advantages [tokens].
    """
    delta = policy.off_policy_sequence_mask_delta
    assert delta is not None
    ratios = _trained(sampled - log_probs.detach(), completions) * completions.mask
    means = completions.by_sample(ratios) / completions.counts.clamp(min=1)
    near = means <= delta
    return ((advantages >= 0) | near[completions.sample]).float()


@dataclass(frozen=True)
class BaselineLogProbs:
    """Log-probabilities of the same tokens by other models: fp32 [tokens] each."""

    old: Tensor | None = None  # by the policy before the steps on this rollout batch; None: as the trained model's
    ref: Tensor | None = None  # by the reference
    sampled: Tensor | None = None  # by the engine that generated them
    teacher: Tensor | None = None


NO_BASELINES = BaselineLogProbs()


def policy_losses(
    policy: Policy,
    log_probs: Tensor,
    advantages: Tensor,
    completions: Completions,
    *,
    baselines: BaselineLogProbs = NO_BASELINES,
    entropies: Tensor | None = None,
    entropy_threshold: Tensor | float | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
) -> Terms:
    """Return the loss and the metrics of each token.

    log_probs [tokens] fp32, by the model being trained; advantages [tokens], usually the sample's; entropies [tokens].
    slopes: real's losses and slopes [tokens], of their samples (`score_groups`).
    entropy_threshold: tokens below it have no policy loss (https://arxiv.org/abs/2506.01939); a quantile over all
    tokens of the batch.
    """
    sampled, ref = baselines.sampled, baselines.ref
    old = log_probs.detach() if baselines.old is None else baselines.old
    ratios = _trained(log_probs - old, completions)
    weights = _weights(policy, ratios, completions)
    by_token, by_sample = {}, {}
    if baselines.teacher is not None:
        signal = _trained(baselines.teacher - old.detach(), completions)
        advantages = advantages + policy.teacher_kl_coef * signal
        by_token["teacher_kl"] = _exponential(signal) - signal - 1  # as `kl_of`
    if policy.loss_type == "real":
        assert slopes is not None
        losses = slopes[0] + slopes[1] * (ratios - ratios.detach())
    else:
        losses, clipped = _LOSSES[policy.loss_type](policy, weights, advantages, log_probs)
        (by_token if policy.importance_sampling_level == "token" else by_sample).update(clipped)
    if policy.loss_type == "fipo":
        influence, metrics = future_influence(policy, ratios.detach(), weights.detach(), advantages, completions)
        losses = losses * influence
        by_token |= metrics
    if policy.log_rollout_offpolicy_metrics:
        assert sampled is not None
        of_tokens, of_samples = offpolicy_metrics(old.detach(), sampled, completions)
        by_token, by_sample = by_token | of_tokens, by_sample | of_samples
    if entropy_threshold is not None:
        assert entropies is not None
        losses = losses * (entropies >= entropy_threshold)
    if policy.off_policy_sequence_mask_delta is not None:
        assert sampled is not None
        kept = kept_samples(policy, log_probs, sampled, advantages, completions)
        losses = losses * kept
        by_sample["sampling/off_policy_masked"] = 1 - kept
    if policy.rollout_importance_sampling_mode is not None:
        assert sampled is not None
        correction = rollout_weights(policy, old, sampled, completions)
        losses = losses * correction
        of_tokens = policy.rollout_importance_sampling_mode.startswith("token")
        (by_token if of_tokens else by_sample)["sampling/importance_sampling_ratio/mean"] = correction
    if policy.beta:
        assert ref is not None
        by_token["kl"] = kl = kl_of(log_probs, ref, completions, policy.kl_estimator or "k3")
        losses = losses + policy.beta * kl
    if entropies is not None:
        by_token["entropy"] = entropies
    by_token, by_sample = ({name: value.detach() for name, value in each.items()} for each in (by_token, by_sample))
    return Terms(losses, by_token, by_sample, entropies)


def future_influence(
    policy: Policy, ratios: Tensor, weights: Tensor, advantages: Tensor, completions: Completions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return FIPO's weight of each token, and what is logged of it: [tokens] each. https://arxiv.org/abs/2603.19835.

    It is the exponential of the discounted sum of the later tokens' log ratios: how far the policy has gone since the
    tokens that this one led to. Tokens with a ratio above delta do not count. ratios, weights, advantages [tokens].
    """
    assert completions.future_sums is not None
    counted = ratios if policy.delta is None else torch.where(weights > policy.delta, 0.0, ratios)
    future = completions.future_sums(counted * (completions.mask != 0), 2 ** (-1 / policy.fipo_decay_rate))
    influence = _exponential(_trained(future, completions))
    if policy.fipo_clip_range:
        lowest = 1.0 if policy.fipo_clip_high_only else 1 - policy.fipo_clip_range
        influence = influence.clamp(lowest, 1 + policy.fipo_clip_range)
    is_unsafe = (advantages < 0) & (weights > policy.fipo_safety_threshold)
    influence = torch.where(is_unsafe, influence.clamp(0.8, 1.0), influence)
    metrics = {"future_kl_mean": future, "influence_weight_mean": influence, "safety_keep_ratio": (~is_unsafe).float()}
    return influence, {f"fipo/{name}": values for name, values in metrics.items()}


@torch.no_grad()
def offpolicy_metrics(
    old: Tensor, sampled: Tensor, completions: Completions
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return how far the model is from the engine that sampled, by token and by sample: [tokens] each.

    Perplexities are of a sample's tokens; k3_kl is that of `kl_of`; chi2 the mean squared ratio less 1.
    """

    def sample_means(values: Tensor) -> Tensor:
        sums = completions.by_sample(_trained(values, completions) * completions.mask)
        return (sums / completions.counts.clamp(min=1))[completions.sample]

    ratios, training, rollout = _trained(old - sampled, completions), sample_means(old), sample_means(sampled)
    difference = rollout - training
    by_token = {"kl": -ratios, "k3_kl": _exponential(ratios) - ratios - 1, "chi2_token": _exponential(2 * ratios) - 1}
    by_sample = {
        "training_ppl": _exponential(-training),
        "training_log_ppl": -training,
        "rollout_ppl": _exponential(-rollout),
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": _exponential(difference),
        "chi2_seq": _exponential(-2 * difference) - 1,
    }
    prefixed = [
        {f"rollout_correction/{name}": values for name, values in each.items()} for each in (by_token, by_sample)
    ]
    return prefixed[0], prefixed[1]


def kl_of(log_probs: Tensor, ref: Tensor, completions: Completions, estimator: str = "k3") -> Tensor:
    """Return `kl_estimates` of trained tokens, 0 elsewhere: [tokens]."""
    return kl_estimates(_trained(log_probs, completions), _trained(ref, completions), estimator)


def normalised(
    terms: Terms, policy: Policy, completions: Completions, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's share of the loss over the global batch, and of each metric's mean: scalars.

    token-mean: the mean over all tokens. seq-mean-token-mean, -sum: the mean over samples of the means, or sums, over
    their tokens. seq-mean-token-sum-norm: such sums over max_completion_length. bnpo by itself: the mean over micro
    batches of the means over their tokens. The bonus of the entropy is of its mean over all tokens, with any mode.
    """
    mask, counts = completions.mask, completions.counts
    of_token = mask / max(totals.tokens, 1.0)
    share = mask / counts.clamp(min=1)[completions.sample]
    of_sample = share / max(totals.samples, 1.0)
    match policy.loss_agg_mode or IMPLIED_AGG_MODES.get(policy.loss_type):
        case "seq-mean-token-mean":
            loss = (terms.losses * of_sample).sum()
        case "token-mean":
            loss = (terms.losses * of_token).sum()
        case "seq-mean-token-sum":
            loss = (terms.losses * mask).sum() / max(totals.samples, 1.0)
        case "seq-mean-token-sum-norm":
            loss = (terms.losses * mask).sum() / (max(totals.samples, 1.0) * policy.max_completion_length)
        case _:
            loss = (terms.losses * mask).sum() / counts.sum().clamp(min=1) / max(totals.micro_batches, 1.0)
    if policy.entropy_coef:
        assert terms.entropies is not None
        loss = loss - policy.entropy_coef * (_trained(terms.entropies, completions) * of_token).sum()
    metrics = {name: (values * of_token).sum() for name, values in terms.by_token.items()}
    of_trained = share / max(totals.trained_samples, 1.0)
    metrics |= {name: (values * of_trained).sum() for name, values in terms.by_sample.items()}
    return loss, {"loss": loss.detach()} | metrics


@torch.no_grad()
def clipped_shares(terms: Terms, completions: Completions) -> dict[str, Tensor]:
    """Return the share of each sample's tokens that are clipped below and above: [samples with a token] each, by the
    names clip_ratio/low and /high; of losses that do not clip nothing."""
    counted, shares = completions.counts > 0, {}
    for side in ("low", "high"):
        name = f"clip_ratio/{side}_mean"
        values = terms.by_token.get(name, terms.by_sample.get(name))
        if values is not None:
            sums = completions.by_sample(values * completions.mask)
            shares[f"clip_ratio/{side}"] = sums[counted] / completions.counts[counted]
    return shares


@torch.no_grad()
def perplexity_differences(terms: Terms, completions: Completions) -> Tensor:
    """Return log_ppl_diff of `offpolicy_metrics`: [samples with a token]; empty where it is not logged."""
    values = terms.by_sample.get("rollout_correction/log_ppl_diff")
    if values is None:
        return completions.counts[:0]
    counted = completions.counts > 0
    return (completions.by_sample(values * completions.mask) / completions.counts.clamp(min=1))[counted]


def _trained(values: Tensor, completions: Completions) -> Tensor:
    """0 where nothing is trained, whatever is there."""
    return torch.where(completions.mask != 0, values, 0.0)


def _exponential(values: Tensor) -> Tensor:
    return values.clamp(max=LARGEST_EXPONENT).exp()


def _weights(policy: Policy, ratios: Tensor, completions: Completions) -> Tensor:
    """Importance weights from log ratios of the policy to the one that has sampled: [tokens].

    sequence: the geometric mean over a sample's tokens, GSPO's (https://arxiv.org/abs/2507.18071);
    sequence_token: the same number, whose gradient goes to the token's own log-probability (GSPO-token there).
    """
    match policy.importance_sampling_level:
        case "token":
            return _exponential(ratios)
        case "sequence" | "sequence_token" as level:
            means = completions.by_sample(ratios * completions.mask) / completions.counts.clamp(min=1)
            means = means[completions.sample]
            return _exponential(means if level == "sequence" else means.detach() + ratios - ratios.detach())
        case level:
            raise ValueError(f"--importance_sampling_level {level}: it has {', '.join(LEVELS)}.")


def _clipped(
    policy: Policy, weights: Tensor, advantages: Tensor, log_probs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective (https://arxiv.org/abs/1707.06347, equation 7), its upper bound apart as DAPO has it
    (https://arxiv.org/abs/2503.14476), and `delta` for where it has none (https://arxiv.org/abs/2505.07291)."""
    within = weights.clamp(1 - policy.epsilon, 1 + policy.highest)
    if policy.delta is not None:
        weights = weights.clamp(max=policy.delta)
    low = ((weights < 1 - policy.epsilon) & (advantages < 0)).float()
    high = ((weights > 1 + policy.highest) & (advantages > 0)).float()
    clipped = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    gains = torch.min(weights * advantages, within * advantages)
    if policy.dual_clip is not None:  # https://arxiv.org/abs/1912.09729, equation 5
        lowest = policy.dual_clip * advantages
        is_negative = advantages < 0
        clipped["clip_ratio/dual_mean"] = (is_negative & (gains < lowest)).float()
        gains = torch.where(is_negative, torch.max(gains, lowest), gains)
    return -gains, clipped


def _cispo(policy: Policy, weights: Tensor, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """https://arxiv.org/abs/2506.13585: every token keeps its gradient, by a weight that is cut off."""
    clipped = {"cispo_clip_ratio": ((weights > policy.highest) & (advantages > 0)).float()}
    return -weights.clamp(max=policy.highest).detach() * advantages * log_probs, clipped


def _sapo(policy: Policy, weights: Tensor, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """https://arxiv.org/abs/2511.20347: a gate that closes softly in the place of clipping."""
    temperatures = torch.where(advantages > 0, policy.tau_pos, policy.tau_neg)
    return -torch.sigmoid(temperatures * (weights - 1)) * 4 / temperatures * advantages, {}


_LOSSES = {"cispo": _cispo, "sapo": _sapo} | dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "fipo"), _clipped)
