"""A megatron-core model into a Hugging Face folder: a tensor is gathered on one rank, which streams it into a file."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv

from .. import runtime
from ..lora.merge import merge_functions
from ..mapping.local_params import collect_params, local_experts, shard_group, shard_position
from ..mapping.param_mapping import OUTPUT, Architecture, HfConfig, MappingEntry, ParamKey, ParamTable, Span, clip_spans
from ..model.chunk_mapping import map_chunks
from .conversion_report import describe_sources, describe_tensor, unused_reasons, write_report
from .passthrough import RECORD, PassthroughTensors
from .safetensors_io import TensorSpec, finish_shards, sync, tensor_names
from .writer import RankReport, ShardWriter, StagedFolder

# What goes along from the source: settings, tokenizers, templates, code, licences; no weights, no records of a run.
CARRIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
LEFT = {
    "config.json", "args.json", "manifest.json", "conversion.json", "trainer_state.json",
    "latest_checkpointed_iteration.txt", "metadata.json",
}  # fmt: skip
LARGEST_CARRIED = 100 * 2**20  # bytes


class TensorShards(NamedTuple):
    """The shards of one megatron-core tensor that is saved: their holders, and this rank's."""

    entry: MappingEntry
    spans: list[Span]
    holders: Sequence[int]  # the ranks of the group that hold its shards, in order; none: each of them holds all of it
    shard: Tensor  # this rank's, where it is one of them; else one that looks like it
    merge: Callable[[Tensor], Tensor] | None = None  # makes of the shard what is written


class GatherJob(NamedTuple):
    """Hugging Face tensors that are made together: of one tensor, or of those of all the experts of a layer."""

    specs: dict[str, TensorSpec]
    pieces: list[TensorShards]
    layer: int | None  # None: of no layer

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs.values())


def save_weights(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    merge: bool = False,
) -> None:
    """Save as `stage_weights`, and return once the files are on disk.

    Raises OSError on every rank if one cannot write, and then the folder is incomplete.
    """
    write_together(
        stage_weights(chunks, hf_config, source, destination, dtype=dtype, max_shard_bytes=max_shard_bytes, merge=merge)
    )


@torch.no_grad()
def stage_weights(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    merge: bool = False,
    copied: bool = False,
) -> StagedFolder:
    """Begin to write `chunks`, this rank's GPTModels, into the empty folder `destination` as a Hugging Face model in
    `dtype`.

    `merge`: with the adapters in the weights, which stay as they are. `copied`: training may go on at once (Writer).
    To be called by every rank. `hf_config` is the raw config.json of `source`, whose tokenizer and other small files go
    along; conversion.json is made (conversion_report.py). Beyond its shard a rank holds one whole tensor (of one
    expert), and what waits for its disk (writer.py). Each file of at most `max_shard_bytes` (or one row's
    tensors, where these are larger) has a rank that writes it.
    """
    destination = Path(destination)
    family, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
    tensors = collect_params(chunks)
    if architecture.tied:
        tensors.pop(OUTPUT, None)  # the last stage's copy; the first stage has the embedding itself
    writer, started = ShardWriter(destination, copied=copied), time.perf_counter()
    merges = merge_functions(chunks) if merge else {}
    write_tensors(writer, tensors, entries, architecture, dtype, max_shard_bytes, merges)
    along = PassthroughTensors(source, hf_config, architecture, describe_sources(entries), dtype)
    for number, specs in enumerate(along.files(max_shard_bytes)):
        if number % dist.get_world_size() == dist.get_rank():
            writer.begin(f"part-carried-{number:05}.safetensors", specs)
            for name in specs:
                writer.put(name, partial(along.read, name))

    def complete(ranks: list[RankReport]) -> dict[str, str]:
        shards = sorted((shard for report in ranks for shard in report.shards), key=lambda shard: shard.name)
        written = sorted(name for shard in shards for name in shard.specs)
        if written != sorted(along.specs.keys() | {name for entry in entries.values() for name in entry.hf}):
            raise RuntimeError(
                f"{len(written)} tensors were written, which are not those of the {family.name} rows once each"
            )
        placed = finish_shards(destination, [(shard.name, shard.specs) for shard in shards])
        copy_small_files(Path(source), destination, hf_config, dtype)
        about = describe_sources(entries)
        described_all = {
            name: about.get(name, RECORD) | describe_tensor(spec, placed[name], shard.written.checksums[name])
            for shard in shards
            for name, spec in shard.specs.items()
        }
        write_report(
            destination,
            "megatron-core to Hugging Face",
            family.name,
            described_all,
            unused_reasons(source, described_all, architecture),
            bytes=sum(spec.bytes for shard in shards for spec in shard.specs.values()),
            seconds=time.perf_counter() - started,
            peak_memory=[report.peak_memory for report in ranks],
        )
        return {shard.name: placed[name] for shard in shards for name in list(shard.specs)[:1]}

    return StagedFolder(writer, complete)


def write_together(folder: StagedFolder) -> None:
    """Wait until a folder is whole. Every rank calls this. Raises as `save_weights`."""
    report, failure = None, None
    try:
        report = folder.report()
    except Exception as error:
        failure = error
    ranks, failure = gather_or_raise(cast(RankReport, report), failure), None
    if dist.get_rank() == 0:
        try:
            folder.complete(ranks)
        except (OSError, RuntimeError) as error:
            failure = error
    gather_or_raise(None, failure)


def write_tensors(
    writer: ShardWriter,
    tensors: dict[ParamKey, Tensor],
    entries: ParamTable,
    architecture: Architecture,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    merges: Mapping[ParamKey, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> None:
    """Give `writer` this rank's share of the Hugging Face tensors that all ranks' `tensors` make, in files of names of
    their own. Every rank calls this. `dtype` None: each tensor's. `merges`: what is written in a shard's place."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for sort, (jobs, group, replicas) in enumerate(plan_jobs(tensors, entries, architecture, dtype, merges)):
        at = f"{stage:04}-{sort}-{ep_rank if sort == 1 else 0:04}"  # experts that stand alone: a file of each EP rank
        # One file after another goes to the next replica, then to the next rank of its group.
        files: list[list[tuple[str, list[GatherJob]]]] = [[] for _ in range(group.size())]
        for number, contents in enumerate(batch_jobs(jobs, max_shard_bytes)):
            if number % replicas.size() == replicas.rank():
                name = f"part-{at}-{number:05}.safetensors"
                files[number // replicas.size() % group.size()].append((name, contents))
        if jobs:
            init_communicator(group)
        for rank, begun, job in _in_turn(files):
            if begun and rank == group.rank():
                name, contents = begun
                writer.begin(name, {tensor: spec for job in contents for tensor, spec in job.specs.items()})
            for tensor, run in gather_job(job, group, rank):
                writer.put(tensor, run)


def plan_jobs(
    tensors: dict[ParamKey, Tensor],
    entries: ParamTable,
    architecture: Architecture,
    dtype: torch.dtype | None,
    merges: Mapping[ParamKey, Callable[[Tensor], Tensor]],
) -> list[tuple[list[GatherJob], ProcessGroup, ProcessGroup]]:
    """Return what this rank helps to save: jobs, the group that does them together, and the group of possible writers.

    First what is no expert's, then experts whose tensors stand alone, then experts stacked.
    """
    sorts: tuple[list[GatherJob], list[GatherJob], list[GatherJob]] = ([], [], [])
    for key, tensor in tensors.items():
        entry = entries[key]
        ranks, _ = shard_position(key, entry)
        spans = entry.spans(tensor.shape, ranks, architecture)
        specs = {
            name: TensorSpec(torch.float32 if entry.fp32 else dtype or tensor.dtype, entry.stored_shape(shape))
            for name, shape in entry.hf_shapes(tensor.shape, spans).items()
        }
        if entry.expert_index is None:
            holders = range(ranks) if ranks > 1 else ()
            pieces = [TensorShards(entry, spans, holders, tensor, merges.get(key))]
            sorts[key.expert is not None].append(GatherJob(specs, pieces, key.layer))
        elif entry.expert_index == local_experts(entry.num_experts).start:
            pieces = []
            for expert in range(entry.num_experts):
                other = key._replace(expert=expert)
                pieces.append(TensorShards(entries[other], spans, _holders(expert, entry), tensors.get(other, tensor)))
            sorts[2].append(GatherJob(specs, pieces, key.layer))
    dense = cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
    sparse = cast(ProcessGroup, parallel_state.get_expert_data_parallel_group())
    everywhere = cast(ProcessGroup, parallel_state.get_expert_tensor_and_model_parallel_group())
    groups = (shard_group(expert=False), dense), (shard_group(expert=True), sparse), (everywhere, sparse)
    return [(jobs, *pair) for jobs, pair in zip(sorts, groups, strict=True)]


def _holders(expert: int, entry: MappingEntry) -> range:
    """Who of the ranks of expert and expert tensor parallelism together holds a stacked expert's shards, in order."""
    etp = shard_group(expert=True).size()
    first = expert // len(local_experts(entry.num_experts)) * etp  # expert tensor parallelism is the inner one
    return range(first, first + (1 if entry.kind.dim is None else etp))


def batch_jobs(jobs: list[GatherJob], max_bytes: int) -> Iterator[list[GatherJob]]:
    """Yield the jobs in runs of at most `max_bytes`."""
    run, size = [], 0
    for job in jobs:
        if run and size + job.bytes > max_bytes:
            yield run
            run, size = [], 0
        run.append(job)
        size += job.bytes
    if run:
        yield run


def _in_turn(
    files: list[list[tuple[str, list[GatherJob]]]],
) -> Iterator[tuple[int, tuple[str, list[GatherJob]] | None, GatherJob]]:
    """Yield the jobs of each rank's files, one of each rank in turn, so that all of them write at the same time.

    As (rank, the file that begins with this job, job).
    """
    jobs = [
        [(file if number == 0 else None, job) for file in of_rank for number, job in enumerate(file[1])]
        for of_rank in files
    ]
    for turn in zip_longest(*jobs):
        yield from ((rank, one[0], one[1]) for rank, one in enumerate(turn) if one is not None)


def init_communicator(group: ProcessGroup) -> None:
    """NCCL wants all ranks of a group in the first exchange, not just two of them."""
    if group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=runtime.device()), group=group)


def gather_job(job: GatherJob, group: ProcessGroup, writer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of `job`, each in runs, on rank `writer` of `group`; none on the others."""
    names = list(job.specs)
    # Stacked tensors are written one after another: the experts come once for each.
    for turn in [names] if len(job.pieces) == 1 else [[name] for name in names]:
        for piece in job.pieces:
            shards = _gather(piece, group, writer)
            if group.rank() == writer:
                for name in turn:
                    yield from ((name, run) for run in _runs(piece, shards, names.index(name)))


def _gather(piece: TensorShards, group: ProcessGroup, writer: int) -> list[Tensor]:
    """Return the shards of all holders, in order, on rank `writer`; elsewhere the rank's own."""
    here, holders = group.rank(), piece.holders or (writer,)
    shard = piece.merge(piece.shard) if piece.merge and here in (writer, *holders) else piece.shard
    shards, exchange = [shard], []
    if here == writer:
        shards = [shard if holder == here else torch.empty_like(shard) for holder in holders]
        pairs = zip(holders, shards, strict=True)
        exchange = [P2POp(dist.irecv, shard, group=group, group_peer=peer) for peer, shard in pairs if peer != here]
    elif here in holders:
        exchange = [P2POp(dist.isend, shard.contiguous(), group=group, group_peer=writer)]
    for work in batch_isend_irecv(exchange) if exchange else ():
        work.wait()
    return shards


def _runs(piece: TensorShards, shards: list[Tensor], part: int) -> list[Tensor]:
    """Return the values of one Hugging Face tensor (or its part of a stacked one) in order, as views if possible."""
    entry, size = piece.entry, shards[0].shape[piece.entry.dim]
    pieces = []
    for rank, shard in enumerate(shards):
        for at, span in clip_spans(piece.spans, rank * size, (rank + 1) * size):
            if span.part == part:
                run = shard.narrow(entry.dim, at, span.length)
                pieces.append((span, run.t() if entry.transposed else run))
    if entry.hf_dim == 0 and all(span.step == 1 for span, _ in pieces):
        return [run for _, run in sorted(pieces, key=lambda one: one[0].start)]
    shape = list(entry.hf_shapes(shards[0].shape, piece.spans).values())[part]
    tensor = shards[0].new_empty(shape)
    for span, run in pieces:
        positions = slice(span.start, span.stop, span.step)
        tensor[positions if entry.hf_dim == 0 else (slice(None), positions)] = run
    return [tensor]


def gather_or_raise[T](value: T, failure: Exception | None) -> list[T]:
    """Gather every rank's value on rank 0. Raises on all of them if one failed: OSError, or its RuntimeError."""
    local_failure = None if failure is None else (getattr(failure, "errno", None), str(failure))
    failures: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, local_failure)
    for rank, failed in enumerate(failures):
        if failed is not None:
            number, reason = failed
            what = f"the checkpoint could not be written: rank {rank}: {reason}"
            raise RuntimeError(what) if number is None else OSError(number, what)
    values = [value] * dist.get_world_size()
    dist.gather_object(value, values if dist.get_rank() == 0 else None)
    return values


def copy_small_files(source: Path, destination: Path, hf_config: HfConfig, dtype: torch.dtype) -> None:
    """Take along what of a model folder is no weights: config.json, for weights in `dtype`, and other small files."""
    _write_config(source, destination, hf_config, dtype)
    _copy_small_files(source, destination)


def _write_config(source: Path, destination: Path, hf_config: HfConfig, dtype: torch.dtype) -> None:
    """config.json as it came in, but for the name of the dtype, and how weights were quantised."""
    config = _renamed(hf_config, dtype)
    config.pop("quantization_config", None)
    if "text_config" in config:
        config["text_config"] = _renamed(config["text_config"], dtype)
    original = (source / "config.json").read_text(encoding="utf-8")
    same = json.loads(original) == config
    with (destination / "config.json").open("w", encoding="utf-8") as stream:
        stream.write(original if same else json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        sync(stream)


def _renamed(config: HfConfig, dtype: torch.dtype) -> HfConfig:
    names = [key for key in ("dtype", "torch_dtype") if key in config]
    return config | dict.fromkeys(names, str(dtype).removeprefix("torch."))


def _copy_small_files(source: Path, destination: Path) -> None:
    """Small files, and folders that have nothing else, as additional_chat_templates."""
    for entry in sorted(source.iterdir()):
        files = sorted(entry.iterdir()) if entry.is_dir() and not entry.name.startswith(".") else [entry]
        if not all(_goes_along(file) for file in files):
            continue
        for file in files:
            target = destination / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            with file.open("rb") as read, target.open("wb") as stream:
                shutil.copyfileobj(read, stream)
                sync(stream)


def _goes_along(file: Path) -> bool:
    if file.name in LEFT or file.name.endswith(".index.json"):
        return False
    is_kept = file.suffix in CARRIED or file.name.startswith(("LICENSE", "NOTICE"))
    return is_kept and file.is_file() and file.stat().st_size <= LARGEST_CARRIED
