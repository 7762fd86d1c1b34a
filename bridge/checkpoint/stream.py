"""A megatron-core model as Hugging Face tensors, whole, on every rank: what a rollout engine takes.

A rank gathers a bucket of tensors and sends it to all ranks, while they take those of the bucket before.
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
from ..mapping.local_params import collect_params
from ..mapping.param_mapping import OUTPUT, HfConfig
from ..model.chunk_mapping import describe_chunks, map_chunks
from .adapter_files import trained_tensors
from .safetensors_io import TensorSpec, tensor_names
from .save import GatherJob, batch_jobs, gather_job, init_communicator, plan_jobs

BUCKET = 512 * 2**20  # bytes
EXPERTS = 1  # place among jobs_of's lists of the experts whose tensors stand alone
ALIGNED = 64  # bytes: where a tensor may begin in a bucket


class _Bucket(NamedTuple):
    """A unit of transfer: the tensors `specs` by name, from global rank `root`."""

    order: tuple[int, int]  # place among jobs_of's lists; layer of experts that several ranks send
    root: int
    specs: dict[str, TensorSpec]
    jobs: list[GatherJob]  # with which this rank helps to fill it
    group: ProcessGroup | None  # of the ranks that fill it, where this is one of them

    @property
    def bytes(self) -> int:
        return sum(_room(spec) for spec in self.specs.values())


class _Sent(NamedTuple):
    """A bucket on its way."""

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
    """Yield each tensor of the model of all ranks' `chunks`, by the names of `source`.

    Each is whole, on this rank's device, in `dtype` (or in fp32 if its mapping says so).

    To be called by every rank, and read to its end by every rank: all get the same tensors in the same order. They are
    copies. `merge`: with the adapters in the weights, which stay as they are. Tensors of `source` that the model is
    built without (passthrough.py) do not come. Two buckets of `bucket_bytes` (or one row's tensors, where these are
    larger) are held at a time, beside one whole tensor. Parameters have to be gathered (Training.parameters_gathered).
    """
    _, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
    tensors = collect_params(chunks)
    if architecture.tied:
        tensors.pop(OUTPUT, None)  # the last stage's copy; the first stage has the embedding itself
    jobs = plan_jobs(tensors, entries, architecture, dtype, merge_functions(chunks) if merge else {})
    yield from _streamed(_buckets(jobs, bucket_bytes, {name for entry in entries.values() for name in entry.hf}))


@torch.no_grad()
def stream_adapter(
    chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, *, bucket_bytes: int = BUCKET
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of all ranks' `chunks`, and fully trained modules: names and tensors in PEFT's format.

    As `stream_weights`, each in its own dtype.
    """
    architecture = describe_chunks(chunks, hf_config)
    tensors, entries = trained_tensors(chunks, lora)
    if architecture.tied:
        tensors.pop(OUTPUT, None)
    copies: dict[str, list[str]] = {}
    for name, of in lora.plan.copies.items():
        copies.setdefault(of, []).append(name)
    names = {name for entry in entries.values() for name in entry.hf}
    jobs = plan_jobs(tensors, entries, architecture, None, {})
    for name, tensor in _streamed(_buckets(jobs, bucket_bytes, names)):
        yield from ((each, tensor) for each in (name, *copies.get(name, ())))


def _buckets(
    sorts: Sequence[tuple[list[GatherJob], ProcessGroup, ProcessGroup]], bucket_bytes: int, names: set[str]
) -> list[_Bucket]:
    """Return what is sent, in order, the same on every rank. `sorts`: of `jobs_of`; `names`: of all tensors.

    The experts of a layer come one after another, from whichever ranks have them: vLLM keeps the tensors of a layer
    until it has all of them, and its bookkeeping takes time quadratic in what it keeps (100 s for 30B parameters).
    """
    mine: dict[tuple[int, tuple[int, ...]], tuple[ProcessGroup, list[list[GatherJob]]]] = {}
    local_buckets: list[tuple[int, tuple[int, ...], list[int], list[dict[str, TensorSpec]]]] = []
    experts_are_split = parallel_state.get_expert_model_parallel_world_size() > 1
    for sort, (jobs, group, replicas) in enumerate(sorts):
        if not jobs or replicas.rank() != 0:  # of ranks that hold the same, the first ones send it
            continue
        init_communicator(group)
        ranks, is_shared = tuple(dist.get_process_group_ranks(group)), sort == EXPERTS and experts_are_split
        layers = [list(jobs) for _, jobs in groupby(jobs, lambda job: job.layer)] if is_shared else [jobs]
        runs = [run for jobs in layers for run in batch_jobs(jobs, bucket_bytes)]
        mine[sort, ranks] = group, runs
        if group.rank() == 0:
            specs = [{name: spec for job in run for name, spec in job.specs.items()} for run in runs]
            local_buckets.append((sort, ranks, [(run[0].layer or 0) if is_shared else 0 for run in runs], specs))
    everyone: list[list] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, local_buckets)
    buckets = []
    for sort, ranks, layers, all_forms in (one for one_rank in everyone for one in one_rank):
        group, runs = mine.get((sort, ranks), (None, [[]] * len(all_forms)))
        for number, (layer, specs, run) in enumerate(zip(layers, all_forms, runs, strict=True)):
            buckets.append(_Bucket((sort, layer), ranks[number % len(ranks)], specs, run, group))
    buckets.sort(key=lambda bucket: bucket.order)
    names_sent = sorted(name for bucket in buckets for name in bucket.specs)
    if names_sent != sorted(names):
        raise RuntimeError(
            f"{len(names_sent)} tensors would be sent, which are not the {len(names)} of the rows once each"
        )
    return buckets


def _streamed(buckets: Iterable[_Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one bucket while the next one is on its way."""
    before: _Sent | None = None
    for bucket in buckets:
        now = _send(bucket)
        if before is not None:
            yield from _received(before)
        before = now
    if before is not None:
        yield from _received(before)


def _send(bucket: _Bucket) -> _Sent:
    """Begin to send a bucket to every rank, this one among them."""
    data = torch.empty(bucket.bytes, dtype=torch.uint8, device=runtime.device())
    if bucket.group is not None:
        at = dict(_places(bucket.specs))
        writer = dist.get_group_rank(bucket.group, bucket.root)
        for job in bucket.jobs:
            for name, run in gather_job(job, bucket.group, writer):
                dtype = bucket.specs[name].dtype
                size = run.numel() * dtype.itemsize
                data[at[name] : at[name] + size].view(dtype).view(run.shape).copy_(run)
                at[name] += size
    alone = dist.get_world_size() == 1
    work = None if alone else dist.broadcast(data, src=bucket.root, async_op=True)
    return _Sent(bucket.specs, data, work)


def _received(sent: _Sent) -> Iterator[tuple[str, Tensor]]:
    if sent.work is not None:
        sent.work.wait()
    for name, at in _places(sent.specs):
        spec = sent.specs[name]
        yield name, sent.data[at : at + spec.bytes].view(spec.dtype).view(spec.shape)


def _places(specs: dict[str, TensorSpec]) -> Iterator[tuple[str, int]]:
    """Yield the offset of each tensor in its bucket, in bytes."""
    at = 0
    for name, spec in specs.items():
        yield name, at
        at += _room(spec)


def _room(spec: TensorSpec) -> int:
    return -(-spec.bytes // ALIGNED) * ALIGNED
