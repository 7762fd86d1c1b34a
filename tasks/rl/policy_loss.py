"""The policy loss of a micro batch of completions."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.layers.pooling import sum_documents
from ...templates.batching.collator import Batch, Grouping
from ...templates.batching.episode_batches import RolloutExtras, Sequences
from ..losses.policy import BaselineLogProbs, Completions, Policy, Totals, clipped_shares, normalised, policy_losses
from ..options import GrpoOptions
from ..train.objective import extras_of, grouping_of


class PolicyLoss:
    """`Objective.loss` of GRPO. Batches have RolloutExtras."""

    def __init__(self, options: GrpoOptions):
        assert options.epsilon_high is not None
        self.policy = Policy(
            loss_type=options.loss_type,
            epsilon=options.epsilon,
            epsilon_high=options.epsilon_high,
            delta=options.delta,
            importance_sampling_level=options.importance_sampling_level,
            beta=0.0 if options.kl_in_reward else options.beta,
            tau_pos=options.tau_pos,
            tau_neg=options.tau_neg,
            rollout_importance_sampling_mode=options.rollout_importance_sampling_mode,
            rollout_importance_sampling_threshold=options.rollout_importance_sampling_threshold,
            off_policy_sequence_mask_delta=options.off_policy_sequence_mask_delta,
            max_completion_length=options.sampling.max_completion_length,
        )
        self.with_entropies = options.log_entropy or options.top_entropy_quantile < 1
        self.names = ["loss", *self._more_names()]
        self.micro_batches = self.trained_samples = 1  # of the step, on all data-parallel ranks
        self.entropy_threshold: float | None = None  # of a token that has a loss, in this step
        self.stats = PolicyStats()

    def _more_names(self) -> list[str]:
        policy, names = self.policy, []
        if policy.loss_type == "cispo":
            names.append("cispo_clip_ratio")
        elif policy.loss_type != "sapo":
            names += [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
        if policy.rollout_importance_sampling_mode:
            names.append("sampling/importance_sampling_ratio/mean")
        if policy.off_policy_sequence_mask_delta is not None:
            names.append("sampling/off_policy_masked")
        names += ["entropy"] if self.with_entropies else []
        return [*names, "kl"] if policy.beta else names

    def begin_step(self, sequences: Sequences, batches: list[Batch]) -> None:
        """Begin a step on the sequences of all data-parallel ranks, and the micro batches of this one."""
        peers = [documents for batch in batches for documents in grouping_of(batch).documents_per_rank]
        self.micro_batches = sum(documents > 0 for documents in peers)  # others are there for the layout's sake
        self.trained_samples = sum(bool(weights.any()) for weights in sequences.weights)

    def __call__(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`output`: log-probabilities [1, local length], or with entropies beside them [2, 1, local length]."""
        grouping = grouping_of(batch)
        values, entropies = (output[0, 0], output[1, 0]) if self.with_entropies else (output[0], None)
        if not len(grouping.items):  # there were fewer packs than ranks
            nothing = values.sum() * 0.0
            return nothing, {name: nothing.detach() for name in self.names}
        completions = completions_of(batch, grouping)
        extras = extras_of(batch, RolloutExtras)
        sampled, old, ref = (
            None if log_probs is None else to_device(log_probs, values.device)[0]
            for log_probs in (extras.rollout_log_probs, extras.old_log_probs, extras.ref_log_probs)
        )
        assert sampled is not None
        advantages = to_device(grouping.labels[:, 0], values.device)[completions.sample]
        self.stats.add_mismatch((values.detach() if old is None else old) - sampled, completions.mask)
        terms = policy_losses(
            self.policy,
            values,
            advantages,
            completions,
            baselines=BaselineLogProbs(old, ref, sampled),
            entropies=entropies,
            entropy_threshold=self.entropy_threshold,
        )
        self.stats.add_clip(clipped_shares(terms, completions))
        totals = Totals(grouping.loss_samples, batch.loss_tokens, self.micro_batches, self.trained_samples)
        return normalised(terms, self.policy, completions, totals)


def completions_of(batch: Batch, grouping: Grouping) -> Completions:
    """Return the completions of a micro batch whose samples have one document each."""
    device = batch.tokens.device
    documents = torch.zeros(len(grouping.spans), dtype=torch.int64)  # of each segment: padding is anybody's
    documents[grouping.segments] = torch.arange(len(grouping.segments))
    return Completions(
        sample=to_device(documents.repeat_interleave(grouping.spans), device),
        mask=batch.loss_weights[0],
        counts=to_device(grouping.tokens, device),
        by_sample=lambda values: sum_documents(values[None], grouping.spans, grouping.segments),
    )


class PolicyStats:
    """Statistics of steps that are no sums over micro batches.

    The difference between the engine's log-probabilities and the trainer's, and the extremes of the share of a
    completion's tokens that are clipped.
    """

    def __init__(self):
        self._sums: Tensor | None = None  # of distances, of tokens
        self._largest: dict[str, Tensor] = {}

    def add_mismatch(self, differences: Tensor, mask: Tensor) -> None:
        """differences, mask [tokens]"""
        distances = (differences.abs() * (mask != 0)).detach()
        sums = torch.stack([distances.sum(), (mask != 0).sum().float()]).double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._at_least("sampling/sampling_logp_difference/max", distances)

    def add_clip(self, shares: dict[str, Tensor]) -> None:
        """Add the extremes of `clipped_shares`."""
        if shares and len(shares["clip_ratio/low"]):
            self._at_least("-clip_ratio/low_min", -shares["clip_ratio/low"])
            self._at_least("clip_ratio/high_max", shares["clip_ratio/high"])

    def _at_least(self, name: str, values: Tensor) -> None:
        largest = values.max().double()
        self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest

    def pop(self, groups: ProcessGroupCollection) -> dict[str, float]:
        """Return means and extremes over all ranks, and start anew. Every rank calls this."""
        nothing = torch.zeros(2, dtype=torch.float64, device=runtime.device())
        counts = groups.tp.rank() == 0
        sums = (nothing if self._sums is None else self._sums) * counts
        largest = torch.stack([self._largest.get(name, nothing[0] - torch.inf) for name in LARGEST])
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self._sums, self._largest = None, {}
        total, tokens = sums.tolist()
        stats = {name: value for name, value in zip(LARGEST, largest.tolist(), strict=True) if value > -torch.inf}
        stats = {name.removeprefix("-"): -value if name.startswith("-") else value for name, value in stats.items()}
        return {"sampling/sampling_logp_difference/mean": total / tokens} | stats if tokens else {}


# Maxima of PolicyStats; a minus marks the maximum of the negated values.
LARGEST = "sampling/sampling_logp_difference/max", "-clip_ratio/low_min", "clip_ratio/high_max"
