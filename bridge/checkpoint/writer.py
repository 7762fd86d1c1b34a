"""Files written by a thread: while the disk and the checksums work, the next tensors are gathered.

A folder that all ranks write together is a `Folder`: each rank's writer, and what rank 0 does when all have written.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mapping.param_mapping import HfConfig
from .conversion_report import peak_memory
from .safetensors_io import DTYPES, NAMES, TensorSpec, WrittenFile, write_shard

WAITING = 512 * 2**20  # bytes of tensors that may wait for the disk, or one tensor where that is larger
PINNED = 64 * 2**20  # bytes of one copy in pinned memory: the allocator rounds each up to a power of two


class WrittenShard(NamedTuple):
    """A file that a rank has written."""

    name: str
    specs: Mapping[str, TensorSpec]
    written: WrittenFile


class ShardWriter:
    """`begin` a file, `put` its tensors in their order (each whole or in runs), and so on; `finish` at last.

    An error does not show before `finish`, so that what other ranks wait for goes on; what is put after it is dropped.
    `copied`: what is put is copied first, to the host, so that the caller may go on to change it; nothing is written
    before `finish`, so that nothing slows the copies down.
    """

    taken_in_all = 0  # runs that threads have taken to write: while this grows, nothing hangs

    def __init__(self, folder: Path, *, copied: bool = False):
        self.folder, self.copied = folder, copied
        self.shards: list[WrittenShard] = []
        self.error: Exception | None = None
        self._tasks: SimpleQueue = SimpleQueue()
        self._waiting = 0
        self._room = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        if not copied:
            self._thread.start()

    def begin(self, file: str, specs: Mapping[str, TensorSpec]) -> None:
        self._tasks.put((file, specs))

    def put(self, name: str, run: Tensor | Callable[[], Tensor]) -> None:
        """A function is called by the thread: it reads what stays as it is."""
        if not isinstance(run, Tensor):
            self._tasks.put((name, run, 0, None))
        elif self.copied:
            for copy in _copies(run.detach()):
                self._tasks.put((name, copy, 0, _event(run)))
        else:
            if run.is_cuda:
                torch.cuda.current_stream().synchronize()  # the thread has a stream of its own
            with self._room:
                self._room.wait_for(lambda: not self._waiting or self._waiting + run.nbytes <= WAITING)
                self._waiting += run.nbytes
            self._tasks.put((name, run, run.nbytes, None))

    def finish(self) -> None:
        """Wait until everything is on the disk. Look at `error` then."""
        self._tasks.put(None)
        if self.copied:
            self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        while task := self._tasks.get():
            if self.error is not None:
                if len(task) > 2:
                    self._let_go(task[2])
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
            ShardWriter.taken_in_all += 1
            if event is not None:
                event.synchronize()
            try:
                yield name, run if isinstance(run, Tensor) else run()
            finally:
                del run
                self._let_go(size)

    def _let_go(self, size: int) -> None:
        with self._room:
            self._waiting -= size
            self._room.notify()


def _copies(run: Tensor) -> Generator[Tensor]:
    """On the host, in runs: of a GPU's tensor on their way into pinned memory."""
    if not run.is_cuda:
        yield run.clone(memory_format=torch.contiguous_format)
        return
    for part in run.contiguous().view(-1).split(PINNED // run.itemsize):
        yield torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)


def _event(run: Tensor) -> torch.cuda.Event | None:
    if not run.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class RankReport(NamedTuple):
    """Report of one rank on its part of a folder."""

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
    def of_json(cls, report: HfConfig) -> "RankReport":
        """Inverse of `as_json`."""
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
    """A folder that all ranks write together."""

    writer: ShardWriter  # of this rank
    # On rank 0, when every rank has reported: makes the folder whole. Returns the new names of shards that got one.
    complete: Callable[[list[RankReport]], dict[str, str]]
    within: str = ""  # where in a larger folder this one is

    def report(self) -> RankReport:
        """Return this rank's, once its files are on the disk. Raises what its writer met."""
        self.writer.finish()
        if self.writer.error is not None:
            raise self.writer.error
        return RankReport(self.writer.shards, peak_memory())
