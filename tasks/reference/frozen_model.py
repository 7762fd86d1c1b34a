"""Frozen models beside the trained one (references and teachers), and their forward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint import hub, vision
from ...bridge.checkpoint.adapter_files import load_adapter, read_settings
from ...bridge.checkpoint.rope_scaling import scale_rope
from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.lora.attach import attach_adapters
from ...bridge.lora.merge import merge_and_unload
from ...bridge.mapping.fp8 import load_as_bf16
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...bridge.model.vision_encoder import Normalization
from ...templates.batching.collator import Batch
from ...templates.json_types import JsonObject
from ...templates.media.families import differing_setting
from ..distributed.collectives import broadcast_from_rank0, local_rank0_first, run_on_all_ranks
from ..run.context import Run
from ..run.load_weights import read_weights
from ..run.vocabulary import check_vocabulary
from ..train.step import Output, run_micro_batches


def build_frozen(run: Run, source: dict[str, Any], typed_flag: str | None, adapters: list[str]) -> tuple[Model, Path]:
    """Return a frozen model in the run's parallel layout, and its folder. Every rank calls it; errors reach every rank.

    It has its vision tower where the trained model has, and where the folder cannot be read without.
    source: values of the options `model` and `mcore_model`, and of others that differ from the run's
    typed_flag: the flag and its value, for messages; None if the model comes from the run itself. The vocabulary is
        checked only with a flag
    adapters: adapters to merge into the model
    """
    folder, hf_config = open_source(run, source, typed_flag)
    inference = {"recompute_granularity": "none", "fp8_param_gather": False, "cpu_offloading": False}
    build_options = replace(run.options.build, **inference)
    has_tower = run_on_all_ranks(lambda: builds_tower(run, hf_config, folder, typed_flag))
    model = run_on_all_ranks(
        lambda: build_model(hf_config, build_options, run.dtype, adapters=bool(adapters), vision=has_tower)
    )
    if model.vision and run.vision:
        model.vision.normalization = Normalization(*run.vision.normalization)
    with load_as_bf16(model.chunks):
        run_on_all_ranks(lambda: read_weights(model, hf_config, folder, seed=run.options.training.seed))
    if adapters:
        adapter = local_rank0_first(lambda: hub.adapter_folder(run.options, adapters))
        assert adapter is not None
        run_on_all_ranks(lambda: _read_adapter(model, hf_config, folder, adapter))
        merge_and_unload(model.parts)
    for part in model.parts:
        part.requires_grad_(False)
        part.eval()
    return model, folder


def builds_tower(run: Run, hf_config: JsonObject, folder: Path, typed_flag: str | None) -> bool:
    """Return whether to build the tower of a model beside the trained one.

    Raises ValueError if the run has images, and it has none, or one that takes other images.
    """
    has_tower = vision.has_tower(folder, hf_config)
    if run.sees_media and not has_tower:
        raise ValueError(
            f"{typed_flag or folder}: has no vision tower, and the run has images. Set a vision-language model of the "
            "same family"
        )
    if run.sees_media and (setting := differing_setting(run.hf_config, hf_config)):
        raise ValueError(
            f"{typed_flag or folder}: takes images in another form than the trained model ({setting} differs). Set a "
            "vision-language model of the same family"
        )
    return has_tower and (run.builds_tower or vision.needs_tower(folder))


def open_source(run: Run, source: dict[str, Any], typed_flag: str | None) -> tuple[Path, JsonObject]:
    """Return the folder and the config.json of a model beside the trained one. Arguments: as of `build_frozen`."""
    options = replace(run.options, **source)
    folder = local_rank0_first(lambda: _folder(options, typed_flag))
    hf_config = run_on_all_ranks(lambda: scale_rope(hub.read_config(folder, mcore=bool(options.mcore_model)), options))
    if typed_flag:
        broadcast_from_rank0(lambda: check_vocabulary(run.tokenizer, folder, typed_flag))
    return folder, hf_config


def _folder(options: Any, typed_flag: str | None) -> Path:
    try:
        return hub.source_folder(options, options.mcore_model)
    except FileNotFoundError as error:
        if typed_flag:
            raise
        raise FileNotFoundError(
            f"the reference is what the run began from, and that is not there any more ({error}). Give it as "
            "--ref_model"
        ) from error


def _read_adapter(model: Model, hf_config: dict[str, Any], folder: Path, adapter: Path) -> None:
    settings = read_settings(adapter, hub.read_adapter_config(adapter))
    attach_adapters(model, hf_config, settings, seed=0, names=tensor_names(folder))
    load_adapter(model.parts, hf_config, model.lora, adapter)


def offloaded(model: Model) -> Callable[[], Any]:
    """Move the weights to host memory, and return a context manager that loads them to the device meanwhile."""
    weights = [
        (tensor, tensor.data.to("cpu").pin_memory())
        for part in model.parts
        for tensor in (*part.parameters(), *part.buffers())
    ]
    for tensor, host_tensor in weights:
        tensor.data = host_tensor

    @contextmanager
    def on_device() -> Iterator[None]:
        for tensor, host_tensor in weights:
            tensor.data = host_tensor.to(runtime.device(), non_blocking=True)
        yield
        for tensor, host_tensor in weights:
            tensor.data = host_tensor

    return on_device


@torch.no_grad()
def forward_only(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    output: Output,
    reduce: Callable[[Batch, Tensor], Tensor] = lambda batch, values: values,
    *,
    replays: bool = False,
) -> list[Tensor]:
    """Run forward passes without dropout and gradients, and return `reduce(batch, output)` of each micro batch.

    Empty except on the last pipeline stage. replays: routers replay Batch.experts.
    """

    def no_loss(batch: Batch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return values.new_zeros(()), {"values": reduce(batch, values)}

    for chunk in chunks:
        chunk.eval()
    metrics = run_micro_batches(model, chunks, batches, no_loss, forward_only=True, output=output, replays=replays)
    return [batch_metrics["values"] for batch_metrics in metrics]
