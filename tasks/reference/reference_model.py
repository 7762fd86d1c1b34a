"""Reference model of preference training and RL: log-probabilities by forward passes.

The reference is the model before training: `--ref_model`, or the run's initial weights. With adapters it is the model
without them. Its forward passes run in a pipeline schedule of their own, before the step.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
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
from ...bridge.model.vision_encoder import VisionEncoder
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ...templates.batching.episode_batches import Sequences
from ..observability.flops import Flops
from ..options.further_models import PrecomputeOptions, ReferenceOptions
from ..run.context import Run
from ..run.roles import Role
from ..train.media_features import share_features, shared_encoder
from ..train.reference_sync import REFERENCE, ReferenceSync
from ..train.step import TrainState, log_probs
from .frozen_model import build_frozen, forward_only, offloaded

# Values of the reference for each micro batch (see ForwardFn). The state is None before training begins.
ReferenceFn = Callable[[list[Batch], TrainState | None], list[Tensor]]
ForwardFn = Callable[[Model, Sequence[torch.nn.Module], list[Batch]], list[Tensor]]  # as document_log_probs


@dataclass(frozen=True)
class Reference:
    """Reference log-probabilities of documents: `train` for training data, `eval` for evaluation data."""

    train: ReferenceFn
    eval: ReferenceFn
    flops: Flops | None  # of its forward passes; None: none during training
    note: str  # description for the user
    follower: ReferenceSync | None = None  # with --sync_ref_model

    def __call__(self, training: TrainState, batches: list[Batch], evaluates: bool) -> list[Tensor]:
        return (self.eval if evaluates else self.train)(batches, training)


def document_log_probs(model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch]) -> list[Tensor]:
    """Return log-probabilities of each micro batch's documents, fp32 [documents], summed over trained tokens.

    Empty except on the last pipeline stage. Without dropout.
    """
    return forward_only(model, chunks, batches, log_probs, sum_by_document)


def token_log_probs(
    model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch], temperature: float, *, replays: bool = False
) -> list[Tensor]:
    """Return the log-probability of each trained token of each micro batch, fp32 [1, local length].

    Empty except on the last pipeline stage. Without dropout. temperature: divides the logits. replays: routers replay
    Batch.experts.
    """
    return forward_only(model, chunks, batches, lambda batch: LogProbs(temperature), replays=replays)


def token_entropies(
    model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch], temperature: float
) -> list[Tensor]:
    """Return the entropy at each trained token. Otherwise as `token_log_probs` with `replays`."""
    output = LogProbs(temperature, entropies=True)
    return forward_only(model, chunks, batches, lambda batch: output, lambda batch, values: values[1], replays=True)


def sum_by_document(batch: Batch, values: Tensor) -> Tensor:
    """Return the weighted sum of log-probabilities [1, local length] over each document: fp32 [documents].

    Every rank of a context-parallel group has the result.
    """
    assert batch.grouping is not None
    return sum_documents(values * batch.loss_weights, batch.grouping.spans, batch.grouping.segments, batch.prefixes)


def make_reference(run: Run, model: Model, options: ReferenceOptions, train: Batches, val: Batches | None) -> Reference:
    """Return the reference of `model` that the options select. Every rank calls it.

    Call it before the optimizer exists: precomputation then has memory for a second model.
    """
    reference_fn, flops, name, follower = bind_reference(run, model, options, document_log_probs, shares_batches=True)
    if not (isinstance(options, PrecomputeOptions) and options.precompute_ref_log_probs):
        return Reference(reference_fn, reference_fn, flops, f"reference: {name}", follower)
    tables = [
        PrecomputedLogProbs(reference_fn, batches, model.groups) for batches in (train, val) if batches is not None
    ]
    note = f"reference: {name}, whose log-probabilities were computed before training"
    return Reference(tables[0], tables[-1], None, note)


class RolloutReference:
    """Reference of RL, in the policy's layout or in its own: log-probabilities of generated tokens on every rank.

    Errors reach every rank.
    """

    def __init__(self, run: Run, model: Model, options: ReferenceOptions, temperature: float):
        """temperature: divides the logits."""
        self._role, forward = Role(run, "ref"), partial(token_log_probs, temperature=temperature)
        with self._role.entered():
            self._reference_fn, self.flops, name, self.follower = bind_reference(
                self._role.run, model, options, forward
            )
        self.note = f"reference: {name}{self._role.note}"

    def log_probs(self, sequences: Sequences, training: TrainState) -> list[np.ndarray]:
        """Return the log-probability of each trained token of the documents: float32 [length] each."""
        return self._role.label_values(sequences, lambda batches: self._reference_fn(batches, training))


def bind_reference(
    run: Run, model: Model, options: ReferenceOptions, forward: ForwardFn, *, shares_batches: bool = False
) -> tuple[ReferenceFn, Flops, str, ReferenceSync | None]:
    """Return `forward` bound to the reference, the FLOPs of its passes, its name, and its follower.

    shares_batches: the model trains on the same micro batches, and may read the features of their images
    """
    encoder = None
    if model.lora and model.lora.switch:
        reference_fn, reference_model = _bind_adapter_switch(model, forward), model
        name, follower = "the model without its adapters", None
        if shares_batches and model.vision and not model.vision.trains:
            encoder = model.vision
    else:
        reference_model, name = _build(run, options)
        offloads = options.offload_ref_model and runtime.device().type == "cuda"
        follower = ReferenceSync(model, reference_model, options) if options.sync_ref_model else None
        if shares_batches and not follower:
            encoder = shared_encoder(model, reference_model)
        reference_fn = _bind_frozen_model(reference_model, forward, offloads=offloads)
    flops = Flops.of_model(reference_model)
    if encoder is None:
        return reference_fn, flops, name, follower
    return _with_shared_features(reference_fn, encoder), replace(flops, vision=None), name, follower


def _with_shared_features(reference_fn: ReferenceFn, encoder: VisionEncoder) -> ReferenceFn:
    """Have the trained model's encoder compute the features that the reference, and later the model, read."""

    def with_features(batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        share_features(encoder, batches)
        return reference_fn(batches, training)

    return with_features


def _bind_frozen_model(model: Model, forward: ForwardFn, *, offloads: bool) -> ReferenceFn:
    on_device = offloaded(model) if offloads else nullcontext

    def reference_fn(batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        with on_device():
            return forward(model, model.chunks, batches)

    return reference_fn


def _bind_adapter_switch(model: Model, forward: ForwardFn) -> ReferenceFn:
    switch = model.lora.switch

    def reference_fn(batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        with training.parameters_gathered() if training else nullcontext(), switch.disabled():
            return forward(model, training.chunks if training else model.chunks, batches)

    return reference_fn


def _build(run: Run, options: ReferenceOptions) -> tuple[Model, str]:
    """Build a frozen reference model, and return it with its name."""
    if options.sync_ref_model and run.resumed and (synced := run.resumed.folder / REFERENCE).is_dir():
        model, _ = build_frozen(run, {"model": str(synced), "mcore_model": None}, None, [])
        return model, f"as {run.resumed.checkpoint.name} has it, and it follows the model"
    requested = options.ref_model or options.mcore_ref_model
    source = {"model": options.ref_model or "", "mcore_model": options.mcore_ref_model} if requested else run.began_from
    flag = "--ref_model" if options.ref_model else "--mcore_ref_model"
    adapters = options.ref_adapters
    model, _ = build_frozen(run, source, f"{flag} {requested}" if requested else None, adapters)
    name = requested or f"the weights that the run began from, {source['mcore_model'] or source['model']}"
    name = f"{name} with {options.ref_adapters[0]}" if adapters else name
    return model, f"{name}, and it follows the model" if options.sync_ref_model else name


class PrecomputedLogProbs:
    """Log-probabilities of every document of a store, computed before training: `--precompute_ref_log_probs`."""

    def __init__(self, reference_fn: ReferenceFn, data: Batches, groups: ProcessGroupCollection):
        self._groups = groups
        self._values = torch.zeros(data.stored_samples, 2, device=runtime.device())  # [samples, documents of each]
        for step in data.one_pass():
            for batches in [step, *([[batch.mismatched for batch in step]] if step[0].mismatched else [])]:
                for batch, values in zip(batches, reference_fn(batches, None), strict=False):
                    self._values[self._indices(batch)] = values
        if is_pp_last_stage(groups.pp):
            dist.all_reduce(self._values, group=groups.dp)

    def __call__(self, batches: list[Batch], training: TrainState | None) -> list[Tensor]:
        if not is_pp_last_stage(self._groups.pp):
            return []
        return [self._values[self._indices(batch)] for batch in batches]

    def _indices(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sample index in the store and the index within the sample, of each document."""
        grouping = batch.grouping
        assert grouping is not None
        device = runtime.device()
        return to_device(grouping.items[grouping.samples], device), to_device(grouping.parts, device)
