"""`megatron rlhf --rlhf_type dpo|kto|rm`: train on which answers are better than others.

Log-probabilities of whole answers are sums over their trained tokens. Losses are means over the samples of the global
batch, whatever the number of ranks, of micro batches, and of samples in a pack.
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
from ..losses.preference import Dpo, Pairs, dpo_losses, dpo_rewards, kto_losses, reward_losses
from ..observability.flops import Flops
from ..options import DpoOptions, KtoOptions, RmOptions
from ..reference.reference_model import make_reference, sums_by_document, sums_of
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


def run(options: DpoOptions | KtoOptions | RmOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    make = {"dpo": make_dpo, "kto": make_kto, "rm": make_rm}[options.rlhf_type]
    return train(options, sources, make)


def make_dpo(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290), and what has followed it."""
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
    # A mean over tokens, where the others are means over pairs.
    likelihood = sum(weight for name, weight in settings.terms if name == "sft") + (options.rpo_alpha or 0.0)
    reference = None if options.reference_free else make_reference(run, model, options.reference, train, val)

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        return _with_reference(batches, reference(training, batches, evaluates) if reference else [])

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sums_by_document(batch, log_probs)
        tokens = to_device(grouping_of(batch).tokens, sums.device)
        ref = extras_of(batch, PreferenceExtras).ref_log_probs if reference else torch.zeros_like(sums)
        pairs = Pairs(sums[::2], sums[1::2], ref[::2], ref[1::2], tokens[::2], tokens[1::2])
        chosen, rejected = dpo_rewards(pairs, settings)
        of_each = {
            "loss": dpo_losses(pairs, settings),
            **_pair_metrics(chosen, rejected),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
        }
        shares = {name: mean_share(values, batch, model.groups) for name, values in of_each.items()}
        if likelihood:
            shares["nll_loss"] = context_parallel_share(-pairs.chosen.sum(), model.groups) / max(batch.loss_tokens, 1.0)
            shares["loss"] = shares["loss"] + likelihood * shares["nll_loss"]
        return shares["loss"], detach_metrics(shares)

    names = [*PAIR_METRICS, "logps/chosen", "logps/rejected", *(["nll_loss"] if likelihood else [])]
    flops = reference and reference.flops
    extra = partial(forward_flops, flops, model.groups) if flops else no_flops
    follower = reference and reference.follower
    objective = Objective(loss, names, prepare=prepare, weight=samples, extra_flops=extra, reference_sync=follower)
    return objective, [reference.note] if reference else []


def make_kto(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Kahneman-Tversky optimisation (https://arxiv.org/abs/2402.01306).

    Its reference point, how far the policy has gone from the reference on answers to other prompts, is a mean over the
    global batch, found by forward passes before the step.
    """
    options = run.options
    assert isinstance(options, KtoOptions)
    reference = make_reference(run, model, options.reference, train, val)
    policy_flops = Flops.of_model(model)
    measures = options.loss_type == "kto"

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        kl = None
        if measures:
            besides = _besides(batches)
            policy = sums_of(model, training.chunks, besides)
            kl = _divergence(model.groups, batches, policy, reference(training, besides, evaluates))
        return _with_reference(batches, reference(training, batches, evaluates), kl)

    def extra_flops(batches: list[Batch]) -> float:
        besides = _besides(batches) if measures else []
        reference_flops = forward_flops(reference.flops, model.groups, [*batches, *besides]) if reference.flops else 0.0
        return reference_flops + forward_flops(policy_flops, model.groups, besides)

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sums_by_document(batch, log_probs)
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

    names = ["loss", "kl", *(f"{what}/{side}" for side in ("chosen", "rejected") for what in KTO_SUMS)]
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


def _besides(batches: list[Batch]) -> list[Batch]:
    """Return the same prompts with answers to others."""
    return [batch.mismatched for batch in batches if batch.mismatched is not None]


KTO_SUMS = "rewards", "logps", "count"


def _kto_means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Return means; rewards and log-probabilities are over the answers of their side, where there are any."""
    values = means({name: sums[name] for name in ("loss", "kl")}, weight)
    sides = [side for side in ("chosen", "rejected") if sums[f"count/{side}"]]
    values |= {
        f"{what}/{side}": sums[f"{what}/{side}"] / sums[f"count/{side}"] for side in sides for what in KTO_SUMS[:2]
    }
    if len(sides) == 2:
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    return values


def make_rm(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return a reward model: the better answer scores higher (Bradley and Terry's model of preferences)."""
    options = run.options
    assert isinstance(options, RmOptions)

    def loss(batch: Batch, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = found[::2, 0], found[1::2, 0]
        labels = grouping_of(batch).labels
        margins = to_device(labels[:, 0], found.device) if labels.shape[1] else None
        losses = reward_losses(chosen, rejected, margins, options.center_rewards_coefficient)
        of_each = {"loss": losses} | _pair_metrics(chosen, rejected)
        shares = {name: mean_share(values, batch, model.groups) for name, values in of_each.items()}
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, PAIR_METRICS, output=scores, weight=samples, scores_tokens=False), []


@dataclass(frozen=True)
class PreferenceExtras:
    """The reference's part of a micro batch's loss, on the last pipeline stage."""

    ref_log_probs: Tensor  # fp32 [documents]: summed over each answer's tokens
    kl: Tensor | None = None  # KTO's reference point, a scalar of the global batch


def _with_reference(batches: list[Batch], ref_log_probs: list[Tensor], kl: Tensor | None = None) -> list[Batch]:
    """Return the micro batches with their PreferenceExtras; as they are on stages before the last one."""
    if not ref_log_probs:
        return batches
    extras = [PreferenceExtras(log_probs, kl) for log_probs in ref_log_probs]
    return [replace(batch, extras=extra) for batch, extra in zip(batches, extras, strict=True)]


def _divergence(
    groups: ProcessGroupCollection, batches: list[Batch], policy: list[Tensor], reference: list[Tensor]
) -> Tensor:
    """KTO's reference point: the mean log ratio of answers to other prompts, over the global batch, at least 0."""
    device = runtime.device()
    total = torch.stack(
        [(ours - theirs).sum() for ours, theirs in zip(policy, reference, strict=True)]
        or [torch.zeros((), device=device)]
    ).sum()
    if is_pp_last_stage(groups.pp):
        dist.all_reduce(total, group=groups.dp)
    return (total / max(samples(batches[0]), 1.0)).clamp(min=0)


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return the metrics of rewards [pairs]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }
