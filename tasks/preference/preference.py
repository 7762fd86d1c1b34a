"""`megatron rlhf --rlhf_type dpo|orpo|simpo|cpo|kto|rm`: train on preferences between answers.

Log-probabilities of whole answers are sums over their trained tokens. Losses are means over the samples of the global
batch. They do not depend on the number of ranks, of micro batches, and of samples in a pack.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..losses.preference import (
    Cpo,
    Dpo,
    Pairs,
    cpo_losses,
    dpo_losses,
    dpo_rewards,
    kto_losses,
    orpo_terms,
    reward_losses,
)
from ..observability.flops import Flops
from ..options import CpoOptions, DpoOptions, KtoOptions, OrpoOptions, RmOptions
from ..reference.reference_model import document_log_probs, make_reference, sum_by_document
from ..run.context import Run
from ..supervised.heads import scores
from ..train.objective import (
    Objective,
    context_parallel_share,
    detach_metrics,
    extras_of,
    forward_flops,
    grouping_of,
    mean_share,
    means,
    no_flops,
    samples,
)
from ..train.setup import train
from ..train.step import TrainState

PAIR_METRICS = ["loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]
LOG_PROBS = ["logps/chosen", "logps/rejected"]


def run(options: DpoOptions | OrpoOptions | CpoOptions | KtoOptions | RmOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    makers = {"dpo": make_dpo, "orpo": make_orpo, "simpo": make_cpo, "cpo": make_cpo, "kto": make_kto, "rm": make_rm}
    return train(options, sources, makers[options.rlhf_type])


def make_dpo(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of direct preference optimization (https://arxiv.org/abs/2305.18290) and its variants."""
    options = run.options
    assert isinstance(options, DpoOptions)
    settings = Dpo(
        beta=options.beta,
        loss_type=tuple(options.loss_type),
        loss_weights=tuple(options.loss_weights) or None,
        label_smoothing=options.label_smoothing,
        f_divergence_type=options.f_divergence_type,
        f_alpha_divergence_coef=options.f_alpha_divergence_coef,
        discopop_tau=options.discopop_tau,
        reference_free=options.reference_free,
    )
    # The negative log-likelihood is a mean over tokens, the other losses over pairs.
    nll_weight = sum(weight for name, weight in settings.terms if name == "sft") + (options.rpo_alpha or 0.0)
    reference = None if options.reference_free else make_reference(run, model, options.reference, train, val)

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        return _attach_reference(batches, reference(training, batches, evaluates) if reference else [])

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sum_by_document(batch, log_probs)
        tokens = to_device(grouping_of(batch).tokens, sums.device)
        ref = extras_of(batch, PreferenceExtras).ref_log_probs if reference else torch.zeros_like(sums)
        pairs = Pairs(sums[::2], sums[1::2], ref[::2], ref[1::2], tokens[::2], tokens[1::2])
        chosen, rejected = dpo_rewards(pairs, settings)
        values_by_name = {
            "loss": dpo_losses(pairs, settings),
            **_pair_metrics(chosen, rejected),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
        }
        return _loss_with_nll(values_by_name, batch, sums, nll_weight, model.groups)

    names = [*PAIR_METRICS, *LOG_PROBS, *(["nll_loss"] if nll_weight else [])]
    flops = reference and reference.flops
    extra_flops = partial(forward_flops, flops, model.groups) if flops else no_flops
    follower = reference and reference.follower
    objective = Objective(
        loss, names, prepare=prepare, weight=samples, extra_flops=extra_flops, reference_sync=follower
    )
    return objective, [reference.note] if reference else []


def make_orpo(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of odds ratio preference optimization (https://arxiv.org/abs/2403.07691)."""
    options = run.options
    assert isinstance(options, OrpoOptions)

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sum_by_document(batch, log_probs)
        means = sums / _token_counts(batch, sums)
        terms = orpo_terms(means[::2], means[1::2], options.beta)
        values_by_name = {
            "loss": terms.losses,
            **_unreferenced_metrics(means, options.beta),
            "log_odds_chosen": terms.log_odds,
            "log_odds_ratio": terms.log_odds_ratio,
        }
        return _loss_with_nll(values_by_name, batch, sums, 1.0, model.groups)

    names = [*PAIR_METRICS, *LOG_PROBS, "log_odds_chosen", "log_odds_ratio", "nll_loss"]
    return Objective(loss, names, weight=samples), []


def make_cpo(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of contrastive preference optimization (https://arxiv.org/abs/2401.08417) and SimPO."""
    options = run.options
    assert isinstance(options, CpoOptions)
    settings = Cpo(options.beta, options.loss_type, options.label_smoothing, options.simpo_gamma)

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sum_by_document(batch, log_probs)
        compared = sums / _token_counts(batch, sums) if settings.compares_means else sums
        values_by_name = {
            "loss": cpo_losses(compared[::2], compared[1::2], settings),
            **_unreferenced_metrics(compared, options.beta),
        }
        return _loss_with_nll(values_by_name, batch, sums, options.cpo_alpha, model.groups)

    names = [*PAIR_METRICS, *LOG_PROBS, *(["nll_loss"] if options.cpo_alpha else [])]
    return Objective(loss, names, weight=samples), []


def make_kto(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306).

    Forward passes before the step compute its reference point: the KL of policy and reference on mismatched answers,
    over the global batch.
    """
    options = run.options
    assert isinstance(options, KtoOptions)
    reference = make_reference(run, model, options.reference, train, val)
    policy_flops = Flops.of_model(model)
    uses_kl = options.loss_type == "kto"

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        kl = None
        if uses_kl:
            mismatched = _mismatched(batches)
            policy = document_log_probs(model, training.chunks, mismatched)
            kl = _kto_kl(model.groups, batches, policy, reference(training, mismatched, evaluates))
        return _attach_reference(batches, reference(training, batches, evaluates), kl)

    def extra_flops(batches: list[Batch]) -> float:
        mismatched = _mismatched(batches) if uses_kl else []
        reference_flops = (
            forward_flops(reference.flops, model.groups, [*batches, *mismatched]) if reference.flops else 0.0
        )
        return reference_flops + forward_flops(policy_flops, model.groups, mismatched)

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sum_by_document(batch, log_probs)
        desirable = to_device(grouping_of(batch).labels[:, 0] == 1, sums.device)
        extras = extras_of(batch, PreferenceExtras)
        ref, kl = extras.ref_log_probs, sums.new_zeros(()) if extras.kl is None else extras.kl
        losses = kto_losses(
            sums,
            ref,
            desirable,
            kl,
            beta=options.beta,
            loss_type=options.loss_type,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        rewards = options.beta * (sums - ref)
        by_name = {"loss": losses, "kl": kl.expand(len(sums))}
        for side, mask in (("chosen", desirable), ("rejected", ~desirable)):
            by_name |= {f"rewards/{side}": rewards * mask, f"logps/{side}": sums * mask, f"count/{side}": mask.float()}
        shares = {name: mean_share(values, batch, model.groups) for name, values in by_name.items()}
        return shares["loss"], detach_metrics(shares)

    names = ["loss", "kl", *(f"{metric}/{side}" for side in ("chosen", "rejected") for metric in KTO_SUMS)]
    objective = Objective(
        loss,
        names,
        prepare=prepare,
        means=_kto_means,
        weight=samples,
        extra_flops=extra_flops,
        reference_sync=reference.follower,
    )
    return objective, [reference.note]


def _mismatched(batches: list[Batch]) -> list[Batch]:
    """Return the prompts with answers to other prompts."""
    return [batch.mismatched for batch in batches if batch.mismatched is not None]


KTO_SUMS = "rewards", "logps", "count"


def _kto_means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Return means. Rewards and log-probabilities are means over the chosen or the rejected answers, if any."""
    values = means({name: sums[name] for name in ("loss", "kl")}, weight)
    sides = [side for side in ("chosen", "rejected") if sums[f"count/{side}"]]
    values |= {
        f"{metric}/{side}": sums[f"{metric}/{side}"] / sums[f"count/{side}"]
        for side in sides
        for metric in KTO_SUMS[:2]
    }
    if len(sides) == 2:
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return values


def make_rm(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of reward models: the chosen answer scores higher (Bradley-Terry)."""
    options = run.options
    assert isinstance(options, RmOptions)

    def loss(batch: Batch, rewards: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = rewards[::2, 0], rewards[1::2, 0]
        labels = grouping_of(batch).labels
        margins = to_device(labels[:, 0], rewards.device) if labels.shape[1] else None
        losses = reward_losses(chosen, rejected, margins, options.center_rewards_coefficient)
        values_by_name = {"loss": losses} | _pair_metrics(chosen, rejected)
        shares = {name: mean_share(values, batch, model.groups) for name, values in values_by_name.items()}
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, PAIR_METRICS, output=scores, weight=samples, scores_tokens=False), []


@dataclass(frozen=True)
class PreferenceExtras:
    """Reference values for a micro batch's loss, on the last pipeline stage."""

    ref_log_probs: Tensor  # fp32 [documents]: summed over each answer's tokens
    kl: Tensor | None = None  # KTO's reference point, a scalar of the global batch


def _attach_reference(batches: list[Batch], ref_log_probs: list[Tensor], kl: Tensor | None = None) -> list[Batch]:
    """Return the micro batches with PreferenceExtras; unchanged before the last pipeline stage."""
    if not ref_log_probs:
        return batches
    extras = [PreferenceExtras(log_probs, kl) for log_probs in ref_log_probs]
    return [replace(batch, extras=extra) for batch, extra in zip(batches, extras, strict=True)]


def _kto_kl(
    groups: ProcessGroupCollection, batches: list[Batch], policy: list[Tensor], reference: list[Tensor]
) -> Tensor:
    """Return KTO's reference point: the mean log ratio of mismatched answers over the global batch, at least 0."""
    device = runtime.device()
    total = torch.stack(
        [(policy_sums - reference_sums).sum() for policy_sums, reference_sums in zip(policy, reference, strict=True)]
        or [torch.zeros((), device=device)]
    ).sum()
    if is_pp_last_stage(groups.pp):
        dist.all_reduce(total, group=groups.dp)
    return (total / max(samples(batches[0]), 1.0)).clamp(min=0)


def _loss_with_nll(
    values_by_name: dict[str, Tensor],
    batch: Batch,
    sums: Tensor,
    nll_weight: float,
    groups: ProcessGroupCollection,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's share of the loss and metrics, from their values per pair.

    Adds the chosen answers' cross-entropy, a mean over the tokens of the global batch.
    sums: log-probabilities [documents].
    """
    shares = {name: mean_share(values, batch, groups) for name, values in values_by_name.items()}
    if nll_weight:
        shares["nll_loss"] = context_parallel_share(-sums[::2].sum(), groups) / max(batch.loss_tokens, 1.0)
        shares["loss"] = shares["loss"] + nll_weight * shares["nll_loss"]
    return shares["loss"], detach_metrics(shares)


def _token_counts(batch: Batch, sums: Tensor) -> Tensor:
    """Return the sum of each document's loss weights, at least 1: [documents]."""
    return to_device(grouping_of(batch).tokens, sums.device).clamp(min=1.0)


def _unreferenced_metrics(log_probs: Tensor, beta: float) -> dict[str, Tensor]:
    """Return metrics of pairs without a reference from log-probabilities [documents], chosen and rejected in turn."""
    chosen, rejected = log_probs[::2], log_probs[1::2]
    rewards = beta * log_probs.detach()
    return {**_pair_metrics(rewards[::2], rewards[1::2]), "logps/chosen": chosen, "logps/rejected": rejected}


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return metrics of the rewards [pairs]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }
