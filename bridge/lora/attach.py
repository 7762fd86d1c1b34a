"""Attachment of LoRA adapters to a model, whose other parameters are frozen."""

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import collect_params, iter_views, shard_group, shard_position
from ..mapping.param_mapping import OUTPUT, MappingEntry, ParamKey, ParamTable, Span, clip_spans
from ..model.build import DTYPES, enable_grads_through_frozen
from ..model.chunk_mapping import map_chunks
from ..model.model import Model
from ..model.score_head import seeded_generator
from ..model.trainable import is_frozen
from ..options import VisionOptions
from .adapter_mapping import EMBEDDING_MODULE, ROUTER, AdapterPlan, plan_adapters
from .disable_adapter import AdapterSwitch
from .layers import EmbeddingAdapter, ExpertsAdapter, FusedLinearAdapter, LinearAdapter, MatrixSharding
from .settings import LoraSettings


@dataclass
class Lora:
    """Adapters of a model."""

    settings: LoraSettings
    plan: AdapterPlan
    switch: AdapterSwitch | None = None  # if training disables them at times


def attach_adapters(
    model: Model,
    hf_config: HfConfig,
    settings: LoraSettings,
    *,
    seed: int,
    names: Container[str] = (),
    vision: VisionOptions | None = None,
) -> None:
    """Attach initialized adapters to the model's chunks, and freeze the other parameters.

    The weights must be loaded. The initial values are the same in every layout. names: the checkpoint's tensors, where
    a family has several spellings. vision: which parts of a vision-language model get adapters.
    Raises ValueError for settings that do not fit this model.
    """
    _, architecture, entries = map_chunks(model.parts, hf_config, names)
    plan = plan_adapters(
        entries, settings, architecture, is_frozen=lambda key: vision is not None and is_frozen(key, vision)
    )
    dtype = DTYPES[settings.dtype] if settings.dtype else model.config.params_dtype
    # The optimizer has master weights for one half precision only.
    if dtype not in (model.config.params_dtype, torch.float32):
        raise ValueError(
            f"--lora_dtype {settings.dtype} cannot be used with a model of another type. Set float32, or remove it"
        )
    for chunk in model.parts:
        for name, parameter in list(chunk.named_parameters()):
            key, view = next(iter_views(chunk, name, parameter))
            is_trained = key in plan.modules_to_save or (key == OUTPUT and bool(plan.copies))
            parameter.requires_grad_(is_trained and parameter.requires_grad)  # no loss reaches those built without
            if key in plan.adapted:
                _check_rank(settings, key, entries[key], view, architecture)
                module: Any = chunk.get_submodule(name.rpartition(".")[0])
                module.adapter = adapter = _build(model, module, parameter, key, entries[key], plan, settings, dtype)
                # Transformer Engine's modules reject parameters of another dtype than their input.
                module.activation_dtype = model.config.params_dtype
                if isinstance(adapter, FusedLinearAdapter | ExpertsAdapter):
                    module._forward_impl = partial(adapter)  # a bare module would be registered as a child
                elif not key.name.endswith(f"{ROUTER}.weight"):  # the router calls its adapter itself
                    adapter.hook = module.register_forward_hook(_adapter_hook)
    for chunk in model.chunks:
        enable_grads_through_frozen(chunk, has_trained_input=model.vision is not None and model.vision.trains)
    model.lora = Lora(settings, plan)
    _initialize(model, plan.entries, seed)
    for chunk in model.parts:
        for module in chunk.modules():
            if isinstance(module, LinearAdapter):
                module.init_magnitude()


def _adapter_hook(module: Any, inputs: tuple, output: Any) -> Any:
    return module.adapter(inputs[0], output, *inputs[1:])


def _build(
    model: Model, module: Any, weight: Tensor, key: ParamKey, entry: MappingEntry, plan: AdapterPlan,
    settings: LoraSettings, dtype: torch.dtype,
) -> Any:  # fmt: skip
    config: TransformerConfig = model.config
    is_expert = key.expert is not None
    group = shard_group(expert=is_expert)
    split = entry.kind.dim if group.size() > 1 else None
    # Under --moe_shared_expert_overlap the shared experts communicate outside of their linear layers.
    is_external = getattr(module, "explicit_expert_comm", False) or getattr(module, "parallel_mode", "") is None
    sharding = MatrixSharding(split, group, config.sequence_parallel, not is_expert and not is_external)
    if key.name.endswith(f"{EMBEDDING_MODULE}.weight"):
        is_scattered = getattr(module, "reduce_scatter_embeddings", False)
        sharding = sharding._replace(sequence_parallel=is_scattered)
        adapter = EmbeddingAdapter(weight, settings.rank, settings.scaling, dtype, sharding, module.vocab_start_index)
        for parameter in adapter.parameters():  # those of a copy on another pipeline stage stay equal as it does
            for name in ("shared", "shared_embedding"):
                setattr(parameter, name, getattr(weight, name, False))
        return adapter
    shape = weight.shape[1:] if is_expert else weight.shape
    parts = _part_mask(key, entry, shape, plan.adapted[key], model).to(weight.device)
    if is_expert:
        adapter = ExpertsAdapter(weight, parts, settings.rank, settings.scaling, dtype, sharding)
    else:
        bias = getattr(module, "bias", None)
        is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        kind = FusedLinearAdapter if is_linear and group.size() == 1 and not settings.dora else LinearAdapter
        adapter = kind(
            weight, parts, settings.rank, settings.scaling, dtype, sharding,
            dropout=plan.dropout, dora=settings.dora, bias=bias,
        )  # fmt: skip
    for parameter in adapter.parameters():
        parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
    return adapter


def _part_mask(key: ParamKey, entry: MappingEntry, shape: torch.Size, chosen: tuple[int, ...], model: Model) -> Tensor:
    """Return a mask of this rank's outputs that belong to each of the parts `chosen`: bool [outputs, parts]."""
    parts = torch.zeros(shape[0], len(chosen), dtype=torch.bool)
    if entry.kind.dim == 1:
        return ~parts
    ranks, rank = shard_position(key, entry)
    for start, span in clip_spans(
        entry.spans(shape, ranks, model.architecture), rank * shape[0], (rank + 1) * shape[0]
    ):
        if span.part in chosen:
            parts[start : start + span.length, chosen.index(span.part)] = True
    return parts


def _check_rank(
    settings: LoraSettings, key: ParamKey, entry: MappingEntry, shard: Tensor, architecture: Architecture
) -> None:
    spans = entry.spans(shard.shape, shard_position(key, entry)[0], architecture)
    for name, shape in entry.hf_shapes(shard.shape, spans).items():
        if settings.rank > min(shape):
            raise ValueError(f"--lora_rank {settings.rank} is larger than {name} {list(shape)}. Set a lower one")


@torch.no_grad()
def _initialize(model: Model, entries: ParamTable, seed: int) -> None:
    """Initialize adapters as PEFT does: one factor 0, the other random by the name, the expert and `seed` alone."""
    for key, tensor in collect_params(model.parts, adapters=True).items():
        if key.name.endswith("magnitude"):
            continue
        tensor.zero_()
        entry = entries[key]
        ranks, rank = shard_position(key, entry)
        spans = entry.spans(tensor.shape, ranks, model.architecture)
        initial = {
            name: _initial_values(name, shape, entry.expert_index, seed)
            for name, shape in entry.hf_shapes(tensor.shape, spans).items()
            if name.endswith(("lora_A.weight", "lora_embedding_B"))
        }
        local_size = tensor.shape[entry.dim]
        for start, span in clip_spans(spans, rank * local_size, (rank + 1) * local_size):
            if span.part is not None and entry.hf[span.part] in initial:
                tensor.narrow(entry.dim, start, span.length).copy_(_take(initial[entry.hf[span.part]], entry, span))


def _take(values: Tensor, entry: MappingEntry, span: Span) -> Tensor:
    return (values.t() if entry.transposed else values).narrow(entry.dim, span.start, span.stop - span.start)


def _initial_values(name: str, shape: tuple[int, ...], expert: int | None, seed: int) -> Tensor:
    """Return PEFT's initial values: kaiming_uniform_(a=sqrt(5)) for lora_A, normal_ for lora_embedding_B.

    expert: its number, where the tensor `name` holds all experts of a layer
    """
    generator = seeded_generator(name if expert is None else f"{name}.{expert}", seed)
    values = torch.empty(shape)
    if name.endswith("lora_embedding_B"):
        return values.normal_(generator=generator)
    bound = 1 / math.sqrt(shape[1])
    return values.uniform_(-bound, bound, generator=generator)
