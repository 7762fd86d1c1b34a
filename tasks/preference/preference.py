"""`megatron rlhf --rlhf_type dpo|kto|rm`: train on which answers are better than others.

Log-probabilities of whole answers are sums over their trained tokens. Losses are means over the samples of the global
batch, whatever the number of ranks, of micro batches, and of samples in a pack.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.build import Model
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..losses.preference import Dpo, Pairs, dpo_losses, dpo_rewards, kto_losses, reward_losses
from ..observability.flops import Flops
from ..options import DpoOptions, KtoOptions, RmOptions
from ..reference.reference_model import make_reference, sums_by_document, sums_of
from ..run.context import Run
from ..supervised.heads import scores
from ..train.objective import Objective, copied, detached, forward_flops, grouping_of, means, nothing, samples, share
from ..train.setup import train
from ..train.step import Training

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
    reference = None if options.reference_free else make_reference(run, model, options, train, val)

    def prepare(training: Training, batches: list[Batch], evaluates: bool) -> list[Batch]:
        found = reference(training, batches, evaluates) if reference else []
        return _knowing(batches, of_each={"reference": found}, of_all={})

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sums_by_document(batch, log_probs)
        tokens = to_device(grouping_of(batch).tokens, sums.device)
        theirs = batch.known.get("reference", torch.zeros_like(sums))
        pairs = Pairs(sums[::2], sums[1::2], theirs[::2], theirs[1::2], tokens[::2], tokens[1::2])
        chosen, rejected = dpo_rewards(pairs, settings)
        of_each = {
            "loss": dpo_losses(pairs, settings),
            **_pair_metrics(chosen, rejected),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
        }
        found = {name: share(values, batch) for name, values in of_each.items()}
        if likelihood:
            found["nll_loss"] = copied(-pairs.chosen.sum()) / max(batch.loss_tokens, 1.0)
            found["loss"] = found["loss"] + likelihood * found["nll_loss"]
        return found["loss"], detached(found)

    names = [*PAIR_METRICS, "logps/chosen", "logps/rejected", *(["nll_loss"] if likelihood else [])]
    flops = reference and reference.flops
    more = partial(forward_flops, flops) if flops else nothing
    follower = reference and reference.follower
    objective = Objective(loss, names, prepare=prepare, weight=samples, more_flops=more, follower=follower)
    return objective, [reference.note] if reference else []


def make_kto(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Kahneman-Tversky optimisation (https://arxiv.org/abs/2402.01306).

    Its reference point, how far the policy has gone from the reference on answers to other prompts, is a mean over the
    global batch, found by forward passes before the step.
    """
    options = run.options
    assert isinstance(options, KtoOptions)
    reference = make_reference(run, model, options, train, val)
    own = Flops.of_model(model)
    measures = options.loss_type == "kto"

    def prepare(training: Training, batches: list[Batch], evaluates: bool) -> list[Batch]:
        of_all = {}
        if measures:
            besides = _besides(batches)
            policy = sums_of(model, training.chunks, besides)
            of_all["kl"] = _divergence(batches, policy, reference(training, besides, evaluates))
        return _knowing(batches, of_each={"reference": reference(training, batches, evaluates)}, of_all=of_all)

    def more_flops(batches: list[Batch]) -> float:
        besides = _besides(batches) if measures else []
        theirs = forward_flops(reference.flops, [*batches, *besides]) if reference.flops else 0.0
        return theirs + forward_flops(own, besides)

    def loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums = sums_by_document(batch, log_probs)
        desirable = to_device(grouping_of(batch).labels[:, 0] == 1, sums.device)
        theirs, kl = batch.known["reference"], batch.known.get("kl", sums.new_zeros(()))
        losses = kto_losses(
            sums,
            theirs,
            desirable,
            kl,
            beta=options.beta,
            loss_type=options.loss_type,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        rewards = options.beta * (sums - theirs)
        found = {"loss": losses, "kl": kl.expand(len(sums))}
        for side, mask in (("chosen", desirable), ("rejected", ~desirable)):
            found |= {f"rewards/{side}": rewards * mask, f"logps/{side}": sums * mask, f"count/{side}": mask.float()}
        shares = {name: share(values, batch) for name, values in found.items()}
        return shares["loss"], detached(shares)

    names = ["loss", "kl", *(f"{what}/{side}" for side in ("chosen", "rejected") for what in KTO_SUMS)]
    objective = Objective(
        loss,
        names,
        prepare=prepare,
        means=_kto_means,
        weight=samples,
        more_flops=more_flops,
        follower=reference.follower,
    )
    return objective, [reference.note]


def _besides(batches: list[Batch]) -> list[Batch]:
    """The same prompts with answers to others."""
    return [batch.mismatched for batch in batches if batch.mismatched is not None]


KTO_SUMS = "rewards", "logps", "count"


def _kto_means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Of rewards and log-probabilities over the answers of their kind, where there were some."""
    found = means({name: sums[name] for name in ("loss", "kl")}, weight)
    sides = [side for side in ("chosen", "rejected") if sums[f"count/{side}"]]
    found |= {
        f"{what}/{side}": sums[f"{what}/{side}"] / sums[f"count/{side}"] for side in sides for what in KTO_SUMS[:2]
    }
    if len(sides) == 2:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def make_rm(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """A reward model: the better answer scores higher (Bradley and Terry's model of preferences)."""
    options = run.options
    assert isinstance(options, RmOptions)

    def loss(batch: Batch, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = found[::2, 0], found[1::2, 0]
        labels = grouping_of(batch).labels
        margins = to_device(labels[:, 0], found.device) if labels.shape[1] else None
        losses = reward_losses(chosen, rejected, margins, options.center_rewards_coefficient)
        of_each = {"loss": losses} | _pair_metrics(chosen, rejected)
        shares = {name: share(values, batch) for name, values in of_each.items()}
        return shares["loss"], detached(shares)

    return Objective(loss, PAIR_METRICS, forward=scores, weight=samples, scores_tokens=False), []


def _knowing(batches: list[Batch], *, of_each: dict[str, list[Tensor]], of_all: dict[str, Tensor]) -> list[Batch]:
    """The micro batches with what a pass before has found of each (nothing but on the last pipeline stage), and of
    all."""
    return [
        replace(batch, known=of_all | {name: found[number] for name, found in of_each.items() if found})
        for number, batch in enumerate(batches)
    ]


def _divergence(batches: list[Batch], policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """KTO's reference point: the mean log ratio of answers to other prompts, over the global batch, at least 0."""
    device = runtime.device()
    total = torch.stack(
        [(ours - theirs).sum() for ours, theirs in zip(policy, reference, strict=True)]
        or [torch.zeros((), device=device)]
    ).sum()
    if parallel_state.is_pipeline_last_stage():
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return (total / max(samples(batches[0]), 1.0)).clamp(min=0)


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Of rewards [pairs]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }
