"""The model that preference training measures against: log-probabilities of documents, by forward passes alone.

It is the model before training (`--ref_model`, or what the run starts from); of a model with adapters that model
without them. Its passes go through the pipeline's schedule by themselves, before those of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ..bridge import hub, runtime
from ..bridge.build import Model, build_model
from ..bridge.fp8 import reading_in_bf16
from ..bridge.layers.pooling import document_sums
from ..bridge.layers.segments import to_device
from ..bridge.lora.attach import attach
from ..bridge.lora.files import load_adapter, settings_of
from ..bridge.lora.merge import settle
from ..bridge.options import ModelOptions
from ..bridge.safetensors_io import names_of
from ..templates.batches import Batches
from ..templates.layout import Batch
from .flops import Flops
from .options import PrecomputeOptions, ReferenceOptions
from .ranks import first_of_each_node, on_every_rank, on_first_rank
from .run import Run
from .train import Forward, Training, log_probs, through_pipeline
from .weights import read_weights

# Log-probabilities of the documents of each micro batch [documents], on the last pipeline stage; elsewhere nothing.
# Training is None before it begins.
Sums = Callable[[list[Batch], Training | None], list[Tensor]]
Of = Callable[[Model, Sequence[torch.nn.Module], list[Batch]], list[Tensor]]  # as sums_of


@dataclass(frozen=True)
class Reference:
    """`train` and `eval` give the reference's log-probabilities of the documents of training and evaluation data."""

    train: Sums
    eval: Sums
    flops: Flops | None  # of the passes that it makes; None: it makes none during training
    note: str  # what it is, for the user

    def __call__(self, training: Training, batches: list[Batch], evaluates: bool) -> list[Tensor]:
        return (self.eval if evaluates else self.train)(batches, training)


@torch.no_grad()
def sums_of(model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch]) -> list[Tensor]:
    """The log-probability of each document of each micro batch, fp32 [documents], summed over its trained tokens.

    On the last pipeline stage; elsewhere nothing. Without dropout.
    """
    return _passed(model, chunks, batches, sums_by_document, log_probs)


@torch.no_grad()
def log_probs_of(
    model: Model, chunks: Sequence[torch.nn.Module], batches: list[Batch], temperature: float
) -> list[Tensor]:
    """The log-probability of each trained token of each micro batch, fp32 [1, local length], where logits are divided
    by `temperature`. On the last pipeline stage; elsewhere nothing. Without dropout."""
    forward = partial(log_probs, temperature=temperature)
    return _passed(model, chunks, batches, lambda batch, values: values, forward)


def _passed(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    of: Callable[[Batch, Tensor], Tensor],
    forward: Forward,
) -> list[Tensor]:
    def found(batch: Batch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return values.new_zeros(()), {"found": of(batch, values)}

    for chunk in chunks:
        chunk.eval()
    outputs = through_pipeline(model, chunks, batches, found, forward_only=True, forward=forward)
    return [output["found"] for output in outputs]


def sums_by_document(batch: Batch, values: Tensor) -> Tensor:
    """Of log-probabilities [1, local length], each times its label's weight: fp32 [documents], on every rank of a
    context-parallel group."""
    assert batch.grouping is not None
    return document_sums(values * batch.loss_weights, batch.grouping.spans, batch.grouping.segments)


def make_reference(run: Run, model: Model, options: ReferenceOptions, train: Batches, val: Batches | None) -> Reference:
    """The reference that the options ask for, of a `model` that is to be trained. Every rank calls this.

    Before there is an optimizer: what is computed beforehand then has room for a second model.
    """
    sums, flops, name = reference_of(run, model, options, sums_of)
    if not (isinstance(options, PrecomputeOptions) and options.precompute_ref_log_probs):
        return Reference(sums, sums, flops, f"reference: {name}")
    tables = [Table(sums, batches) for batches in (train, val) if batches is not None]
    note = f"reference: {name}, whose log-probabilities were computed before training"
    return Reference(tables[0], tables[-1], None, note)


def reference_of(run: Run, model: Model, options: ReferenceOptions, of: Of) -> tuple[Sums, Flops, str]:
    """What `of` finds with the reference, the cost of its passes, and what it is."""
    if model.lora and model.lora.switch:
        return _without_adapters(model, of), Flops.of_model(model), "the model without its adapters"
    other, name = _build(run, options)
    offloads = options.offload_ref_model and runtime.device().type == "cuda"
    return _of_another(other, of, offloads=offloads), Flops.of_model(other), name


def _of_another(model: Model, of: Of, *, offloads: bool) -> Sums:
    there = _offloaded(model) if offloads else nullcontext

    def sums(batches: list[Batch], training: Training | None) -> list[Tensor]:
        with there():
            return of(model, model.chunks, batches)

    return sums


def _without_adapters(model: Model, of: Of) -> Sums:
    switch = model.lora.switch

    def sums(batches: list[Batch], training: Training | None) -> list[Tensor]:
        with training.parameters_gathered() if training else nullcontext(), switch.off():
            return of(model, training.chunks if training else model.chunks, batches)

    return sums


def _build(run: Run, options: ReferenceOptions) -> tuple[Model, str]:
    """A model of its own, of which nothing is trained."""
    given = options.ref_model or options.mcore_ref_model
    source = {"model": options.ref_model or "", "mcore_model": options.mcore_ref_model} if given else run.began_from
    asked = replace(run.options, **source)
    folder = first_of_each_node(lambda: _folder(asked, given))
    hf_config = on_every_rank(lambda: hub.read_config(folder, mcore=bool(asked.mcore_model)))
    if given:
        on_first_rank(lambda: _check_vocabulary(run, folder, given))
    built = replace(run.options, recompute_granularity="none", fp8_param_gather=False)
    adapters = bool(options.ref_adapters)
    model = on_every_rank(lambda: build_model(hf_config, built, run.dtype, adapters=adapters))
    with reading_in_bf16(model.chunks):
        on_every_rank(lambda: read_weights(model, hf_config, folder, seed=run.options.seed))
    if adapters:
        adapter = first_of_each_node(lambda: hub.adapter_folder(run.options, options.ref_adapters))
        assert adapter is not None
        on_every_rank(lambda: _read_adapter(model, hf_config, folder, adapter))
        settle(model.chunks)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    name = given or f"the weights that the run began from, {source['mcore_model'] or source['model']}"
    return model, f"{name} with {options.ref_adapters[0]}" if adapters else name


def _folder(asked: ModelOptions, given: str | None) -> Path:
    try:
        return hub.source_folder(asked, asked.mcore_model)
    except FileNotFoundError as error:
        if given:
            raise
        raise FileNotFoundError(
            f"the reference is what the run began from, and that is not there any more ({error}). Give it as "
            "--ref_model"
        ) from error


def _read_adapter(model: Model, hf_config: dict[str, Any], folder: Path, adapter: Path) -> None:
    settings = settings_of(adapter, hub.read_adapter_config(adapter))
    attach(model, hf_config, settings, seed=0, names=names_of(folder))
    load_adapter(model.chunks, hf_config, model.lora, adapter)


def _check_vocabulary(run: Run, folder: Path, given: str) -> None:
    """Raise ValueError where a token means something else to the reference."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    theirs, ours = hub.load_tokenizer(folder).get_vocab(), run.tokenizer.get_vocab()
    if theirs == ours:
        return
    other = next(word for word in theirs.keys() | ours.keys() if theirs.get(word) != ours.get(word))
    raise ValueError(
        f"--ref_model {given} has another vocabulary than the model that is trained: {other!r} is token "
        f"{theirs.get(other)} there and {ours.get(other)} here. Give a reference that has the same tokenizer"
    )


def _offloaded(model: Model) -> Callable[[], Any]:
    """Keep the weights in the host's memory; within the context they are on the device."""
    kept = [
        (tensor, tensor.data.to("cpu").pin_memory())
        for chunk in model.chunks
        for tensor in (*chunk.parameters(), *chunk.buffers())
    ]
    for tensor, host in kept:
        tensor.data = host

    @contextmanager
    def there() -> Iterator[None]:
        for tensor, host in kept:
            tensor.data = host.to(runtime.device(), non_blocking=True)
        yield
        for tensor, host in kept:
            tensor.data = host

    return there


class Table:
    """What `sums` gives of every document of a store, found before training: `--precompute_ref_log_probs`."""

    def __init__(self, sums: Sums, batches: Batches):
        self._values = torch.zeros(batches.stored, 2, device=runtime.device())  # [samples, their documents]
        for step in batches.once():
            for of_part in [step, *([[batch.beside for batch in step]] if step[0].beside else [])]:
                for batch, found in zip(of_part, sums(of_part, None), strict=False):
                    self._values[self._places(batch)] = found
        if parallel_state.is_pipeline_last_stage():
            dist.all_reduce(self._values, group=parallel_state.get_data_parallel_group())

    def __call__(self, batches: list[Batch], training: Training | None) -> list[Tensor]:
        if not parallel_state.is_pipeline_last_stage():
            return []
        return [self._values[self._places(batch)] for batch in batches]

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sample and document, by their numbers in the store, of each document."""
        grouping = batch.grouping
        assert grouping is not None
        device = runtime.device()
        return to_device(grouping.items[grouping.samples], device), to_device(grouping.parts, device)
