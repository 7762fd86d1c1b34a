"""A megatron-core model into a Hugging Face folder: a tensor is gathered on one rank, which streams it into a file."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from .families import family_of
from .rows import OUTPUT, Architecture, Entry, Key, Span, table
from .safetensors_io import finish_shards, sync, write_shard
from .tensors import held, split_group, split_of

# What goes along from the source: settings, tokenizers, templates, code, licences; no weights, no records of a run.
CARRIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
LEFT = {"config.json", "args.json", "manifest.json", "conversion.json", "trainer_state.json"}
LARGEST_CARRIED = 100 * 2**20  # bytes


@dataclass(frozen=True)
class _Piece:
    """One tensor to save: this rank's shard, and the Hugging Face tensors that all the shards make."""

    shard: Tensor
    entry: Entry
    ranks: int
    spans: list[Span]
    shapes: dict[str, tuple[int, ...]]

    def bytes(self, dtype: torch.dtype) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * dtype.itemsize


@torch.no_grad()
def save_weights(
    chunks: Sequence[Any],
    hf_config: dict[str, Any],
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    """Write `chunks`, this rank's GPTModels, into the empty folder `destination` as a Hugging Face model in `dtype`.

    To be called by every rank. `hf_config` is the raw config.json of `source`, whose tokenizer and other small files go
    along. Beyond its shard a rank holds one whole tensor at a time. Each file of at most `max_shard_bytes` (or one
    row's tensors, where these are larger) has a rank that writes it; the files are on the disk when this returns.
    Raises OSError on every rank where one cannot write, and then the folder is not whole.
    """
    destination = Path(destination)
    family = family_of(hf_config)
    architecture = family.describe(hf_config)
    entries = table(family, hf_config, architecture)
    pieces = _pieces(chunks, entries, architecture)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    written: list[tuple[str, dict[str, tuple[int, ...]]]] = []
    failure = None
    for expert in (False, True):
        group, replicas = split_group(expert=expert), _replicas(expert=expert)
        mine = [piece for key, piece in pieces.items() if (key.expert is not None) == expert]
        for number, contents in enumerate(_files(mine, dtype, max_shard_bytes)):
            # One file after another goes to the next replica, then to the next rank of its split group.
            if number % replicas.size() != replicas.rank():
                continue
            writer = number // replicas.size() % group.size()
            stream = _gathered(contents, group, writer)
            if group.rank() == writer and failure is None:
                name = f"part-{stage:04}-{int(expert)}-{ep_rank * expert:04}-{number:05}.safetensors"
                shapes = {tensor: shape for piece in contents for tensor, shape in piece.shapes.items()}
                try:
                    write_shard(destination / name, shapes, dtype, stream)
                except OSError as error:
                    failure = error
                written.append((name, shapes))
            for _ in stream:  # the others need this rank in every gather, whatever became of its file
                pass
    shards = [shard for of_rank in _agree(written, failure) for shard in of_rank]
    found = sorted(name for _, shapes in shards for name in shapes)
    if found != sorted({name for entry in entries.values() for name in entry.hf}):
        raise RuntimeError(
            f"{len(found)} tensors were written, which are not those of the {family.name} rows once each"
        )
    failure = None
    if dist.get_rank() == 0:
        try:
            finish_shards(destination, sorted(shards, key=lambda shard: shard[0]), dtype)
            _write_config(Path(source), destination, hf_config, dtype)
            _carry(Path(source), destination)
        except OSError as error:
            failure = error
    _agree(None, failure)


def _pieces(chunks: Sequence[Any], entries: dict[Key, Entry], architecture: Architecture) -> dict[Key, _Piece]:
    tensors = held(chunks)
    if architecture.tied:
        tensors.pop(OUTPUT, None)  # the last stage's copy; the first stage has the embedding itself
    pieces = {}
    for key, tensor in tensors.items():
        entry = entries[key]
        ranks, _ = split_of(key, entry)
        spans = entry.spans(tensor.shape, ranks, architecture)
        pieces[key] = _Piece(tensor, entry, ranks, spans, entry.shapes(tensor.shape, spans))
    return pieces


def _replicas(*, expert: bool) -> ProcessGroup:
    """The ranks that hold the same shard as this one."""
    if expert:
        return cast(ProcessGroup, parallel_state.get_expert_data_parallel_group())
    return cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))


def _files(pieces: list[_Piece], dtype: torch.dtype, max_bytes: int) -> Iterator[list[_Piece]]:
    """The pieces in runs of at most `max_bytes`."""
    run, size = [], 0
    for piece in pieces:
        more = piece.bytes(dtype)
        if run and size + more > max_bytes:
            yield run
            run, size = [], 0
        run.append(piece)
        size += more
    if run:
        yield run


def _gathered(pieces: list[_Piece], group: ProcessGroup, writer: int) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of `pieces` one by one on rank `writer` of `group`; none on the others."""
    for piece in pieces:
        parts = _parts(piece, _whole(piece, group, writer))
        if group.rank() == writer:
            yield from zip(piece.shapes, parts, strict=True)


def _whole(piece: _Piece, group: ProcessGroup, writer: int) -> Tensor:
    """The shards of all ranks end to end on rank `writer`; elsewhere the rank's own."""
    shard = piece.shard
    if piece.ranks == 1:
        return shard
    if group.rank() != writer:
        dist.gather(shard.contiguous(), group=group, group_dst=writer)
        return shard
    shards = shard.new_empty((piece.ranks, *shard.shape))
    dist.gather(shard.contiguous(), list(shards), group=group, group_dst=writer)
    return shards.flatten(0, 1) if piece.entry.dim == 0 else torch.cat(list(shards), piece.entry.dim)


def _parts(piece: _Piece, whole: Tensor) -> Iterator[Tensor]:
    dim = piece.entry.dim
    found: list[list[tuple[int, Tensor]]] = [[] for _ in piece.shapes]
    at = 0
    for part, start, stop in piece.spans:
        if part is not None:
            found[part].append((start, whole.narrow(dim, at, stop - start)))
        at += stop - start
    for slices in found:
        ordered = [tensor for _, tensor in sorted(slices, key=lambda one: one[0])]
        yield ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim)


def _agree(value: Any, failure: OSError | None) -> list[Any]:
    """Every rank's value, on every rank. Raises OSError on all of them where one of them failed."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (value, None if failure is None else (failure.errno, str(failure))))
    for rank, (_, failed) in enumerate(answers):
        if failed is not None:
            raise OSError(failed[0], f"the checkpoint could not be written: rank {rank}: {failed[1]}")
    return [answer for answer, _ in answers]


def _write_config(source: Path, destination: Path, hf_config: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json as it came in, but for the name of the dtype."""
    names = [key for key in ("dtype", "torch_dtype") if key in hf_config]
    config = hf_config | dict.fromkeys(names, str(dtype).removeprefix("torch."))
    original = (source / "config.json").read_text(encoding="utf-8")
    same = json.loads(original) == config
    with (destination / "config.json").open("w", encoding="utf-8") as stream:
        stream.write(original if same else json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        sync(stream)


def _carry(source: Path, destination: Path) -> None:
    for file in sorted(source.iterdir()):
        wanted = file.suffix in CARRIED or file.name.startswith(("LICENSE", "NOTICE"))
        if file.name in LEFT or file.name.endswith(".index.json") or not wanted:
            continue
        if file.is_file() and file.stat().st_size <= LARGEST_CARRIED:
            with file.open("rb") as read, (destination / file.name).open("wb") as stream:
                shutil.copyfileobj(read, stream)
                sync(stream)
