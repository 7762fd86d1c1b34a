"""The model that preference training measures against: log-probabilities of documents, by forward passes alone.

It is the model before training (`--ref_model`, or what the run starts from); of a model with adapters that model
without them. Its passes go through the pipeline's schedule by themselves, before those of the step.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.layers.pooling import sum_documents
from ...bridge.model.model import Model
from ...bridge.model.outputs import LogProbs
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..observability.flops import Flops
from ..options.groups import PrecomputeOptions, ReferenceOptions
from ..run.context import Run
from ..train.reference_sync import REFERENCE, ReferenceSync
from ..train.step import TrainState, log_probs
from .frozen_model import build_frozen, forward_only, offloaded

# Log-probabilities of the documents of each micro batch [documents], on the last pipeline stage; elsewhere nothing.
# The state is None before it begins.
Sums = Callable[[list[Batch], TrainState | None], list[Tensor]]
Of = Callable[[Model, Sequence[torch.nn.Module], list[Batch]], list[Tensor]]  # as sums_of


@dataclass(frozen=True)
class Reference:
    """`train` and `eval` give the reference's log-probabilities of the documents of training and evaluation data."""

    train: Sums
    eval: Sums
    flops: Flops | None  # of the passes that it makes; None: it makes none during training
    note: str  # what it is, for the user
    follower: ReferenceSync | None = None  # of one that follows the policy

    def __call__(self, training: TrainState, batches: list[Batch], evaluates: bool) -> list[Tensor]:
        return (self.eval if evaluates else self.train)(batches, training)


def sums_of(model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch]) -> list[Tensor]:
    """Return the log-probability of each document of each micro batch, fp32 [documents], summed over its trained
    tokens. On the last pipeline stage; elsewhere nothing. Without dropout.
    """
    return forward_only(model, chunks, batches, log_probs, sums_by_document)


def log_probs_of(
    model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch], temperature: float, *, replays: bool = False
) -> list[Tensor]:
    """Return the log-probability of each trained token of each micro batch, fp32 [1, local length].

    On the last pipeline stage; elsewhere nothing. Without dropout. temperature: divides the logits. replays: routers
    repeat Batch.experts.
    """
    return forward_only(model, chunks, batches, lambda batch: LogProbs(temperature), replays=replays)


def entropies_of(
    model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch], temperature: float
) -> list[Tensor]:
    """Return the entropies of the distributions of trained tokens. Otherwise as `log_probs_of` with `replays`."""
    output = LogProbs(temperature, entropies=True)
    return forward_only(model, chunks, batches, lambda batch: output, lambda batch, values: values[1], replays=True)


def sums_by_document(batch: Batch, values: Tensor) -> Tensor:
    """Return the weighted sums of log-probabilities [1, local length] over each document: fp32 [documents], on every
    rank of a context-parallel group."""
    assert batch.grouping is not None
    return sum_documents(values * batch.loss_weights, batch.grouping.spans, batch.grouping.segments)


def make_reference(run: Run, model: Model, options: ReferenceOptions, train: Batches, val: Batches | None) -> Reference:
    """Return the reference that the options ask for, of a `model` that is to be trained. Every rank calls this.

    Before there is an optimizer: what is computed beforehand then has room for a second model.
    """
    sums, flops, name, follower = reference_of(run, model, options, sums_of)
    if not (isinstance(options, PrecomputeOptions) and options.precompute_ref_log_probs):
        return Reference(sums, sums, flops, f"reference: {name}", follower)
    tables = [Table(sums, batches, model.groups) for batches in (train, val) if batches is not None]
    note = f"reference: {name}, whose log-probabilities were computed before training"
    return Reference(tables[0], tables[-1], None, note)


def reference_of(
    run: Run, model: Model, options: ReferenceOptions, of: Of
) -> tuple[Sums, Flops, str, ReferenceSync | None]:
    """Return `of` bound to the reference, the FLOPs of its passes, its name, and what has it follow the policy."""
    if model.lora and model.lora.switch:
        return _without_adapters(model, of), Flops.of_model(model), "the model without its adapters", None
    other, name = _build(run, options)
    offloads = options.offload_ref_model and runtime.device().type == "cuda"
    follower = ReferenceSync(model, other, options) if options.sync_ref_model else None
    return _of_another(other, of, offloads=offloads), Flops.of_model(other), name, follower


def _of_another(model: Model, of: Of, *, offloads: bool) -> Sums:
    on_device = offloaded(model) if offloads else nullcontext

    def sums(batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        with on_device():
            return of(model, model.chunks, batches)

    return sums


def _without_adapters(model: Model, of: Of) -> Sums:
    switch = model.lora.switch

    def sums(batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        with training.parameters_gathered() if training else nullcontext(), switch.disabled():
            return of(model, training.chunks if training else model.chunks, batches)

    return sums


def _build(run: Run, options: ReferenceOptions) -> tuple[Model, str]:
    """Return a model of its own, of which nothing is trained."""
    if options.sync_ref_model and run.resumed and (followed := run.resumed.folder / REFERENCE).is_dir():
        model, _ = build_frozen(run, {"model": str(followed), "mcore_model": None}, None, [])
        return model, f"as {run.resumed.checkpoint.name} has it, and it follows the model"
    requested = options.ref_model or options.mcore_ref_model
    source = {"model": options.ref_model or "", "mcore_model": options.mcore_ref_model} if requested else run.began_from
    flag = "--ref_model" if options.ref_model else "--mcore_ref_model"
    adapters = options.ref_adapters
    model, _ = build_frozen(run, source, f"{flag} {requested}" if requested else None, adapters)
    name = requested or f"the weights that the run began from, {source['mcore_model'] or source['model']}"
    name = f"{name} with {options.ref_adapters[0]}" if adapters else name
    return model, f"{name}, and it follows the model" if options.sync_ref_model else name


class Table:
    """Sums of every document of a store, computed before training: `--precompute_ref_log_probs`."""

    def __init__(self, sums: Sums, batches: Batches, groups: ProcessGroupCollection):
        self._groups = groups
        self._values = torch.zeros(batches.stored_samples, 2, device=runtime.device())  # [samples, their documents]
        for step in batches.one_pass():
            for of_part in [step, *([[batch.mismatched for batch in step]] if step[0].mismatched else [])]:
                for batch, found in zip(of_part, sums(of_part, None), strict=False):
                    self._values[self._places(batch)] = found
        if is_pp_last_stage(groups.pp):
            dist.all_reduce(self._values, group=groups.dp)

    def __call__(self, batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        if not is_pp_last_stage(self._groups.pp):
            return []
        return [self._values[self._places(batch)] for batch in batches]

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sample and document, by their numbers in the store, of each document."""
        grouping = batch.grouping
        assert grouping is not None
        device = runtime.device()
        return to_device(grouping.items[grouping.samples], device), to_device(grouping.parts, device)
