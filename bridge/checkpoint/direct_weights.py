"""Direct copies of a megatron-core model's weights into the tensors of an engine in the same process.

The stored tensors themselves are the sources: no Hugging Face tensor is made. What every rank holds is copied where it
is; the rest is broadcast as it is stored, and each rank copies its part of it. The plan is made once.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from .. import runtime
from ..lora.merge import merge_functions
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.fp8 import as_bf16
from ..mapping.local_params import LocalParam, iter_params, shard_position
from ..mapping.param_mapping import OUTPUT, MappingEntry, ParamKey, ParamTable, clip_spans
from ..model.chunk_mapping import map_chunks
from .safetensors_io import tensor_names
from .stream import ALIGNMENT, BUCKET
from .strided_copy import StoredShard, StridedCopy, WeightLayout, compose, merge_copies


class _Piece(NamedTuple):
    """Stored tensor of some ranks: a parameter's shard, with all its stacked experts, or a buffer."""

    keys: tuple[ParamKey, ...]
    shard: int  # index of the shard
    shards: int
    shape: tuple[int, ...]  # one expert's, if stacked
    dtype: torch.dtype  # in which engines get it

    @property
    def numel(self) -> int:
        return len(self.keys) * torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class _Local(NamedTuple):
    """This rank's tensor of a piece. It is looked up at each use, since training may replace it."""

    module: nn.Module
    leaf: str
    merges: tuple[Callable[[Tensor], Tensor] | None, ...]  # one for each stacked expert

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor's values in `dtype`, flat: itself, or a copy."""
        tensor = self.module._parameters.get(self.leaf)
        tensor = self.module._buffers[self.leaf] if tensor is None else as_bf16(tensor)
        assert tensor is not None
        tensor = tensor.detach()
        if any(self.merges):
            parts = tensor if tensor.ndim > 2 else (tensor,)  # stacked experts, or one matrix
            merged = [merge(part) if merge else part for merge, part in zip(self.merges, parts, strict=True)]
            tensor = torch.cat([part.to(dtype).reshape(-1) for part in merged])
        return tensor.to(dtype).reshape(-1)


class _Transfer(NamedTuple):
    """Piece, this rank's tensor of it (None: it has none), and the copies from it by name of the engine's tensor."""

    piece: _Piece
    local: _Local | None
    copies: list[tuple[str, StridedCopy]]


class CopySource(NamedTuple):
    """Flat tensor in the dtype for engines, and the copies from it by name of the engine's tensor."""

    tensor: Tensor
    copies: list[tuple[str, StridedCopy]]


class DirectWeights:
    """Plan of direct copies from a model's chunks into an engine with `layout`.

    The arguments are those of `stream_weights`. Every rank makes one with its engine's layout, and reads its sources at
    the same time. Raises ValueError on a rank where tensors cannot be copied. `transfers`: broadcasts of a sync;
    `copies`: this rank's copies; `targets`: names of the engine's tensors that get values.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        hf_config: HfConfig,
        source: str | Path,
        layout: WeightLayout,
        *,
        dtype: torch.dtype,
        merge: bool = False,
        bucket_bytes: int = BUCKET,
    ):
        _, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
        merges = merge_functions(chunks) if merge else {}
        local: dict[_Piece, _Local] = {}
        for param in iter_params(chunks, copies=False):
            piece = _piece(param, entries, dtype)
            module, _, leaf = param.name.rpartition(".")
            functions = tuple(merges.get(key) for key in piece.keys)
            local[piece] = _Local(param.chunk.get_submodule(module), leaf, functions)
        all_pieces: list[list[_Piece]] = [[]] * dist.get_world_size()
        dist.all_gather_object(all_pieces, list(local))
        holders: dict[_Piece, list[int]] = {}
        for rank, pieces in enumerate(all_pieces):
            for piece in pieces:
                holders.setdefault(piece, []).append(rank)
        has_dora = any(getattr(module, "magnitude", None) is not None for chunk in chunks for module in chunk.modules())
        if merge and has_dora and any(piece.shards > 1 for piece in holders):
            raise ValueError("DoRA's adapters of split weights are merged by all their ranks together")
        copies = _plan_copies(holders, entries, architecture, layout)
        self._shared = [
            _Transfer(piece, local.get(piece), copies[piece])
            for piece, ranks in holders.items()
            if len(ranks) == len(all_pieces)
        ]
        self._buckets = [
            (root, [_Transfer(piece, local.get(piece), copies[piece]) for piece in pieces])
            for root, pieces in _plan_buckets(
                {piece: ranks for piece, ranks in holders.items() if len(ranks) < len(all_pieces)}, bucket_bytes
            )
        ]
        self.transfers = len(self._buckets)  # broadcasts of a sync
        self.copies = sum(map(len, copies.values()))  # this rank's, in a sync
        self.bytes = sum(piece.numel * piece.dtype.itemsize for piece in holders)  # the model's
        self.targets = sorted({name for piece_copies in copies.values() for name, _ in piece_copies})

    def sources(self) -> Iterator[CopySource]:
        """Yield the sources, while the next ones are in transfer. Read to the end: other ranks take part."""
        previous: tuple[list[_Transfer], Tensor, dist.Work | None] | None = None
        for root, transfers in self._buckets:
            current = (transfers, *_send(root, transfers))
            if previous is not None:
                yield from _receive(*previous)
            previous = current
        for piece, local, copies in self._shared:
            if copies and local is not None:
                yield CopySource(local.read(piece.dtype), copies)
        if previous is not None:
            yield from _receive(*previous)


def _send(root: int, transfers: list[_Transfer]) -> tuple[Tensor, dist.Work | None]:
    """Start to broadcast pieces from a rank that has them."""
    data = torch.empty(sum(transfer.piece.bytes for transfer in transfers), dtype=torch.uint8, device=runtime.device())
    if dist.get_rank() == root:
        for (piece, local, _), part in zip(transfers, _split(data, transfers), strict=True):
            assert local is not None
            part.copy_(local.read(piece.dtype))
    return data, dist.broadcast(data, src=root, async_op=True)


def _receive(transfers: list[_Transfer], data: Tensor, work: dist.Work | None) -> Iterator[CopySource]:
    if work is not None:
        work.wait()
    for transfer, part in zip(transfers, _split(data, transfers), strict=True):
        if transfer.copies:
            yield CopySource(part, transfer.copies)


def _split(data: Tensor, transfers: list[_Transfer]) -> Iterator[Tensor]:
    """Yield the pieces in a buffer, flat."""
    offset = 0
    for piece, _, _ in transfers:
        yield data[offset : offset + piece.numel * piece.dtype.itemsize].view(piece.dtype)
        offset += piece.bytes


def _piece(param: LocalParam, entries: ParamTable, dtype: torch.dtype) -> _Piece:
    keys = tuple(param.views)
    entry = entries[keys[0]]
    shards, shard = shard_position(keys[0], entry)
    shape = tuple(param.views[keys[0]].shape)
    return _Piece(keys, shard, shards, shape, torch.float32 if entry.fp32 else dtype)


def _plan_buckets(holders: dict[_Piece, list[int]], bucket_bytes: int) -> list[tuple[int, list[_Piece]]]:
    """Return the rank that sends and the pieces of each broadcast. Ranks that hold the same pieces send in turn."""
    by_holders: dict[tuple[int, ...], list[_Piece]] = {}
    for piece, ranks in holders.items():
        by_holders.setdefault(tuple(ranks), []).append(piece)
    buckets: list[tuple[int, list[_Piece]]] = []
    for ranks, pieces in sorted(by_holders.items()):
        runs: list[list[_Piece]] = []
        size = bucket_bytes + 1
        for piece in pieces:
            if size + piece.bytes > bucket_bytes:
                runs.append([])
                size = 0
            runs[-1].append(piece)
            size += piece.bytes
        buckets.extend((ranks[number % len(ranks)], run) for number, run in enumerate(runs))
    return buckets


def _plan_copies(
    pieces: dict[_Piece, list[int]], entries: ParamTable, architecture: Architecture, layout: WeightLayout
) -> dict[_Piece, list[tuple[str, StridedCopy]]]:
    """Return the copies from each piece to the targets. Raises ValueError where a tensor is not copied as a whole."""
    all_copies: dict[_Piece, list[tuple[str, StridedCopy]]] = {}
    copied: dict[str, int] = {}  # elements by name in the checkpoint
    for piece in pieces:
        by_target: dict[str, list[StridedCopy]] = {}
        size = torch.Size(piece.shape).numel()
        for number, key in enumerate(piece.keys):
            entry = entries[key]
            spans = entry.spans(piece.shape, piece.shards, architecture)
            shapes = entry.hf_shapes(piece.shape, spans)
            length = piece.shape[entry.dim]
            clipped = list(clip_spans(spans, piece.shard * length, (piece.shard + 1) * length))
            shard = StoredShard(entry, clipped, piece.shape, number * size)
            for part, name in enumerate(entry.hf):
                _check_shape(name, entry.stored_shape(shapes[name]), layout)
                copied.setdefault(name, 0)
                for target, copy in layout.copies[name]:
                    composed = compose(shard, part, layout.shapes[name], copy)
                    by_target.setdefault(target, []).extend(composed)
                    copied[name] += sum(block.numel for block in composed)
        all_copies[piece] = [(target, copy) for target, copies in by_target.items() for copy in merge_copies(copies)]
    expected = {entry_name for entry in _used(entries, architecture) for entry_name in entry.hf}
    if expected != copied.keys():
        raise ValueError(f"no rank has {sorted(expected ^ copied.keys())[0]}")
    for name, count in copied.items():
        if count != (total := sum(copy.numel for _, copy in layout.copies[name])):
            raise ValueError(f"{count} elements of {name} would be copied, of {total}")
    return all_copies


def _used(entries: ParamTable, architecture: Architecture) -> Iterator[MappingEntry]:
    for key, entry in entries.items():
        if not (architecture.tied and key == OUTPUT):
            yield entry


def _check_shape(name: str, shape: tuple[int, ...], layout: WeightLayout) -> None:
    if name not in layout.copies:
        raise ValueError(f"the engine has not loaded {name}")
    if layout.shapes[name] != shape:
        raise ValueError(f"{name} was loaded with the shape {list(layout.shapes[name])}, not {list(shape)}")
