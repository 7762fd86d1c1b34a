"""megatron-core's distributed checkpoints (torch_dist): saved from any layout, loaded into any other.

A tensor of the model is one tensor of the checkpoint, whole, as it would be without tensor parallelism; each rank
writes the pieces that it holds, and reads those that it needs. Names and shapes are those of megatron-core's
`GPTModel.sharded_state_dict` with Transformer Engine's layers, so that Megatron-LM and this package read each other's
folders. What `sharded_state` returns is also what megatron-core's optimizers want as their model's state.
"""

import errno
import re
import time
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import save as save_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from .carried import Carried
from .families import family_of
from .hub import LATEST, mcore_folder
from .proof import peak_memory, prove_loading, sources, write_proof
from .rows import EMBEDDING, OUTPUT, VOCAB, Architecture, Entry, Family, Key, table, window
from .safetensors_io import names_of
from .save import carry
from .tensors import held_whole, split_group, split_of

LAYERS = "decoder.layers.{layer}."
MAX_CARRIED = 5 * 2**30  # bytes of a file of carried.py
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


@torch.no_grad()
def save_distributed(
    chunks: Sequence[Any],
    hf_config: dict[str, Any],
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    iteration: int = 1,
    converted: bool = False,
) -> None:
    """Write `chunks`, this rank's GPTModels of `dtype`, into the empty folder `destination`, as Megatron-LM has it.

    To be called by every rank. `hf_config` is the raw config.json of `source`, whose tokenizer and other small files go
    along; conversion.json (see proof.py) has what was read from there where only the format changes (`converted`), else
    only what the tensors are called there. Tensors are written one by one; the files are on the disk when this returns.
    Raises OSError on every rank where one cannot write, and then the folder is not whole.
    """
    source, destination, started = Path(source), Path(destination), time.perf_counter()
    family = family_of(hf_config)
    architecture = family.describe(hf_config)
    entries = table(family, hf_config, architecture, names_of(source))
    naming = _name_tensors(entries)
    inside = destination / f"iter_{iteration:07}"

    def begin() -> None:
        inside.mkdir()
        (destination / LATEST).write_text(f"{iteration}\n")

    _on_first_rank(begin)
    state: dict[str, Any] = {
        "model": sharded_state(chunks, hf_config, naming),
        "args": _arguments(chunks[0].config, architecture),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    metadata = {"singleton_local_shards": False, "non_homogeneous_layers": not naming.stacked}
    try:
        with _quiet():
            save_checkpoint(state, str(inside), _Streaming(), content_metadata=metadata)  # pyright: ignore[reportArgumentType]
    except CheckpointException as error:
        raise _first_failure(error) from None
    names = sources(entries)
    along = Carried(source, hf_config, architecture, names, dtype)

    def finish() -> None:
        carry(source, destination, hf_config, dtype)
        along.save_beside(destination, MAX_CARRIED)
        if not converted:
            size, seconds = sum(file.stat().st_size for file in inside.iterdir()), time.perf_counter() - started
            cost = {"bytes": size, "seconds": seconds, "peak_memory": [peak_memory()]}
            write_proof(destination, "training", family.name, names, {}, **cost)

    _on_first_rank(finish)
    if converted:
        prove_loading(source, destination, hf_config, time.perf_counter() - started)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns of its own classes, which megatron-core uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        yield


def _on_first_rank(do: Callable[[], None]) -> None:
    """`do()` on rank 0; its OSError on every rank."""
    failures: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            do()
        except OSError as error:
            failures = [error]
    dist.broadcast_object_list(failures, src=0)
    if failures[0] is not None:
        raise failures[0]


@torch.no_grad()
def load_distributed(chunks: Sequence[Any], hf_config: dict[str, Any], folder: str | Path) -> None:
    """Set every parameter and persistent buffer of `chunks`, this rank's GPTModels, from the checkpoint in `folder`.

    `hf_config` is the raw config.json of the model. Values are converted to each parameter's dtype and device. Beyond
    its own weights a rank holds one piece of the checkpoint at a time. Nothing is sent between ranks. Raises ValueError
    where the folder has no such checkpoint, or one of another model.
    """
    folder = mcore_folder(folder)
    family = family_of(hf_config)
    architecture = family.describe(hf_config)
    entries = table(family, hf_config, architecture)
    stored = _stored(folder)
    naming = _name_tensors(entries, stored)
    _check_names(folder, stored.keys(), set(naming.names.values()), family)
    pieces = {
        name: cast(list[ShardedTensor], one.build()) if isinstance(one, ShardedTensorFactory) else [one]
        for name, one in sharded_state(chunks, hf_config, naming).items()
    }
    for of_tensor in pieces.values():
        _check_shape(folder, of_tensor[0], stored[of_tensor[0].key], architecture)
    try:
        with _quiet():
            TorchDistLoadShardedStrategy().load(pieces, folder)  # into the tensors themselves
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise ValueError(f"{folder} cannot be read ({cause}): copy it again, or make it anew") from None


def sharded_state(
    chunks: Sequence[Any], hf_config: dict[str, Any], naming: "Naming | None" = None
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """What `chunks`, this rank's GPTModels, hold of the model, for megatron.core.dist_checkpointing.

    One value for each parameter and persistent buffer, which is its `data` (megatron-core's optimizers look for their
    parameters so), by a name that is its own on this rank.
    """
    family = family_of(hf_config)
    architecture = family.describe(hf_config)
    entries = table(family, hf_config, architecture)
    naming = naming or _name_tensors(entries)
    state = {}
    for chunk, tensor, views in held_whole(chunks):
        key = next(iter(views))
        entry = entries[OUTPUT] if key == OUTPUT and architecture.tied else entries[key]
        state[str(key)] = _sharded(chunk, tensor, views, entry, naming, architecture)
    return state


@dataclass(frozen=True)
class Naming:
    """What the tensors of a model are called in a checkpoint."""

    names: dict[Key, str]
    stacked: bool  # layers, all alike, lie along a first dimension of one tensor; else each layer has its own


def _name_tensors(entries: Mapping[Key, Entry], stored: Mapping[str, Any] | None = None) -> Naming:
    """As megatron-core with Transformer Engine names them, or, where `stored` has it so, with its own layers."""
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
        spellings = [where + spelling for spelling in _spellings(rest, siblings[prefix, key.layer])]
        names[key] = next((name for name in spellings if stored and name in stored), spellings[0])
    if names.get(OUTPUT) and entries[OUTPUT] == entries[EMBEDDING]:
        names[OUTPUT] = names[EMBEDDING]
    return Naming(names, stacked)


def _layer_and_rest(name: str) -> tuple[str, str]:
    """decoder.layers.{layer}.mlp.router.weight -> decoder.layers.{layer}. and mlp.router.weight"""
    found = LAYER.match(name)
    return (found[0], name[found.end() :]) if found else ("", name)


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
    chunk: Any, tensor: Tensor, views: dict[Key, Tensor], entry: Entry, naming: Naming, architecture: Architecture
) -> ShardedTensor | ShardedTensorFactory:
    """`tensor`, whose `views` (itself, or what each expert has of it) are windows of whole tensors."""
    key, shard = next(iter(views.items()))
    dim, (ranks, rank) = entry.dim, split_of(key, entry)
    pieces = _pieces(entry, shard.shape, ranks, rank, architecture)
    outer: list[tuple[int, int]] = []  # place, and number of places, in the dimensions before the tensor's own
    if naming.stacked and key.layer is not None and key.name.startswith(LAYERS):
        outer.append((key.layer, architecture.transformer["num_layers"]))
    lead = [outer] if key.expert is None else [
        [*outer, (expert.expert or 0, architecture.transformer["num_moe_experts"])] for expert in views
    ]  # fmt: skip
    axes = len(lead[0])
    name = naming.names[key]
    replica = _replica(chunk, name, key, entry)
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

    def cut(name: str, tensor: Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        parts = []
        for places, view in zip(lead, tensor.unbind() if tensor.ndim > shard.ndim else [tensor], strict=True):
            for at, target, length in pieces:
                data = view.narrow(dim, at, length)[(None,) * axes]
                whole = [*(number for _, number in places), *view.shape]
                offset = [*(place for place, _ in places), *(0 for _ in view.shape)]
                whole[axes + dim], offset[axes + dim] = ranks * view.shape[dim], target
                parts.append(
                    ShardedTensor(
                        name, data, data.dtype, tuple(data.shape), tuple(whole), tuple(offset), None, replica_id
                    )
                )
        return parts

    def join(parts: list[Tensor]) -> Tensor:
        flat = [part.flatten(0, axes) for part in parts]
        wholes = [torch.cat(flat[i : i + len(pieces)], dim) for i in range(0, len(flat), len(pieces))]
        return torch.stack(wholes) if tensor.ndim > shard.ndim else wholes[0]

    return ShardedTensorFactory(name, tensor, cast(Any, cut), cast(Any, join), replica)


def _pieces(
    entry: Entry, shard: Sequence[int], ranks: int, rank: int, architecture: Architecture
) -> list[tuple[int, int, int]]:
    """What a rank's shard is in the whole tensor, as it is without tensor parallelism: (from, to, length) of each run.

    Mostly one run, the rank's window. Where a rank holds its share of each of several matrices (gate and up), these
    come one after the other in the whole tensor.
    """
    size = shard[entry.dim]
    spans = entry.spans(shard, ranks, architecture)
    whole = entry.kind.spans(ranks * size, 1, architecture)
    if spans == whole:
        return [(0, rank * size, size)]
    runs: list[tuple[int, int, int]] = []
    for at, span in window(spans, rank * size, (rank + 1) * size):
        target = 0
        for other in whole:
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


def _replica(chunk: Any, name: str, key: Key, entry: Entry) -> tuple[int, int, int]:
    """Which copy of a tensor this rank has: the one that is saved has zeros only."""
    copied = name == EMBEDDING.name and not chunk.pre_process  # a later stage's, for the output layer
    inside = split_group(expert=key.expert is not None).rank() if entry.kind.dim is None else 0
    if key.expert is not None:
        return 0, inside, parallel_state.get_expert_data_parallel_rank()
    return int(copied), inside, parallel_state.get_data_parallel_rank(with_context_parallel=True)


class _Streaming(TorchDistSaveShardedStrategy):
    """megatron-core's way of saving, with torch's own writer.

    megatron-core's copies all that is a view before it writes anything, and starts a process for its results.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )


def _arguments(config: Any, architecture: Architecture) -> Namespace:
    """What Megatron-LM wants to know of a checkpoint that it loads, by the names of its own flags."""
    names = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "num_layers",
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    )  # fmt: skip
    return Namespace(
        **{name: getattr(config, name) for name in names},
        max_position_embeddings=architecture.max_positions,
        vocab_size=architecture.vocab_size,
        untie_embeddings_and_output_weights=not architecture.tied,
        no_save_optim=True,
        no_save_rng=True,
    )


def _stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors in a checkpoint, by name. Raises ValueError where it cannot be read."""
    try:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # of any kind: it is a pickle
        raise ValueError(f"{folder / '.metadata'} cannot be read ({error}): copy the folder again") from None
    return {
        name: tuple(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and "optimizer." not in name
    }


def _check_names(folder: Path, stored: Iterable[str], wanted: set[str], family: Family) -> None:
    lacking, extra = wanted - set(stored), set(stored) - wanted
    found = [f"lacks {_some(lacking)}, which"] * bool(lacking) + [f"has {_some(extra)}, which"] * bool(extra)
    if found:
        has = "has" if lacking else "has no place for"
        raise ValueError(
            f"{folder} {found[0]} a {family.name} model of config.json {has}. Do the folder and its config.json belong "
            "together?"
        )


def _check_shape(folder: Path, tensor: ShardedTensor, stored: tuple[int, ...], architecture: Architecture) -> None:
    wanted = tuple(tensor.global_shape)
    if tensor.allow_shape_mismatch:  # padded as the layout that saved it wanted it
        wanted = (architecture.vocab_size, *wanted[1:])
        if stored[0] >= wanted[0] and stored[1:] == wanted[1:]:
            return
    if stored != wanted:
        raise ValueError(
            f"{folder}: {tensor.key} has shape {list(stored)}, and by config.json it has {list(wanted)}. Do the folder "
            "and its config.json belong together?"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5]) + (", ..." if len(ordered) > 5 else "")
    return f"{len(ordered)} tensor{'s' if len(ordered) > 1 else ''} ({shown})"


def _first_failure(error: CheckpointException) -> OSError:
    """What went wrong in the first rank that had to tell of it."""
    rank, (cause, _) = min(error.failures.items())
    number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
    return OSError(number, f"the checkpoint could not be written: rank {rank}: {cause}")
