"""An engine in the server's own process: one thread does what it is asked, so that the server goes on answering."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine import Completion, Reader, Request, Sampling, Top
from .weight_buckets import Bucket, attach, tensors_in


class BrokenOff(Exception):
    """The rest of an update will not come."""


class _Arrived(NamedTuple):
    bucket: Bucket
    taken: Callable[[], Any]  # to be called once its tensors have been read


class InProcess:
    """A server's backend over a `Reader`."""

    workers = 1
    nccl = False
    adapters = 0

    def __init__(self, engine: Reader, name: str):
        self.engine, self.name = engine, name
        self._thread = ThreadPoolExecutor(1, "engine")
        self._arrived: queue.Queue[_Arrived | Exception | None] = queue.Queue()
        self._update: asyncio.Future | None = None
        self._failed = False

    def _do(self, call: Callable, *arguments: Any) -> asyncio.Future:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._watched, call, *arguments)

    def _watched(self, call: Callable, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except torch.AcceleratorError:  # after a device-side assert no kernel runs in this process any more
            self._failed = True
            raise

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Where it is cancelled, it ends once the thread has stopped between two tokens."""
        cancelled = threading.Event()
        work = self._do(self.engine.generate, requests, sampling, cancelled.is_set)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait({work})
            work.exception()  # is no news: `Cancelled`, or what nobody waits for
            raise

    async def top_log_probs(self, tokens: list[int], places: list[int], top: int, vocab_size: int) -> Top:
        return await self._do(self.engine.top_log_probs, tokens, places, top, vocab_size)

    async def vocabulary(self) -> dict[str, int]:
        return self.engine.vocabulary()

    async def begin(self) -> None:
        self._arrived = queue.Queue()
        self._update = self._do(self.engine.update, _tensors(self._arrived))

    async def load(self, bucket: Bucket) -> None:
        assert self._update is not None
        loop, taken = asyncio.get_running_loop(), asyncio.Event()
        self._arrived.put(_Arrived(bucket, lambda: loop.call_soon_threadsafe(taken.set)))
        waiting = asyncio.ensure_future(taken.wait())
        await asyncio.wait({waiting, self._update}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await self._update  # raises what went wrong
            raise RuntimeError("the engine ended its update before all weights had come")

    async def finish(self) -> None:
        assert self._update is not None
        self._arrived.put(None)
        await self._update
        self._update = None

    async def abort(self) -> None:
        self._arrived.put(BrokenOff())
        if self._update is not None:
            with contextlib.suppress(Exception):
                await self._update
        self._update = None

    async def group(self, host: str, port: int) -> None:
        raise ValueError(f"the {self.name} engine takes no weights by NCCL")

    async def gpus(self) -> list[str]:
        return []

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        return await self._do(self.engine.checksums, names)

    async def reset_cache(self) -> None:
        """Nothing is kept between two calls of `generate`."""

    async def sleep(self, level: int) -> None:
        await self._do(self.engine.sleep)  # its weights stay, whatever the level

    async def wake(self) -> None:
        await self._do(self.engine.wake)

    def failed(self) -> bool:
        return self._failed

    def close(self) -> None:
        self._arrived.put(BrokenOff())
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.close()


def _tensors(arrived: queue.Queue[_Arrived | Exception | None]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of buckets as they come; each is to be read before the next is asked for."""
    while (item := arrived.get()) is not None:
        if isinstance(item, Exception):
            raise item
        assert item.bucket.place is not None
        flat = attach(item.bucket.place)[item.bucket.start :]
        yield from tensors_in(flat, item.bucket.entries)
        item.taken()
