"""Export of a megatron-core model as a Hugging Face folder: one rank gathers each tensor and streams it to a file."""

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
from ..families.config_file import lower_config
from ..lora.merge import merge_functions
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import collect_params, local_experts, shard_group, shard_position
from ..mapping.param_mapping import TOWERS, MappingEntry, ParamKey, ParamTable, Span, clip_spans
from ..model.chunk_mapping import map_chunks
from .conversion_report import describe_sources, describe_tensor, unused_reasons, write_report
from .fp8_blocks import fp8_specs, quantization_config, quantize_blocks, quantized_names
from .passthrough import RECORD, PassthroughTensors
from .quantized import SCALES
from .safetensors_io import TensorSpec, finish_shards, sync, tensor_names
from .writer import RankReport, ShardWriter, StagedFolder

# Files copied from the source: settings, tokenizers, templates, code, licences. No weights, no records of a run.
COPIED_NAMES = "LICENSE", "NOTICE", "spk_dict.pt"  # beginnings; the last has the voices of Qwen2.5-Omni
COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
NOT_COPIED = {
    "config.json", "args.json", "manifest.json", "conversion.json", "trainer_state.json",
    "latest_checkpointed_iteration.txt", "metadata.json",
}  # fmt: skip
MAX_COPIED = 100 * 2**20  # bytes


class TensorShards(NamedTuple):
    """Shards of one megatron-core tensor to save: the ranks that hold them, and this rank's shard."""

    entry: MappingEntry
    spans: list[Span]
    holders: Sequence[int]  # group ranks that hold the shards, in order; empty: every rank holds all of it
    shard: Tensor  # this rank's; on a rank without one, any tensor of its shape and dtype
    merge: Callable[[Tensor], Tensor] | None = None  # merges an adapter into the shard


class GatherJob(NamedTuple):
    """Hugging Face tensors made together: from one tensor, or from the tensors of all experts of a layer."""

    specs: dict[str, TensorSpec]
    pieces: list[TensorShards]
    layer: int | None  # None: outside of the layers

    @property
    def bytes(self) -> int:
        return sum(spec.bytes for spec in self.specs.values())

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the parts of their megatron-core tensor; without scales."""
        return list(self.pieces[0].entry.hf)


def save_weights(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    merge: bool = False,
    fp8: bool = False,
) -> None:
    """Save the model of `chunks` as `stage_weights` does, and return once the files are on disk.

    Raises OSError on every rank if any rank cannot write; the folder is then incomplete.
    """
    options = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "merge": merge, "fp8": fp8}
    complete_folder(stage_weights(chunks, hf_config, source, destination, **options))


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
    fp8: bool = False,
    copy_to_host: bool = False,
) -> StagedFolder:
    """Start to save the model of `chunks` in `dtype` as a Hugging Face folder at `destination`, which is empty.

    chunks: this rank's GPTModels. hf_config: the raw config.json of `source`, whose tokenizer and other small files are
    copied. max_shard_bytes: the most bytes of a file, unless the tensors of one mapping are larger. merge: save with
    merged adapters; the weights in memory do not change. fp8: quantize linear layers (see fp8_blocks.py).
    copy_to_host: training may continue at once (see ShardWriter).

    Every rank calls this. One rank writes each file. conversion.json is written (see conversion_report.py). Besides its
    shards a rank holds one full tensor (of one expert), and the tensors that wait for its disk (see writer.py).
    """
    destination = Path(destination)
    family, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
    tensors = collect_params(chunks, copies=False)
    writer, started = ShardWriter(destination, copy_to_host=copy_to_host), time.perf_counter()
    merges = merge_functions(chunks) if merge else {}
    write_tensors(writer, tensors, entries, architecture, dtype, max_shard_bytes, merges, fp8=fp8)
    passthrough = PassthroughTensors(source, hf_config, architecture, describe_sources(entries), dtype)
    for number, specs in enumerate(passthrough.files(max_shard_bytes)):
        if number % dist.get_world_size() == dist.get_rank():
            writer.begin(f"part-carried-{number:05}.safetensors", specs)
            for name in specs:
                writer.put(name, partial(passthrough.read, name))

    def complete(ranks: list[RankReport]) -> dict[str, str]:
        shards = sorted((shard for report in ranks for shard in report.shards), key=lambda shard: shard.name)
        specs = {name: spec for shard in shards for name, spec in shard.specs.items()}
        written = sorted(name for shard in shards for name in shard.specs if not is_scale(name, specs))
        if written != sorted(passthrough.specs.keys() | {name for entry in entries.values() for name in entry.hf}):
            raise RuntimeError(
                f"{len(written)} tensors were written, which are not those of the {family.name} rows once each"
            )
        file_by_tensor = finish_shards(destination, [(shard.name, shard.specs) for shard in shards])
        copy_small_files(Path(source), destination, hf_config, dtype, quantization_config(specs) if fp8 else None)
        sources = describe_sources(entries)
        sources |= {name: {"scales_of": name.removesuffix(SCALES)} for name in specs if is_scale(name, specs)}
        records = {
            name: sources.get(name, RECORD) | describe_tensor(spec, file_by_tensor[name], shard.written.checksums[name])
            for shard in shards
            for name, spec in shard.specs.items()
        }
        write_report(
            destination,
            "megatron-core to Hugging Face",
            family.name,
            records,
            unused_reasons(source, records, architecture),
            bytes=sum(spec.bytes for shard in shards for spec in shard.specs.values()),
            seconds=time.perf_counter() - started,
            peak_memory=[report.peak_memory for report in ranks],
        )
        return {shard.name: file_by_tensor[name] for shard in shards for name in list(shard.specs)[:1]}

    return StagedFolder(writer, complete)


def complete_folder(folder: StagedFolder) -> None:
    """Wait until a staged folder is complete. Every rank calls this. Raises as `save_weights`."""
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
    *,
    fp8: bool = False,
) -> None:
    """Convert the `tensors` of all ranks to Hugging Face tensors, and give `writer` this rank's files of them.

    File names are unique across ranks. Every rank calls this. dtype: None keeps each tensor's. merges: functions that
    merge an adapter into a shard.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    job_lists = plan_jobs(tensors, entries, architecture, dtype, merges, fp8=fp8)
    for group_index, (jobs, group, replicas) in enumerate(job_lists):
        # Separate experts have files per EP rank.
        prefix = f"{stage:04}-{group_index}-{ep_rank if group_index == 1 else 0:04}"
        # Files are distributed round-robin: first over the replicas, then over the ranks of the group.
        files: list[list[tuple[str, list[GatherJob]]]] = [[] for _ in range(group.size())]
        for number, contents in enumerate(batch_jobs(jobs, max_shard_bytes)):
            if number % replicas.size() == replicas.rank():
                name = f"part-{prefix}-{number:05}.safetensors"
                files[number // replicas.size() % group.size()].append((name, contents))
        if jobs:
            init_communicator(group)
        for rank, file, job in _interleave_jobs(files):
            if file and rank == group.rank():
                name, contents = file
                writer.begin(name, {tensor: spec for job in contents for tensor, spec in job.specs.items()})
            for tensor, run in gather_job(job, group, rank):
                writer.put(tensor, run)


def plan_jobs(
    tensors: dict[ParamKey, Tensor],
    entries: ParamTable,
    architecture: Architecture,
    dtype: torch.dtype | None,
    merges: Mapping[ParamKey, Callable[[Tensor], Tensor]],
    *,
    fp8: bool = False,
) -> list[tuple[list[GatherJob], ProcessGroup, ProcessGroup]]:
    """Return the jobs of this rank, in three lists: dense tensors, separate experts, stacked experts.

    Each list comes with the process group that gathers its tensors, and the group of its replicas.
    """
    job_lists: tuple[list[GatherJob], list[GatherJob], list[GatherJob]] = ([], [], [])
    is_first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
    for key, tensor in tensors.items():
        if key.name.startswith(TOWERS) and not is_first_stage:  # all stages have the vision tower
            continue
        entry = entries[key]
        ranks, _ = shard_position(key, entry)
        spans = entry.spans(tensor.shape, ranks, architecture)
        shapes, specs = entry.hf_shapes(tensor.shape, spans), dict[str, TensorSpec]()
        quantized = quantized_names(key, entry, shapes) if fp8 else ()
        for name, shape in shapes.items():
            spec = TensorSpec(torch.float32 if entry.fp32 else dtype or tensor.dtype, entry.stored_shape(shape))
            specs |= fp8_specs(name, spec) if name in quantized else {name: spec}
        if entry.expert_index is None:
            holders = range(ranks) if ranks > 1 else ()
            pieces = [TensorShards(entry, spans, holders, tensor, merges.get(key))]
            job_lists[key.expert is not None].append(GatherJob(specs, pieces, key.layer))
        elif entry.expert_index == local_experts(entry.num_experts).start:
            pieces = []
            for expert in range(entry.num_experts):
                sibling = key._replace(expert=expert)
                shard = tensors.get(sibling, tensor)
                # Of another rank's expert, this rank needs the dtype in which merged weights come.
                merge = merges.get(sibling, Tensor.float if key in merges else None)
                pieces.append(TensorShards(entries[sibling], spans, _holders(expert, entry), shard, merge))
            job_lists[2].append(GatherJob(specs, pieces, key.layer))
    dense_copies = cast(ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
    expert_copies = cast(ProcessGroup, parallel_state.get_expert_data_parallel_group())
    expert_group = cast(ProcessGroup, parallel_state.get_expert_tensor_and_model_parallel_group())
    groups = (
        (shard_group(expert=False), dense_copies),
        (shard_group(expert=True), expert_copies),
        (expert_group, expert_copies),
    )
    return [(jobs, *pair) for jobs, pair in zip(job_lists, groups, strict=True)]


def _holders(expert: int, entry: MappingEntry) -> range:
    """Return the ranks of the expert tensor and model parallel group that hold a stacked expert's shards, in order."""
    etp = shard_group(expert=True).size()
    first = expert // len(local_experts(entry.num_experts)) * etp  # expert tensor parallelism is the inner one
    return range(first, first + (1 if entry.kind.dim is None else etp))


def batch_jobs(jobs: list[GatherJob], max_bytes: int) -> Iterator[list[GatherJob]]:
    """Yield the jobs in batches of at most `max_bytes`, or of one job if it is larger."""
    run, size = [], 0
    for job in jobs:
        if run and size + job.bytes > max_bytes:
            yield run
            run, size = [], 0
        run.append(job)
        size += job.bytes
    if run:
        yield run


def _interleave_jobs(
    files: list[list[tuple[str, list[GatherJob]]]],
) -> Iterator[tuple[int, tuple[str, list[GatherJob]] | None, GatherJob]]:
    """Yield one job of each rank in turn, so that all ranks write at the same time.

    Each is (rank, the file that begins with this job, job).
    """
    jobs = [
        [(file if number == 0 else None, job) for file in rank_files for number, job in enumerate(file[1])]
        for rank_files in files
    ]
    for round_jobs in zip_longest(*jobs):
        yield from ((rank, entry[0], entry[1]) for rank, entry in enumerate(round_jobs) if entry is not None)


def init_communicator(group: ProcessGroup) -> None:
    """Initialize the communicator of `group`: NCCL needs all its ranks in the first exchange, not just two of them."""
    if group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=runtime.device()), group=group)


def gather_job(job: GatherJob, group: ProcessGroup, writer: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of `job`, each in runs, on rank `writer` of `group`; nothing on other ranks."""
    names = job.names
    # Stacked tensors are written one after another: the experts are gathered once for each.
    for batch in [names] if len(job.pieces) == 1 else [[name] for name in names]:
        scales: list[Tensor] = []
        for piece in job.pieces:
            shards = _gather(piece, group, writer)
            for name in batch if group.rank() == writer else ():
                runs = _tensor_runs(piece, shards, names.index(name))
                if name + SCALES not in job.specs:
                    yield from ((name, run) for run in runs)
                    continue
                values, block_scales = quantize_blocks(runs[0] if len(runs) == 1 else torch.cat(runs))
                yield name, values
                scales.append(block_scales)
                if piece is job.pieces[-1]:
                    yield from ((name + SCALES, run) for run in scales)
                    scales = []


def _gather(piece: TensorShards, group: ProcessGroup, writer: int) -> list[Tensor]:
    """Return the shards of all holders, in order, on rank `writer`; on other ranks the local shard."""
    rank, holders = group.rank(), piece.holders or (writer,)
    shard = piece.merge(piece.shard) if piece.merge and rank in (writer, *holders) else piece.shard
    shards, exchange = [shard], []
    if rank == writer:
        shards = [shard if holder == rank else torch.empty_like(shard) for holder in holders]
        pairs = zip(holders, shards, strict=True)
        exchange = [P2POp(dist.irecv, shard, group=group, group_peer=peer) for peer, shard in pairs if peer != rank]
    elif rank in holders:
        exchange = [P2POp(dist.isend, shard.contiguous(), group=group, group_peer=writer)]
    for work in batch_isend_irecv(exchange) if exchange else ():
        work.wait()
    return shards


def _tensor_runs(piece: TensorShards, shards: list[Tensor], part: int) -> list[Tensor]:
    """Return the values of one Hugging Face tensor (or of one expert in it) in order, as views if possible."""
    entry, size = piece.entry, shards[0].shape[piece.entry.dim]
    pieces = []
    for rank, shard in enumerate(shards):
        for offset, span in clip_spans(piece.spans, rank * size, (rank + 1) * size):
            if span.part == part:
                run = shard.narrow(entry.dim, offset, span.length)
                pieces.append((span, run.t() if entry.transposed else run))
    if entry.hf_dim == 0 and all(span.step == 1 for span, _ in pieces):
        return [run for _, run in sorted(pieces, key=lambda item: item[0].start)]
    shape = list(entry.hf_shapes(shards[0].shape, piece.spans).values())[part]
    tensor = shards[0].new_empty(shape)
    for span, run in pieces:
        positions = slice(span.start, span.stop, span.step)
        tensor[(*(slice(None),) * entry.hf_dim, positions)] = run
    return [tensor]


def gather_or_raise[T](value: T, failure: Exception | None) -> list[T]:
    """Gather every rank's value on rank 0. If a rank failed, raise its OSError or RuntimeError on all ranks."""
    local_failure = None if failure is None else (getattr(failure, "errno", None), str(failure))
    failures: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, local_failure)
    for rank, failure_record in enumerate(failures):
        if failure_record is not None:
            number, reason = failure_record
            message = f"the checkpoint could not be written: rank {rank}: {reason}"
            raise RuntimeError(message) if number is None else OSError(number, message)
    values = [value] * dist.get_world_size()
    dist.gather_object(value, values if dist.get_rank() == 0 else None)
    return values


def is_scale(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a tensor of `specs` has the scales of another one."""
    return name.endswith(SCALES) and name.removesuffix(SCALES) in specs


def copy_small_files(
    source: Path, destination: Path, hf_config: HfConfig, dtype: torch.dtype, quantization: HfConfig | None = None
) -> None:
    """Copy config.json, changed for weights in `dtype`, and the other small files of a model folder.

    quantization: `quantization_config` of the written weights.
    """
    _write_config(source, destination, hf_config, dtype, quantization)
    _copy_small_files(source, destination)


def _write_config(
    source: Path, destination: Path, hf_config: HfConfig, dtype: torch.dtype, quantization: HfConfig | None
) -> None:
    """Write config.json with the dtype and the quantization of the written weights."""
    config = _set_dtype(hf_config, dtype)
    config.pop("quantization_config", None)
    if "text_config" in config:
        config["text_config"] = _set_dtype(config["text_config"], dtype)
        config["text_config"].pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    config = lower_config(config)
    original = (source / "config.json").read_text(encoding="utf-8")
    is_unchanged = json.loads(original) == config
    with (destination / "config.json").open("w", encoding="utf-8") as stream:
        stream.write(original if is_unchanged else json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        sync(stream)


def _set_dtype(config: HfConfig, dtype: torch.dtype) -> HfConfig:
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    return config | dict.fromkeys(keys, str(dtype).removeprefix("torch."))


def _copy_small_files(source: Path, destination: Path) -> None:
    """Copy small files, and folders of small files only, such as additional_chat_templates."""
    for entry in sorted(source.iterdir()):
        files = sorted(entry.iterdir()) if entry.is_dir() and not entry.name.startswith(".") else [entry]
        if not all(_is_copied(file) for file in files):
            continue
        for file in files:
            target = destination / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            with file.open("rb") as read, target.open("wb") as stream:
                shutil.copyfileobj(read, stream)
                sync(stream)


def _is_copied(file: Path) -> bool:
    if file.name in NOT_COPIED or file.name.endswith(".index.json"):
        return False
    is_kept = file.suffix in COPIED_SUFFIXES or file.name.startswith(COPIED_NAMES)
    return is_kept and file.is_file() and file.stat().st_size <= MAX_COPIED
