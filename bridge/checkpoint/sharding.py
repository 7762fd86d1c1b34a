"""Sharded state dict of the model for megatron.core.dist_checkpointing.

The checkpoint has each tensor as it is without tensor parallelism. A rank writes the pieces that it holds, and reads
the pieces that it needs. Names and shapes are those of megatron-core's `GPTModel.sharded_state_dict` with Transformer
Engine's layers, so that Megatron-LM and this package read each other's checkpoints. megatron-core's optimizers take the
result of `sharded_state` as their model's state.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..lora.adapter_mapping import AdapterPlan
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import LocalParam, is_copy, iter_params, shard_group, shard_position
from ..mapping.param_mapping import (
    EMBEDDING,
    OUTPUT,
    TOWERS,
    VOCAB,
    MappingEntry,
    ParamKey,
    ParamTable,
    ShardingKind,
    clip_spans,
)
from ..model.chunk_mapping import describe_chunks, map_chunks

LAYERS = "decoder.layers.{layer}."
LAYER = re.compile(
    r"decoder\.layers\.\{layer\}\.|mtp\.layers\.\{layer\}\.(?:transformer_layer\.|mtp_model_layer\.)?"
    r"|(?:vision|audio)\.(?:layers|deep_mergers)\.\{layer\}\."
)
# Norms that Transformer Engine fuses into the next matrix: the norm, the matrix, the norm's fused name.
FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.", "self_attention.linear_q_up_proj.layer_norm_"),
    (
        "self_attention.kv_layernorm.",
        "self_attention.linear_kv_up_proj.",
        "self_attention.linear_kv_up_proj.layer_norm_",
    ),
)  # fmt: skip


def sharded_state(
    chunks: Sequence[GPTModel], hf_config: HfConfig, naming: "Naming | None" = None
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the sharded state of this rank's `chunks` for megatron.core.dist_checkpointing.

    It has one value per parameter and persistent buffer, by a name that is unique on this rank. The parameter is the
    value's `data`: megatron-core's optimizers find their parameters by it.
    """
    _, architecture, entries = map_chunks(chunks, hf_config)
    naming = naming or name_tensors(entries)
    return _build_sharded_state(iter_params(chunks), entries, naming, architecture)


def sharded_adapter(
    chunks: Sequence[GPTModel], hf_config: HfConfig, plan: AdapterPlan
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the sharded state of an adapter checkpoint: the adapters of `chunks` and the fully trained modules."""
    architecture = describe_chunks(chunks, hf_config)
    entries, naming = plan.all_entries, name_adapter(plan)
    trained = (param for param in iter_params(chunks) if plan.modules_to_save.keys() & param.views.keys())
    return _build_sharded_state(chain(iter_params(chunks, adapters=True), trained), entries, naming, architecture)


def _build_sharded_state(
    params: Iterable[LocalParam],
    entries: ParamTable,
    naming: "Naming",
    architecture: Architecture,
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    return {
        str(key := next(iter(param.views))): _shard_tensor(
            param.chunk, param.tensor, param.views, entries[key], naming, architecture
        )
        for param in params
    }


@dataclass(frozen=True)
class Naming:
    """Tensor names of a model in a checkpoint."""

    names: dict[ParamKey, str]
    stacked: bool  # identical layers are stacked along a first dimension; else each layer has tensors of its own


def name_tensors(entries: ParamTable, stored: Mapping[str, object] | None = None) -> Naming:
    """Name tensors as megatron-core with Transformer Engine does, or as its local layers if `stored` has those."""
    siblings: dict[tuple[str, int | None], dict[str, ShardingKind]] = defaultdict(dict)
    for key, entry in entries.items():
        prefix, suffix = _split_layer_prefix(key.name)
        siblings[prefix, key.layer][suffix] = entry.kind
    layers = {frozenset(kinds.items()) for (prefix, _), kinds in siblings.items() if prefix == LAYERS}
    are_alike = len(layers) == 1
    stacked = are_alike if stored is None else not any(name.startswith("decoder.layers.0.") for name in stored)
    names = {}
    for key in entries:
        prefix, suffix = _split_layer_prefix(key.name)
        scope = "decoder.layers." if stacked and prefix == LAYERS else prefix.format(layer=key.layer)
        scope = scope.replace("mtp_model_layer.", "transformer_layer.")  # as megatron-core saves it
        candidates = [scope + candidate for candidate in _candidate_names(suffix, siblings[prefix, key.layer])]
        names[key] = next((name for name in candidates if stored and name in stored), candidates[0])
    return Naming(add_tied_output(names, entries), stacked)


def name_adapter(plan: AdapterPlan) -> Naming:
    """Name the tensors of adapters and of fully trained modules, with global layer numbers."""
    entries = plan.all_entries
    return Naming(add_tied_output({key: key.name.format(layer=key.layer) for key in entries}, entries), stacked=False)


def add_tied_output(names: dict[ParamKey, str], entries: ParamTable) -> dict[ParamKey, str]:
    """Return `names` with the embedding's name for a tied output layer."""
    tied = OUTPUT in names and entries[OUTPUT] == entries.get(EMBEDDING)
    return names | {OUTPUT: names[EMBEDDING]} if tied else names


def _split_layer_prefix(name: str) -> tuple[str, str]:
    """Split decoder.layers.{layer}.mlp.router.weight into decoder.layers.{layer}. and mlp.router.weight."""
    match = LAYER.match(name)
    return (match[0], name[match.end() :]) if match else ("", name)


def _candidate_names(suffix: str, siblings: Iterable[str]) -> list[str]:
    """Return the possible names: Transformer Engine's first, then that of megatron-core's local layers."""
    if suffix.startswith("mlp.experts."):
        return [suffix.replace("mlp.experts.", "mlp.experts.experts.")]
    for norm, matrix, fused in FUSED:
        if suffix.startswith(norm):
            candidates = [suffix.replace(norm, fused), suffix]
            return candidates if any(name.startswith(matrix) for name in siblings) else candidates[::-1]
    return [suffix]


def _shard_tensor(
    chunk: GPTModel,
    tensor: Tensor,
    views: dict[ParamKey, Tensor],
    entry: MappingEntry,
    naming: Naming,
    architecture: Architecture,
) -> ShardedTensor | ShardedTensorFactory:
    """Return the sharded form of `tensor`. views: the tensor itself, or its part for each expert."""
    key, shard = next(iter(views.items()))
    dim, (ranks, rank) = entry.dim, shard_position(key, entry)
    pieces = shard_pieces(entry, shard.shape, ranks, rank, architecture)
    layer_axis: list[tuple[int, int]] = []  # (index, size) of the layer dimension, before the tensor's own
    if naming.stacked and key.layer is not None and key.name.startswith(LAYERS):
        layer_axis.append((key.layer, architecture.transformer["num_layers"]))
    leading = [layer_axis] if key.expert is None else [
        [*layer_axis, (expert.expert or 0, architecture.transformer["num_moe_experts"])] for expert in views
    ]  # fmt: skip
    axes = len(leading[0])
    name = naming.names[key]
    replica = find_replica_id(chunk, key, entry)
    if tensor.ndim == shard.ndim and len(pieces) == 1:
        return ShardedTensor.from_rank_offsets(
            name,
            tensor,
            *((axis, *position) for axis, position in enumerate(leading[0])),
            (axes + dim, rank, ranks),
            replica_id=replica,
            prepend_axis_num=axes,
            allow_shape_mismatch=entry.kind is VOCAB,  # its padding depends on the layout
        )

    def cut(name: str, tensor: Tensor, replica_id: tuple[int, int, int], _: object) -> list[ShardedTensor]:
        parts = []
        for positions, view in zip(leading, tensor.unbind() if tensor.ndim > shard.ndim else [tensor], strict=True):
            for start, global_start, length in pieces:
                data = view.narrow(dim, start, length)[(None,) * axes]
                global_shape = [*(number for _, number in positions), *view.shape]
                offset = [*(position for position, _ in positions), *(0 for _ in view.shape)]
                global_shape[axes + dim], offset[axes + dim] = ranks * view.shape[dim], global_start
                parts.append(
                    ShardedTensor(
                        name, data, data.dtype, tuple(data.shape), tuple(global_shape), tuple(offset), None, replica_id
                    )
                )
        return parts

    def join(parts: list[Tensor]) -> Tensor:
        flat = [part.flatten(0, axes) for part in parts]
        tensors = [torch.cat(flat[i : i + len(pieces)], dim) for i in range(0, len(flat), len(pieces))]
        return torch.stack(tensors) if tensor.ndim > shard.ndim else tensors[0]

    return ShardedTensorFactory(name, tensor, cast(Any, cut), cast(Any, join), replica)


def shard_pieces(
    entry: MappingEntry, shard: Sequence[int], ranks: int, rank: int, architecture: Architecture
) -> list[tuple[int, int, int]]:
    """Return the position of a rank's shard in the global tensor: (start in shard, start in tensor, length) per run.

    Mostly one run. A rank that holds shards of several matrices (gate and up) has one run for each: the global tensor
    has the full matrices one after the other.
    """
    size = shard[entry.dim]
    spans = entry.spans(shard, ranks, architecture)
    global_spans = entry.kind.spans(ranks * size, 1, architecture)
    if spans == global_spans:
        return [(0, rank * size, size)]
    runs: list[tuple[int, int, int]] = []
    for offset, span in clip_spans(spans, rank * size, (rank + 1) * size):
        target = 0
        for global_span in global_spans:
            low, high = max(span.start, global_span.start), min(span.stop, global_span.stop)
            is_same = span.part == global_span.part and span.step == global_span.step
            if is_same and low < high and (low - span.start) % span.step == 0 == (low - global_span.start) % span.step:
                start, length = offset + (low - span.start) // span.step, len(range(low, high, span.step))
                global_start = target + (low - global_span.start) // span.step
                if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == global_start:
                    runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + length)
                else:
                    runs.append((start, global_start, length))
            target += global_span.length
    if sum(length for *_, length in runs) != size:
        raise RuntimeError(f"{', '.join(entry.hf)}: one process and {ranks} do not lay out the same tensor")
    return sorted(runs)


def find_replica_id(chunk: GPTModel, key: ParamKey, entry: MappingEntry) -> tuple[int, int, int]:
    """Return the replica id of this rank's copy of a tensor. The copy that is saved has only zeros."""
    if key.name.startswith(TOWERS):
        return 0, 0, dist.get_rank()
    shard_rank = shard_group(expert=key.expert is not None).rank() if entry.kind.dim is None else 0
    if key.expert is not None:
        return 0, shard_rank, parallel_state.get_expert_data_parallel_rank()
    return int(is_copy(chunk, key)), shard_rank, parallel_state.get_data_parallel_rank(with_context_parallel=True)
