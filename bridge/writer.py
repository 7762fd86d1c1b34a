"""A rank's files, written by a thread: while the disk and the checksums work, the next tensors are gathered."""

import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from .safetensors_io import Form, write_shard

WAITING = 512 * 2**20  # bytes of tensors that may wait for the disk, or one tensor where that is larger


class Writer:
    """`begin` a file, `put` its tensors in their order (each whole or in runs), and so on; `finish` at last.

    An error does not show before `finish`, so that what other ranks wait for goes on; what is put after it is dropped.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.written: list[tuple[str, Mapping[str, Form], dict[str, str]]] = []  # files, with the tensors' checksums
        self.error: Exception | None = None
        self._tasks: SimpleQueue = SimpleQueue()
        self._waiting = 0
        self._room = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def begin(self, file: str, forms: Mapping[str, Form]) -> None:
        self._tasks.put((file, forms))

    def put(self, name: str, run: Tensor) -> None:
        if run.is_cuda:
            torch.cuda.current_stream().synchronize()  # the thread has a stream of its own
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._waiting + run.nbytes <= WAITING)
            self._waiting += run.nbytes
        self._tasks.put((name, run))

    def finish(self) -> None:
        """Wait until everything is on the disk. Look at `error` then."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while task := self._tasks.get():
            name, forms = task
            if self.error is not None:
                if isinstance(forms, Tensor):
                    self._let_go(forms.nbytes)
                continue
            runs = self._runs()
            try:
                self.written.append((name, forms, write_shard(self.folder / name, forms, runs)))
            except Exception as error:
                self.error = error
            finally:
                runs.close()

    def _runs(self) -> Generator[tuple[str, Tensor]]:
        while True:
            task = self._tasks.get()
            size = task[1].nbytes
            try:
                yield task
            finally:
                del task
                self._let_go(size)

    def _let_go(self, size: int) -> None:
        with self._room:
            self._waiting -= size
            self._room.notify()
