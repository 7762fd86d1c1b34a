"""Backend over an engine in the server's process. The engine runs in a thread, so the server stays responsive."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .engine import Completion, Request, Sampling, ScoringEngine, TopLogProbs
from .weight_buckets import Bucket, attach, unpack_tensors


class UpdateAborted(Exception):
    """Raised in the engine's weight stream when its update is aborted."""


class _Arrival(NamedTuple):
    bucket: Bucket
    on_read: Callable[[], object]  # called once the tensors have been read


class InProcessBackend:
    """Backend over a `ScoringEngine`."""

    workers = 1
    has_nccl = False
    max_adapter_rank = 0

    def __init__(self, engine: ScoringEngine, name: str):
        self.engine, self.name = engine, name
        self._thread = ThreadPoolExecutor(1, "engine")
        self._arrivals: queue.Queue[_Arrival | Exception | None] = queue.Queue()
        self._update: asyncio.Future | None = None
        self._has_failed = False

    def _submit[**P, T](self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(
            self._thread, partial(self._run, call, *arguments, **keywords)
        )

    def _run[**P, T](self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return call(*arguments, **keywords)
        except torch.AcceleratorError:  # after a device-side assert this process can run no kernel
            self._has_failed = True
            raise

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Generate. A cancelled call returns once the thread has stopped between two tokens."""
        cancelled = threading.Event()
        task = self._submit(self.engine.generate, requests, sampling, cancelled.is_set)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait({task})
            task.exception()  # retrieved to silence asyncio's warning
            raise

    async def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        return await self._submit(self.engine.top_log_probs, document, positions, top, vocab_size)

    async def vocabulary(self) -> dict[str, int]:
        return self.engine.vocabulary()

    async def begin(self) -> None:
        self._arrivals = queue.Queue()
        self._update = self._submit(self.engine.update, _stream(self._arrivals))

    async def load(self, bucket: Bucket) -> None:
        assert self._update is not None
        loop, is_read = asyncio.get_running_loop(), asyncio.Event()
        self._arrivals.put(_Arrival(bucket, lambda: loop.call_soon_threadsafe(is_read.set)))
        arrival = asyncio.ensure_future(is_read.wait())
        await asyncio.wait({arrival, self._update}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done():
            arrival.cancel()
            await self._update  # raises the engine's error
            raise RuntimeError("the engine ended its update before all weights had arrived")

    async def finish(self) -> None:
        assert self._update is not None
        self._arrivals.put(None)
        await self._update
        self._update = None

    async def abort(self) -> None:
        self._arrivals.put(UpdateAborted())
        if self._update is not None:
            with contextlib.suppress(Exception):
                await self._update
        self._update = None

    async def group(self, host: str, port: int) -> None:
        raise ValueError(f"the {self.name} engine does not support NCCL transfers")

    async def gpus(self) -> list[str]:
        return []

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        return await self._submit(self.engine.checksums, names)

    async def reset_cache(self) -> None:
        """Do nothing: no cache is kept between calls of `generate`."""

    async def sleep(self, level: int) -> None:
        await self._submit(self.engine.sleep)  # keeps the weights at every level

    async def wake(self) -> None:
        await self._submit(self.engine.wake)

    def has_failed(self) -> bool:
        return self._has_failed

    def close(self) -> None:
        self._arrivals.put(UpdateAborted())
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.close()


def _stream(arrivals: queue.Queue[_Arrival | Exception | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of buckets as they arrive. The consumer reads each tensor before it requests the next."""
    while (arrival := arrivals.get()) is not None:
        if isinstance(arrival, Exception):
            raise arrival
        assert arrival.bucket.handle is not None
        flat = attach(arrival.bucket.handle)[arrival.bucket.start :]
        yield from unpack_tensors(flat, arrival.bucket.entries)
        arrival.on_read()
