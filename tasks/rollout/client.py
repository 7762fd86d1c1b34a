"""The trainer's side of rollout servers: an `Engine` whose completions come over HTTP, used by one rank of a run.

Requests are spread over the servers, weights go to all of them. Buckets of weights go the fastest way that there is:
by NCCL from this GPU to vLLM's, where that is another, else by shared memory to a server on this host, else in the
request's body; while one is on its way the next is filled. Whatever is waited for, the server is asked now and then
whether it is still there.
"""

import asyncio
import itertools
import secrets
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime
from ..run.interrupt import before_exit, forget
from .completion_json import from_json
from .engine import Completion, Request, Sampling
from .health import all_of, say
from .process_group import gpu_name
from .server_connection import DeviceMemory, Link, ServerLost, Transport, WeightsLost
from .weight_buckets import BUCKET_BYTES, Memory, Packing


class ServerEngine:
    """An `Engine` over one or several rollout servers.

    Arguments:
        urls: where they are, as `server_urls` gives them
        timeout: seconds to wait for them at first
        wait: seconds to wait for one that is lost later; it comes back without the run's weights, so that
            `WeightsLost` is raised then, and ServerLost where it does not come back
        sleep_level: what `sleep` frees: 0 nothing (servers mostly have GPUs of their own), 1 the cache, 2 weights too
        adapters: the rank of the adapters that `update` will send in place of whole weights; 0: whole weights
        vocab_size: of the run's model; a server of another one is refused
        transport: how buckets go; auto: the fastest that works
        given: the flags that `urls` are from
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout: float = 240.0,
        wait: float = 0.0,
        sleep_level: int = 0,
        adapters: int = 0,
        vocab_size: int | None = None,
        transport: Transport = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        given: str = "address",
    ):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout client", daemon=True)
        self._thread.start()
        self._version: str | None = None  # of the weights that the servers have of us
        self._updates = 0
        self._sleep_level, self._wait_for_lost, self._bucket_bytes = sleep_level, wait, bucket_bytes
        self._transport: Transport = transport
        run = secrets.token_hex(16)  # is kept secret
        self._name = secrets.token_hex(4)  # is shown, and tells this run's versions from all others'
        self._links = [Link(url, run, api_key, adapters, vocab_size, wait, given) for url in urls]
        self._beat: Future | None = None
        before_exit(self.release)  # also of those claimed by now, where one of them is not there
        try:
            self._run(all_of([link.connect(timeout) for link in self._links]))
        except BaseException:
            self.close()  # those that have been claimed by now
            raise
        self._beat = self._start(self._keep())

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests.

        Raises ServerLost, WeightsLost, ValueError for requests that a server refuses, RuntimeError for its failures.
        """
        shares = _spread(len(requests), len(self._links))
        answers = self._asked(
            link.call(
                "/generate",
                requests=[asdict(request) for request in requests[share]],
                sampling=asdict(sampling),
                version=self._version,
            )
            for link, share in zip(self._links, shares, strict=True)
            if share.stop > share.start
        )
        return [from_json(item) for answer in answers for item in answer["completions"]]

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send a new version of the weights to all servers.

        `weights` is read to its end whatever happens: other ranks may be giving their parts of it.
        """
        stream = iter(weights)
        self._updates += 1
        version = f"{self._updates} of {self._name}"
        try:
            self._asked(link.claim() for link in self._links)  # of one that was started again
            self._asked(link.call("/wake") for link in self._links)  # of one that a run, also another, left asleep
            self._asked(link.call("/weights/begin") for link in self._links)
            self._send(stream)
            self._asked(link.call("/weights/finish", version=version) for link in self._links)
        except Exception:
            for _ in stream:
                pass
            raise
        self._version = version

    def _send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Fill a bucket while the last one is on its way; two pieces of memory are enough for that."""
        way = self._way()
        memory_of = DeviceMemory if way == "group" else Memory
        free = [memory_of(self._bucket_bytes), memory_of(self._bucket_bytes)]
        on_its_way: tuple[Future, Memory | DeviceMemory] | None = None
        memory = free.pop()
        packing = Packing(memory.flat)

        def post() -> None:
            """Send what is in the bucket, once the one before it has arrived."""
            nonlocal on_its_way, memory, packing
            if on_its_way is not None:
                self._settled(on_its_way[0])
                free.append(on_its_way[1])
            sending = self._start(all_of([link.send(memory, packing, way) for link in self._links]))
            on_its_way = sending, memory
            if way == "group":  # `stream` may have collectives of its own, which are not to run beside this one
                self._settled(sending)
            memory = free.pop()
            packing = Packing(memory.flat)

        try:
            for name, tensor in stream:
                if packing.entries and not packing.fits(tensor):
                    post()
                if not packing.fits(tensor):
                    memory.close()
                    memory = memory_of(tensor.nbytes)
                    packing = Packing(memory.flat)
                packing.put(name, tensor)
            if packing.entries:
                post()
            if on_its_way is not None:
                self._settled(on_its_way[0])
        finally:
            if on_its_way is not None:
                free.append(on_its_way[1])
            for piece in (*free, memory):
                piece.close()

    def _way(self) -> Transport:
        """How buckets go to the servers, now that it is known which these are."""
        if self._transport not in ("auto", "group"):
            return self._transport
        otherwise: Transport = "shared" if all(link.local for link in self._links) else "body"
        if self._transport == "auto" and not self._has_gpus_apart():
            return otherwise
        if closed := [why for why in self._asked(link.meet() for link in self._links) if why]:
            say(
                "Weights cannot go to the rollout servers from GPU to GPU, which is fastest, as a port is not reached "
                f"({'; '.join(closed)}): they go through {'shared memory' if otherwise == 'shared' else 'HTTP'}, which "
                "takes several times as long. To fix it, let this machine reach all ports of the servers' machines."
            )
            self._transport = otherwise
            return otherwise
        return "group"

    def _has_gpus_apart(self) -> bool:
        """Whether this process and all servers have GPUs, and none of them the one that is here."""
        if not torch.cuda.is_available() or not all(link.nccl for link in self._links):
            return False
        own = gpu_name(runtime.device())
        return not any(own in link.gpus for link in self._links)

    def sleep(self) -> None:
        """A server that is not there, or does not know this run any more, is left for the next `update` to find."""

        expected = (WeightsLost, ServerLost) if self._wait_for_lost else (WeightsLost,)

        async def one(link: Link) -> None:
            with suppress(*expected):
                await link.call("/sleep", level=self._sleep_level)

        if self._sleep_level:
            self._run(all_of([one(link) for link in self._links]))

    def wake(self) -> None:
        if self._sleep_level:
            self._asked(link.call("/wake") for link in self._links)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """The first server's; raises RuntimeError where another has other weights."""
        first, *others = self._asked(link.call("/checksums", names=list(names)) for link in self._links)
        for link, found in zip(self._links[1:], others, strict=True):
            for name in first.keys() & found.keys():
                if first[name] != found[name]:
                    raise RuntimeError(f"{name} is not the same in the servers {self._links[0].url} and {link.url}")
        return first

    def release(self) -> None:
        """Free the servers for other runs, in seconds. They need not be there any more."""
        forget(self.release)
        if self._beat is not None:
            self._beat.cancel()
        self._run(all_of([link.release() for link in self._links]))

    def close(self) -> None:
        """Let go of the servers."""
        self.release()
        self._run(all_of([link.close() for link in self._links]))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- between this thread and the one that talks to servers

    def _start(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine) -> Any:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise

    def _asked(self, calls: Iterable[Coroutine]) -> list[Any]:
        """The answers of all servers, in their order. One that is lost is waited for, then WeightsLost is raised."""
        return self._settled(self._start(all_of(list(calls))))

    def _settled(self, future: Future) -> Any:
        try:
            return future.result()
        except ServerLost as lost:
            if not self._wait_for_lost:
                raise
            say(str(lost))
            self._run(all_of([link.connect(self._wait_for_lost, lost) for link in self._links]))
            say("All rollout servers are there: the run goes on.")
            raise WeightsLost(f"{lost} It is there again, without the weights of this run.") from lost
        except BaseException:
            future.cancel()
            raise

    async def _keep(self) -> None:
        """Tell the servers that this run is still there, however long its training step takes."""
        while True:
            await asyncio.sleep(min(link.silence for link in self._links) / 4)
            await asyncio.gather(*(link.claim() for link in self._links), return_exceptions=True)


def _spread(count: int, servers: int) -> list[slice]:
    """Neighbours, who often share their prompt, go to the same server."""
    bounds = [count * server // servers for server in range(servers + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
