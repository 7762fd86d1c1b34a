"""The loss of a micro batch of completions, and how far the engine's numbers are from the trainer's."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ..bridge import runtime
from ..bridge.layers.pooling import document_sums
from ..bridge.layers.segments import to_device
from ..templates.layout import Batch, Grouping
from .losses.policy import Completions, Policy, Totals, normalised, policy_losses
from .objective import grouping_of
from .options import GrpoOptions


class PolicyLoss:
    """`Objective.loss` of GRPO. A batch has in `known` log-probabilities [1, local length]: `sampled`, the engine's,
    and where they are needed those of the policy that generated (`old`) and of the reference (`ref`)."""

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
            max_completion_length=options.max_completion_length,
        )
        self.with_entropies = options.log_entropy or options.top_entropy_quantile < 1
        self.names = ["loss", *self._more_names()]
        self.micro_batches = 1  # of the step, on all data-parallel ranks
        self.least_entropy: float | None = None  # of a token that has a loss, in this step
        self.gaps = Gaps()

    def _more_names(self) -> list[str]:
        policy, names = self.policy, []
        if policy.loss_type == "cispo":
            names.append("cispo_clip_ratio")
        elif policy.loss_type != "sapo":
            names += [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
        if policy.rollout_importance_sampling_mode:
            names.append("sampling/importance_sampling_ratio/mean")
        names += ["entropy"] if self.with_entropies else []
        return [*names, "kl"] if policy.beta else names

    def __call__(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`output`: log-probabilities [1, local length], or with entropies beside them [2, 1, local length]."""
        grouping = grouping_of(batch)
        values, entropies = (output[0, 0], output[1, 0]) if self.with_entropies else (output[0], None)
        if not len(grouping.items):  # there were fewer packs than ranks
            nothing = values.sum() * 0.0
            return nothing, {name: nothing.detach() for name in self.names}
        completions = completions_of(batch, grouping)
        known = {name: to_device(of_name, values.device)[0] for name, of_name in batch.known.items()}
        advantages = to_device(grouping.labels[:, 0], values.device)[completions.sample]
        self.gaps.add(known.get("old", values.detach()) - known["sampled"], completions.mask)
        terms = policy_losses(
            self.policy,
            values,
            advantages,
            completions,
            old=known.get("old"),
            ref=known.get("ref"),
            sampled=known["sampled"],
            entropies=entropies,
            least_entropy=self.least_entropy,
        )
        totals = Totals(grouping.loss_samples, batch.loss_tokens, self.micro_batches)
        return normalised(terms, self.policy, completions, totals)


def completions_of(batch: Batch, grouping: Grouping) -> Completions:
    """Of a micro batch whose samples have one document each."""
    device = batch.tokens.device
    documents = torch.zeros(len(grouping.spans), dtype=torch.int64)  # of each segment: padding is anybody's
    documents[grouping.segments] = torch.arange(len(grouping.segments))
    return Completions(
        sample=to_device(documents.repeat_interleave(grouping.spans), device),
        mask=batch.loss_weights[0],
        counts=to_device(grouping.tokens, device),
        by_sample=lambda values: document_sums(values[None], grouping.spans, grouping.segments),
    )


class Gaps:
    """How far the engine's log-probabilities of what it drew are from the trainer's, over the tokens of some steps."""

    def __init__(self):
        self._sums: Tensor | None = None  # of distances, of tokens; the largest distance

    def add(self, differences: Tensor, mask: Tensor) -> None:
        """differences, mask [tokens]"""
        distances = (differences.abs() * (mask != 0)).detach()
        own = torch.stack([distances.sum(), (mask != 0).sum().float(), distances.max()]).double()
        if self._sums is None:
            self._sums = own
        else:
            self._sums = torch.stack([*(self._sums[:2] + own[:2]), torch.maximum(self._sums[2], own[2])])

    def take(self) -> dict[str, float]:
        """Mean and largest distance since this was last asked, over all ranks. Every rank asks."""
        sums = torch.zeros(3, dtype=torch.float64) if self._sums is None else self._sums.cpu()
        counts = parallel_state.get_tensor_model_parallel_rank() == 0
        sums, largest = (sums[:2] * counts).to(runtime.device()), sums[2:].to(runtime.device())
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self._sums = None
        total, tokens = sums.tolist()
        return {"logprob_gap/mean": total / tokens, "logprob_gap/max": float(largest)} if tokens else {}
