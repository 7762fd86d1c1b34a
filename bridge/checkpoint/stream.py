"""Stream of a megatron-core model's full Hugging Face tensors to every rank, for rollout engines.

A rank gathers a bucket of tensors and broadcasts it, while all ranks consume the previous bucket. Of tensors that every
rank has, each makes its own buckets.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from ..lora.attach import Lora
from ..lora.merge import merge_functions
from ..mapping.architecture import HfConfig
from ..mapping.local_params import collect_params
from ..model.chunk_mapping import describe_chunks, map_chunks
from .adapter_experts import fuse_experts
from .adapter_files import trained_tensors
from .safetensors_io import TensorSpec, tensor_names
from .save import GatherJob, batch_jobs, gather_job, init_communicator, plan_jobs

BUCKET = 512 * 2**20  # bytes
EXPERTS = 1  # index of the separate experts in the lists of `plan_jobs`
ALIGNMENT = 64  # bytes: alignment of tensors in a bucket


class _Bucket(NamedTuple):
    """Unit of transfer: the tensors `specs` by name, broadcast by global rank `root`; None: each rank has them."""

    order: tuple[int, int]  # index in the lists of `plan_jobs`; layer of experts that several ranks send
    root: int | None
    specs: dict[str, TensorSpec]
    jobs: list[GatherJob]  # in which this rank takes part
    group: ProcessGroup | None  # ranks that gather it; None on other ranks

    @property
    def bytes(self) -> int:
        return sum(_padded_size(spec) for spec in self.specs.values())


class _Sent(NamedTuple):
    """Bucket in transfer."""

    specs: dict[str, TensorSpec]
    data: Tensor  # uint8
    work: dist.Work | None


@torch.no_grad()
def stream_weights(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    source: str | Path,
    *,
    dtype: torch.dtype,
    merge: bool = False,
    bucket_bytes: int = BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of the model in `chunks`, by their Hugging Face names in `source`.

    They are copies on this rank's device, in `dtype` (fp32 where the mapping says so). Passthrough tensors of `source`
    are left out. merge: yield merged weights; the weights in memory do not change.

    Every rank calls this and reads it to its end; all get the same tensors in the same order. A rank holds two buckets
    of `bucket_bytes` (or of one mapping's tensors, if larger) at a time, and one full tensor. Parameters must be
    gathered (Training.parameters_gathered).
    """
    _, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
    tensors = collect_params(chunks, copies=False)
    job_lists = plan_jobs(tensors, entries, architecture, dtype, merge_functions(chunks) if merge else {})
    yield from _stream_buckets(
        _plan_buckets(job_lists, bucket_bytes, {name for entry in entries.values() for name in entry.hf})
    )


@torch.no_grad()
def stream_adapter(
    chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, *, bucket_bytes: int = BUCKET
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters and the fully trained modules in `chunks`, by their names in PEFT's format.

    As `stream_weights`, but each tensor keeps its dtype.
    """
    architecture = describe_chunks(chunks, hf_config)
    tensors, entries = trained_tensors(chunks, lora, copies=False)
    copies: dict[str, list[str]] = {}
    for name, original in lora.plan.copies.items():
        copies.setdefault(original, []).append(name)
    names = {name for entry in entries.values() for name in entry.hf}
    job_lists = plan_jobs(tensors, entries, architecture, None, {})
    stacked = lora.plan.stacked
    for name, tensor in _stream_buckets(_plan_buckets(job_lists, bucket_bytes, names)):
        tensor = fuse_experts(name, tensor) if name in stacked else tensor
        yield from ((copy, tensor) for copy in (name, *copies.get(name, ())))


def _plan_buckets(
    job_lists: Sequence[tuple[list[GatherJob], ProcessGroup, ProcessGroup]], bucket_bytes: int, names: set[str]
) -> list[_Bucket]:
    """Return the buckets in the order of transfer, the same on every rank.

    job_lists: of `plan_jobs`. names: of all tensors. The experts of a layer follow each other, from whichever ranks
    have them: vLLM keeps the tensors of a layer until it has all of them, and its bookkeeping takes time quadratic in
    their number (100 s for 30B parameters).
    """
    local_runs: dict[tuple[int, tuple[int, ...]], tuple[ProcessGroup, list[list[GatherJob]]]] = {}
    local_buckets: list[tuple[int, tuple[int, ...], list[int], list[dict[str, TensorSpec]]]] = []
    experts_are_split = parallel_state.get_expert_model_parallel_world_size() > 1
    for kind, (jobs, group, replicas) in enumerate(job_lists):
        is_everywhere = replicas.size() == dist.get_world_size()
        if not jobs or (replicas.rank() != 0 and not is_everywhere):  # the first replica sends
            continue
        init_communicator(group)
        ranks = () if is_everywhere else tuple(dist.get_process_group_ranks(group))
        is_shared = kind == EXPERTS and experts_are_split
        layers = [list(jobs) for _, jobs in groupby(jobs, lambda job: job.layer)] if is_shared else [jobs]
        runs = [run for jobs in layers for run in batch_jobs(jobs, bucket_bytes)]
        local_runs[kind, ranks] = group, runs
        if group.rank() == replicas.rank() == 0:
            specs = [{name: spec for job in run for name, spec in job.specs.items()} for run in runs]
            local_buckets.append((kind, ranks, [(run[0].layer or 0) if is_shared else 0 for run in runs], specs))
    all_buckets: list[list] = [[]] * dist.get_world_size()
    dist.all_gather_object(all_buckets, local_buckets)
    buckets = []
    for kind, ranks, layers, all_specs in (entry for rank_buckets in all_buckets for entry in rank_buckets):
        group, runs = local_runs.get((kind, ranks), (None, [[]] * len(all_specs)))
        for number, (layer, specs, run) in enumerate(zip(layers, all_specs, runs, strict=True)):
            root = ranks[number % len(ranks)] if ranks else None
            buckets.append(_Bucket((kind, layer), root, specs, run, group))
    buckets.sort(key=lambda bucket: bucket.order)
    names_sent = sorted(name for bucket in buckets for name in bucket.specs)
    if names_sent != sorted(names):
        raise RuntimeError(
            f"{len(names_sent)} tensors would be sent, which are not the {len(names)} of the rows once each"
        )
    return buckets


def _stream_buckets(buckets: Iterable[_Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each bucket while the next one is in transfer."""
    previous: _Sent | None = None
    for bucket in buckets:
        current = _send(bucket)
        if previous is not None:
            yield from _receive(previous)
        previous = current
    if previous is not None:
        yield from _receive(previous)


def _send(bucket: _Bucket) -> _Sent:
    """Make a bucket, or start to broadcast it to every rank, including this one."""
    data = torch.empty(bucket.bytes, dtype=torch.uint8, device=runtime.device())
    if bucket.group is not None:
        offsets = dict(_offsets(bucket.specs))
        writer = 0 if bucket.root is None else dist.get_group_rank(bucket.group, bucket.root)
        for job in bucket.jobs:
            for name, run in gather_job(job, bucket.group, writer):
                dtype = bucket.specs[name].dtype
                size = run.numel() * dtype.itemsize
                data[offsets[name] : offsets[name] + size].view(dtype).view(run.shape).copy_(run)
                offsets[name] += size
    work = None if bucket.root is None else dist.broadcast(data, src=bucket.root, async_op=True)
    return _Sent(bucket.specs, data, work)


def _receive(sent: _Sent) -> Iterator[tuple[str, Tensor]]:
    if sent.work is not None:
        sent.work.wait()
    for name, offset in _offsets(sent.specs):
        spec = sent.specs[name]
        yield name, sent.data[offset : offset + spec.bytes].view(spec.dtype).view(spec.shape)


def _offsets(specs: dict[str, TensorSpec]) -> Iterator[tuple[str, int]]:
    """Yield the name and the offset in bytes of each tensor in a bucket."""
    offset = 0
    for name, spec in specs.items():
        yield name, offset
        offset += _padded_size(spec)


def _padded_size(spec: TensorSpec) -> int:
    return -(-spec.bytes // ALIGNMENT) * ALIGNMENT
