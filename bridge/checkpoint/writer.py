"""Checkpoint files written by a thread, while the caller gathers the next tensors.

A `StagedFolder` is a folder that all ranks write together: each rank's writer, and the final step of rank 0.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mapping.architecture import HfConfig
from .conversion_report import peak_memory
from .safetensors_io import DTYPES, NAMES, TensorSpec, WrittenFile, write_shard

MAX_QUEUED = 512 * 2**20  # bytes of tensors that may wait for the disk, or one tensor if it is larger
PINNED_CHUNK = 64 * 2**20  # bytes of one pinned copy: the allocator rounds each up to a power of two


class WrittenShard(NamedTuple):
    """Safetensors file written by a rank."""

    name: str
    specs: Mapping[str, TensorSpec]
    written: WrittenFile


class ShardWriter:
    """Thread that writes safetensors files: `begin` a file, `put` its tensors in order, then `finish`.

    A tensor may be put in runs. Read `error` after `finish`: an error is not raised and drops the tensors that follow,
    so that the collectives that other ranks wait for continue. copy_to_host: `put` copies each tensor to the host, so
    that the caller may change it at once. The thread then writes in `finish` only, so as not to slow the copies down.
    """

    total_runs_taken = 0  # runs taken by all writers of this process: the watchdog reads it as progress

    def __init__(self, folder: Path, *, copy_to_host: bool = False):
        self.folder, self.copy_to_host = folder, copy_to_host
        self.shards: list[WrittenShard] = []
        self.error: Exception | None = None
        self._tasks: SimpleQueue = SimpleQueue()
        self._queued_bytes = 0
        self._space = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        if not copy_to_host:
            self._thread.start()

    def begin(self, file: str, specs: Mapping[str, TensorSpec]) -> None:
        self._tasks.put((file, specs))

    def put(self, name: str, run: Tensor | Callable[[], Tensor]) -> None:
        """Queue a tensor, or a function that the thread calls to read one; the tensor that it reads must not change."""
        if not isinstance(run, Tensor):
            self._tasks.put((name, run, 0, None))
        elif self.copy_to_host:
            for copy in _host_chunks(run.detach()):
                self._tasks.put((name, copy, 0, _record_event(run)))
        else:
            if run.is_cuda:
                torch.cuda.current_stream().synchronize()  # the thread uses another stream
            with self._space:
                self._space.wait_for(lambda: not self._queued_bytes or self._queued_bytes + run.nbytes <= MAX_QUEUED)
                self._queued_bytes += run.nbytes
            self._tasks.put((name, run, run.nbytes, None))

    def finish(self) -> None:
        """Wait until all files are on the disk; `error` is then set if writing failed."""
        self._tasks.put(None)
        if self.copy_to_host:
            self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        while task := self._tasks.get():
            if self.error is not None:
                if len(task) > 2:
                    self._release(task[2])
                continue
            name, specs = task
            runs = self._runs()
            try:
                self.shards.append(WrittenShard(name, specs, write_shard(self.folder / name, specs, runs)))
            except Exception as error:
                self.error = error
            finally:
                runs.close()

    def _runs(self) -> Generator[tuple[str, Tensor]]:
        while True:
            name, run, size, event = self._tasks.get()
            ShardWriter.total_runs_taken += 1
            if event is not None:
                event.synchronize()
            try:
                yield name, run if isinstance(run, Tensor) else run()
            finally:
                del run
                self._release(size)

    def _release(self, size: int) -> None:
        with self._space:
            self._queued_bytes -= size
            self._space.notify()


def _host_chunks(run: Tensor) -> Generator[Tensor]:
    """Yield host copies of a tensor; of a GPU tensor, asynchronous copies in pinned memory, chunk by chunk."""
    if not run.is_cuda:
        yield run.clone(memory_format=torch.contiguous_format)
        return
    for part in run.contiguous().view(-1).split(PINNED_CHUNK // run.itemsize):
        yield torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)


def _record_event(run: Tensor) -> torch.cuda.Event | None:
    if not run.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class RankReport(NamedTuple):
    """Files that one rank wrote into a folder, and its peak memory."""

    shards: list[WrittenShard]
    peak_memory: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        shards = [
            {
                "name": shard.name,
                "specs": {name: [NAMES[spec.dtype], *spec.shape] for name, spec in shard.specs.items()},
                "written": list(shard.written),
            }
            for shard in self.shards
        ]
        return {"shards": shards, "peak_memory": self.peak_memory}

    @classmethod
    def from_json(cls, report: HfConfig) -> "RankReport":
        """Parse the result of `as_json`."""
        shards = [
            WrittenShard(
                shard["name"],
                {name: TensorSpec(DTYPES[dtype], tuple(shape)) for name, (dtype, *shape) in shard["specs"].items()},
                WrittenFile(*shard["written"]),
            )
            for shard in report["shards"]
        ]
        return cls(shards, report["peak_memory"])


@dataclass
class StagedFolder:
    """Folder that all ranks write together."""

    writer: ShardWriter  # this rank's
    # Called on rank 0 with the reports of all ranks: completes the folder. Returns the new names of renamed shards.
    complete: Callable[[list[RankReport]], dict[str, str]]
    subfolder: str = ""  # path within the checkpoint folder

    def report(self) -> RankReport:
        """Return this rank's report once its files are on the disk. Raises the error of its writer."""
        self.writer.finish()
        if self.writer.error is not None:
            raise self.writer.error
        return RankReport(self.writer.shards, peak_memory())
