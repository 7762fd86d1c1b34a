"""The model as megatron.core.dist_checkpointing wants it: what a rank holds, as pieces of whole tensors with names.

A tensor of the model is one tensor of the checkpoint, whole, as it would be without tensor parallelism; each rank
writes the pieces that it holds, and reads those that it needs. Names and shapes are those of megatron-core's
`GPTModel.sharded_state_dict` with Transformer Engine's layers, so that Megatron-LM and this package read each other's
checkpoints. What `sharded_state` returns is also what megatron-core's optimizers want as their model's state.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..lora.adapter_mapping import AdapterPlan
from ..mapping.local_params import LocalParam, iter_params, shard_group, shard_position
from ..mapping.param_mapping import (
    EMBEDDING,
    OUTPUT,
    VOCAB,
    Architecture,
    HfConfig,
    MappingEntry,
    ParamKey,
    ParamTable,
    clip_spans,
)
from ..model.chunk_mapping import describe_chunks, map_chunks

LAYERS = "decoder.layers.{layer}."
LAYER = re.compile(r"decoder\.layers\.\{layer\}\.|mtp\.layers\.\{layer\}\.(?:transformer_layer\.|mtp_model_layer\.)?")
# Where Transformer Engine fuses a norm into the matrix that follows it: the norm, that matrix, the norm's name in it.
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

    One value for each parameter and persistent buffer, which is its `data` (megatron-core's optimizers look for their
    parameters so), by a name that is its own on this rank.
    """
    _, architecture, entries = map_chunks(chunks, hf_config)
    naming = naming or name_tensors(entries)
    return _state(iter_params(chunks), entries, naming, architecture)


def sharded_adapter(
    chunks: Sequence[GPTModel], hf_config: HfConfig, plan: AdapterPlan
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the same of an adapter's checkpoint: the adapters of `chunks`, and what is trained whole beside them."""
    architecture = describe_chunks(chunks, hf_config)
    entries, naming = plan.all_entries, name_adapter(plan)
    trained = (param for param in iter_params(chunks) if plan.modules_to_save.keys() & param.views.keys())
    return _state(chain(iter_params(chunks, adapters=True), trained), entries, naming, architecture)


def _state(
    params: Iterable[LocalParam],
    entries: ParamTable,
    naming: "Naming",
    architecture: Architecture,
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    return {
        str(key := next(iter(views))): _sharded(chunk, tensor, views, entries[key], naming, architecture)
        for chunk, tensor, views in params
    }


@dataclass(frozen=True)
class Naming:
    """Names of a model's tensors in a checkpoint."""

    names: dict[ParamKey, str]
    stacked: bool  # layers, all alike, lie along a first dimension of one tensor; else each layer has its own


def name_tensors(entries: ParamTable, stored: Mapping[str, object] | None = None) -> Naming:
    """Name tensors as megatron-core with Transformer Engine does, or by its own layers if `stored` has these."""
    siblings: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for key in entries:
        prefix, rest = _layer_and_rest(key.name)
        siblings[prefix, key.layer].add(rest)
    alike = len({frozenset(rests) for (prefix, _), rests in siblings.items() if prefix == LAYERS}) == 1
    stacked = alike if stored is None else not any(name.startswith("decoder.layers.0.") for name in stored)
    names = {}
    for key in entries:
        prefix, rest = _layer_and_rest(key.name)
        where = "decoder.layers." if stacked and prefix == LAYERS else prefix.format(layer=key.layer)
        where = where.replace("mtp_model_layer.", "transformer_layer.")  # as megatron-core saves it
        spellings = [where + spelling for spelling in _spellings(rest, siblings[prefix, key.layer])]
        names[key] = next((name for name in spellings if stored and name in stored), spellings[0])
    return Naming(with_tied(names, entries), stacked)


def name_adapter(plan: AdapterPlan) -> Naming:
    """Name the tensors of adapters, and those trained beside them, by the model with global layer numbers."""
    entries = plan.all_entries
    return Naming(with_tied({key: key.name.format(layer=key.layer) for key in entries}, entries), stacked=False)


def with_tied(names: dict[ParamKey, str], entries: ParamTable) -> dict[ParamKey, str]:
    """Return the names, with the embedding's for an output layer that is a copy of it."""
    tied = OUTPUT in names and entries[OUTPUT] == entries.get(EMBEDDING)
    return names | {OUTPUT: names[EMBEDDING]} if tied else names


def _layer_and_rest(name: str) -> tuple[str, str]:
    """decoder.layers.{layer}.mlp.router.weight -> decoder.layers.{layer}. and mlp.router.weight"""
    match = LAYER.match(name)
    return (match[0], name[match.end() :]) if match else ("", name)


def _spellings(rest: str, siblings: set[str]) -> list[str]:
    """Transformer Engine's name first, then those of megatron-core's own layers."""
    if rest.startswith("mlp.experts."):
        return [rest.replace("mlp.experts.", "mlp.experts.experts.")]
    for norm, matrix, fused in FUSED:
        if rest.startswith(norm):
            both = [rest.replace(norm, fused), rest]
            return both if any(name.startswith(matrix) for name in siblings) else both[::-1]
    return [rest]


def _sharded(
    chunk: GPTModel,
    tensor: Tensor,
    views: dict[ParamKey, Tensor],
    entry: MappingEntry,
    naming: Naming,
    architecture: Architecture,
) -> ShardedTensor | ShardedTensorFactory:
    """`tensor`, whose `views` (itself, or what each expert has of it) are windows of whole tensors."""
    key, shard = next(iter(views.items()))
    dim, (ranks, rank) = entry.dim, shard_position(key, entry)
    pieces = pieces_of(entry, shard.shape, ranks, rank, architecture)
    outer: list[tuple[int, int]] = []  # place, and number of places, in the dimensions before the tensor's own
    if naming.stacked and key.layer is not None and key.name.startswith(LAYERS):
        outer.append((key.layer, architecture.transformer["num_layers"]))
    lead = [outer] if key.expert is None else [
        [*outer, (expert.expert or 0, architecture.transformer["num_moe_experts"])] for expert in views
    ]  # fmt: skip
    axes = len(lead[0])
    name = naming.names[key]
    replica = replica_of(chunk, name, key, entry)
    if tensor.ndim == shard.ndim and len(pieces) == 1:
        return ShardedTensor.from_rank_offsets(
            name,
            tensor,
            *((axis, *place) for axis, place in enumerate(lead[0])),
            (axes + dim, rank, ranks),
            replica_id=replica,
            prepend_axis_num=axes,
            allow_shape_mismatch=entry.kind is VOCAB,  # it is padded to what the layout divides
        )

    def cut(name: str, tensor: Tensor, replica_id: tuple[int, int, int], _: object) -> list[ShardedTensor]:
        parts = []
        for places, view in zip(lead, tensor.unbind() if tensor.ndim > shard.ndim else [tensor], strict=True):
            for at, target, length in pieces:
                data = view.narrow(dim, at, length)[(None,) * axes]
                global_shape = [*(number for _, number in places), *view.shape]
                offset = [*(place for place, _ in places), *(0 for _ in view.shape)]
                global_shape[axes + dim], offset[axes + dim] = ranks * view.shape[dim], target
                parts.append(
                    ShardedTensor(
                        name, data, data.dtype, tuple(data.shape), tuple(global_shape), tuple(offset), None, replica_id
                    )
                )
        return parts

    def join(parts: list[Tensor]) -> Tensor:
        flat = [part.flatten(0, axes) for part in parts]
        wholes = [torch.cat(flat[i : i + len(pieces)], dim) for i in range(0, len(flat), len(pieces))]
        return torch.stack(wholes) if tensor.ndim > shard.ndim else wholes[0]

    return ShardedTensorFactory(name, tensor, cast(Any, cut), cast(Any, join), replica)


def pieces_of(
    entry: MappingEntry, shard: Sequence[int], ranks: int, rank: int, architecture: Architecture
) -> list[tuple[int, int, int]]:
    """Return the position of a rank's shard in the global tensor: (from, to, length) of each run.

    Mostly one run, the rank's window. Where a rank holds its share of each of several matrices (gate and up), these
    come one after the other in the whole tensor.
    """
    size = shard[entry.dim]
    spans = entry.spans(shard, ranks, architecture)
    unsplit = entry.kind.spans(ranks * size, 1, architecture)
    if spans == unsplit:
        return [(0, rank * size, size)]
    runs: list[tuple[int, int, int]] = []
    for at, span in clip_spans(spans, rank * size, (rank + 1) * size):
        target = 0
        for other in unsplit:
            low, high = max(span.start, other.start), min(span.stop, other.stop)
            same = span.part == other.part and span.step == other.step
            if same and low < high and (low - span.start) % span.step == 0 == (low - other.start) % span.step:
                start, length = at + (low - span.start) // span.step, len(range(low, high, span.step))
                place = target + (low - other.start) // span.step
                if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == place:
                    runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + length)
                else:
                    runs.append((start, place, length))
            target += other.length
    if sum(length for *_, length in runs) != size:
        raise RuntimeError(f"{', '.join(entry.hf)}: one process and {ranks} do not lay out the same tensor")
    return sorted(runs)


def replica_of(chunk: GPTModel, name: str, key: ParamKey, entry: MappingEntry) -> tuple[int, int, int]:
    """Return the replica id of this rank's copy of a tensor; the saved copy's is all zeros."""
    copied = name == EMBEDDING.name and not chunk.pre_process  # a later stage's, for the output layer
    inside = shard_group(expert=key.expert is not None).rank() if entry.kind.dim is None else 0
    if key.expert is not None:
        return 0, inside, parallel_state.get_expert_data_parallel_rank()
    return int(copied), inside, parallel_state.get_data_parallel_rank(with_context_parallel=True)
