"""A model beside the one that is trained, of which nothing is: references and teachers, and their forward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint import hub
from ...bridge.checkpoint.adapter_files import load_adapter, read_settings
from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.lora.attach import attach_adapters
from ...bridge.lora.merge import merge_and_unload
from ...bridge.mapping.fp8 import load_as_bf16
from ...bridge.model.build import Model, build_model
from ...templates.batching.collator import Batch
from ..distributed.collectives import first_of_each_node, on_every_rank, on_first_rank
from ..run.context import Run
from ..run.load_weights import read_weights
from ..run.vocabulary import check_vocabulary
from ..train.step import Forward, through_pipeline


def build_frozen(run: Run, source: dict[str, Any], given: str | None, adapters: list[str]) -> tuple[Model, Path]:
    """A model and its folder, in the run's layout of processes. Every rank calls this; errors reach every rank.

    source: the options that name it, `model` and `mcore_model`. given: the flag that does, as it was typed, whose
    vocabulary is looked at; None: it is what the run began from. adapters: what is put on it.
    """
    asked = replace(run.options, **source)
    folder = first_of_each_node(lambda: _folder(asked, given))
    hf_config = on_every_rank(lambda: hub.read_config(folder, mcore=bool(asked.mcore_model)))
    if given:
        on_first_rank(lambda: check_vocabulary(run.tokenizer, folder, given))
    built = replace(run.options, recompute_granularity="none", fp8_param_gather=False)
    model = on_every_rank(lambda: build_model(hf_config, built, run.dtype, adapters=bool(adapters)))
    with load_as_bf16(model.chunks):
        on_every_rank(lambda: read_weights(model, hf_config, folder, seed=run.options.seed))
    if adapters:
        adapter = first_of_each_node(lambda: hub.adapter_folder(run.options, adapters))
        assert adapter is not None
        on_every_rank(lambda: _read_adapter(model, hf_config, folder, adapter))
        merge_and_unload(model.chunks)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return model, folder


def _folder(asked: Any, given: str | None) -> Path:
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
    settings = read_settings(adapter, hub.read_adapter_config(adapter))
    attach_adapters(model, hf_config, settings, seed=0, names=tensor_names(folder))
    load_adapter(model.chunks, hf_config, model.lora, adapter)


def offloaded(model: Model) -> Callable[[], Any]:
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


@torch.no_grad()
def passed(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    of: Callable[[Batch, Tensor], Tensor],
    forward: Forward,
) -> list[Tensor]:
    """What `of` makes of each micro batch and of what `forward` gives of it, without dropout and without gradients.

    On the last pipeline stage; elsewhere nothing.
    """

    def found(batch: Batch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return values.new_zeros(()), {"found": of(batch, values)}

    for chunk in chunks:
        chunk.eval()
    outputs = through_pipeline(model, chunks, batches, found, forward_only=True, forward=forward)
    return [output["found"] for output in outputs]
