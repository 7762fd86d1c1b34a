"""The policy loss of a micro batch of completions."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.future_sums import future_sums
from ...bridge.layers.packed_seqs import to_device
from ...bridge.layers.pooling import sum_documents
from ...templates.batching.collator import Batch, Grouping
from ...templates.batching.episode_batches import RolloutExtras, Sequences
from ..losses.group_scores import ScoredGroups
from ..losses.policy import (
    BaselineLogProbs,
    Completions,
    Policy,
    Totals,
    clipped_shares,
    normalised,
    perplexity_differences,
    policy_losses,
)
from ..options import GrpoOptions
from ..train.objective import extras_of, grouping_of


class PolicyLoss:
    """Policy loss of GRPO (`Objective.loss`). Batches have RolloutExtras."""

    def __init__(self, options: GrpoOptions):
        settings = {name: value for name, value in vars(options.policy).items() if name in Policy.__dataclass_fields__}
        self.policy = Policy(
            **settings,
            beta=0.0 if options.kl_in_reward else options.beta,
            teacher_kl_coef=options.teacher_kl_coef,
            max_completion_length=options.sampling.max_completion_length,
        )
        self.trains_entropy = options.policy.entropy_coef > 0
        self.with_entropies = options.policy.log_entropy or options.policy.top_entropy_quantile < 1
        self.with_entropies |= self.trains_entropy
        has_teacher = options.teacher.teacher_model or options.teacher.mcore_teacher_model
        self.names = ["loss", *self._metric_names(), *(["teacher_kl"] if has_teacher else [])]
        self.micro_batches = self.trained_samples = 1  # of the step, on all data-parallel ranks
        self.entropy_threshold: float | None = None  # of this step: tokens with a lower entropy have no loss
        self.scored_groups: ScoredGroups | None = None  # of this step's samples, with --loss_type real
        self.stats = PolicyStats()

    def _metric_names(self) -> list[str]:
        policy, names = self.policy, []
        if policy.loss_type == "cispo":
            names.append("cispo_clip_ratio")
        elif policy.loss_type not in ("sapo", "real"):
            names += [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
            names += ["clip_ratio/dual_mean"] if policy.dual_clip is not None else []
        if policy.loss_type == "fipo":
            names += [f"fipo/{name}" for name in ("future_kl_mean", "influence_weight_mean", "safety_keep_ratio")]
        if policy.log_rollout_offpolicy_metrics:
            names += [f"rollout_correction/{name}" for name in OFFPOLICY_METRICS]
        if policy.rollout_importance_sampling_mode:
            names.append("sampling/importance_sampling_ratio/mean")
        if policy.off_policy_sequence_mask_delta is not None:
            names.append("sampling/off_policy_masked")
        names += ["entropy"] if self.with_entropies else []
        return [*names, "kl"] if policy.beta else names

    def begin_step(self, sequences: Sequences, batches: list[Batch]) -> None:
        """Begin a step on the sequences of all data-parallel ranks and the micro batches of this rank."""
        counts = [count for batch in batches for count in grouping_of(batch).documents_per_rank]
        self.micro_batches = sum(count > 0 for count in counts)  # empty ones are padding
        self.trained_samples = sum(bool(weights.any()) for weights in sequences.weights)

    def __call__(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics.

        `output`: log-probabilities [1, local length], or with entropies [2, 1, local length].
        """
        grouping = grouping_of(batch)
        values, entropies = (output[0, 0], output[1, 0]) if self.with_entropies else (output[0], None)
        if not len(grouping.items):  # a padding micro batch: fewer packs than ranks
            zero = values.sum() * 0.0
            return zero, {name: zero.detach() for name in self.names}
        completions = completions_of(batch, grouping)
        extras = extras_of(batch, RolloutExtras)
        rollout_log_probs, old_log_probs, ref_log_probs, teacher_log_probs = (
            None if log_probs is None else to_device(log_probs, values.device)[0]
            for log_probs in (
                extras.rollout_log_probs, extras.old_log_probs, extras.ref_log_probs, extras.teacher_log_probs
            )
        )  # fmt: skip
        assert rollout_log_probs is not None
        if extras.advantages is None:
            advantages = to_device(grouping.labels[:, 0], values.device)[completions.sample]
        else:
            advantages = to_device(extras.advantages, values.device)[0]
        self.stats.add_mismatch(
            (values.detach() if old_log_probs is None else old_log_probs) - rollout_log_probs, completions.mask
        )
        terms = policy_losses(
            self.policy,
            values,
            advantages,
            completions,
            baselines=BaselineLogProbs(old_log_probs, ref_log_probs, rollout_log_probs, teacher_log_probs),
            entropies=entropies,
            entropy_threshold=self.entropy_threshold,
            slopes=self._slopes(grouping, completions),
        )
        self.stats.add_clip(clipped_shares(terms, completions))
        self.stats.add_perplexities(perplexity_differences(terms, completions))
        totals = Totals(grouping.loss_samples, batch.loss_tokens, self.micro_batches, self.trained_samples)
        return normalised(terms, self.policy, completions, totals)

    def _slopes(self, grouping: Grouping, completions: Completions) -> tuple[Tensor, Tensor] | None:
        """Return real's losses and slopes of the samples, at their tokens."""
        if self.scored_groups is None:
            return None
        losses, slopes = (
            to_device(values[grouping.items].float(), completions.mask.device)[completions.sample]
            for values in self.scored_groups
        )
        return losses, slopes


def completions_of(batch: Batch, grouping: Grouping) -> Completions:
    """Return the completions of a micro batch whose samples have one document each."""
    device = batch.tokens.device
    document_indices = torch.zeros(len(grouping.spans), dtype=torch.int64)  # of each segment; any for padding
    document_indices[grouping.segments] = torch.arange(len(grouping.segments))
    return Completions(
        sample=to_device(document_indices.repeat_interleave(grouping.spans), device),
        mask=batch.loss_weights[0],
        counts=to_device(grouping.tokens, device),
        by_sample=lambda values: sum_documents(values[None], grouping.spans, grouping.segments),
        future_sums=lambda values, decay: future_sums(values, grouping.spans, decay),
    )


class PolicyStats:
    """Statistics of steps that are not sums over micro batches.

    They are the difference between the log-probabilities of engine and trainer, and the extremes of a completion's
    fraction of clipped tokens.
    """

    def __init__(self):
        self._sums: Tensor | None = None  # [sum of absolute differences, number of tokens]
        self._maxima: dict[str, Tensor] = {}

    def add_mismatch(self, differences: Tensor, mask: Tensor) -> None:
        """Add differences of log-probabilities [tokens] where the mask [tokens] is not 0."""
        distances = (differences.abs() * (mask != 0)).detach()
        sums = torch.stack([distances.sum(), (mask != 0).sum().float()]).double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._update_maximum("sampling/sampling_logp_difference/max", distances)

    def add_clip(self, shares: dict[str, Tensor]) -> None:
        """Add the extremes of `clipped_shares`."""
        if shares and len(shares["clip_ratio/low"]):
            self._update_maximum("-clip_ratio/low_min", -shares["clip_ratio/low"])
            self._update_maximum("clip_ratio/high_max", shares["clip_ratio/high"])

    def add_perplexities(self, differences: Tensor) -> None:
        """Add the extremes of `perplexity_differences`."""
        if len(differences):
            self._update_maximum("rollout_correction/log_ppl_diff_max", differences)
            self._update_maximum("-rollout_correction/log_ppl_diff_min", -differences)

    def _update_maximum(self, name: str, values: Tensor) -> None:
        maximum = values.max().double()
        self._maxima[name] = torch.maximum(self._maxima[name], maximum) if name in self._maxima else maximum

    def pop(self, groups: ProcessGroupCollection) -> dict[str, float]:
        """Return means and extremes over all ranks, and reset. Every rank calls it."""
        zero = torch.zeros(2, dtype=torch.float64, device=runtime.device())
        is_counted = groups.tp.rank() == 0
        sums = (zero if self._sums is None else self._sums) * is_counted
        maxima = torch.stack([self._maxima.get(name, zero[0] - torch.inf) for name in MAXIMA])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        self._sums, self._maxima = None, {}
        total, tokens = sums.tolist()
        stats = {name: value for name, value in zip(MAXIMA, maxima.tolist(), strict=True) if value > -torch.inf}
        stats = {name.removeprefix("-"): -value if name.startswith("-") else value for name, value in stats.items()}
        return {"sampling/sampling_logp_difference/mean": total / tokens} | stats if tokens else {}


# Maxima of PolicyStats; a minus marks the maximum of the negated values.
MAXIMA = (
    "sampling/sampling_logp_difference/max",
    "-clip_ratio/low_min",
    "clip_ratio/high_max",
    "rollout_correction/log_ppl_diff_max",
    "-rollout_correction/log_ppl_diff_min",
)
OFFPOLICY_METRICS = (  # of `offpolicy_metrics`
    "kl", "k3_kl", "chi2_token", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff",
    "log_ppl_abs_diff", "ppl_ratio", "chi2_seq",
)  # fmt: skip
