"""Client of rollout servers: an `Engine` whose completions come over HTTP, used by one rank of a run.

Requests are divided among the servers; weights go to all of them, in buckets, by the fastest transport available: NCCL
from this GPU to vLLM's other GPUs, shared memory to a server on this host, or the request body. One bucket is filled
while the previous one is sent. The servers' health is checked during every call.
"""

import asyncio
import itertools
import secrets
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict

import torch
from torch import Tensor

from ...bridge import runtime
from ..run.interrupt import before_exit, forget
from .completion_json import from_json
from .engine import Completion, Request, Sampling
from .health import gather_all, notify
from .process_group import gpu_name
from .request_bodies import request_bodies
from .server_connection import ClientSettings, DeviceBuffer, ServerConnection, ServerLost, Transport, WeightsLost
from .weight_buckets import BucketWriter, SharedMemory

DEFAULTS = ClientSettings()


class ServerEngine:
    """`Engine` over one or several rollout servers.

    urls: addresses, as `server_urls` returns them. A lost server returns without weights, so that WeightsLost is
    raised, or ServerLost where it does not return within `settings.reconnect_timeout`.
    """

    def __init__(self, urls: Sequence[str], settings: ClientSettings = DEFAULTS):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout client", daemon=True)
        self._thread.start()
        self._version: str | None = None  # of the run's weights on the servers
        self._updates = 0
        self._settings = settings
        self._transport: Transport = settings.transport
        run_token = secrets.token_hex(16)  # authenticates this run: secret
        self._name = secrets.token_hex(4)  # public; distinguishes this run's versions from other runs'
        self._servers = [ServerConnection(url, run_token, settings) for url in urls]
        self._beat: Future | None = None
        before_exit(self.release)  # registered first: it frees those already claimed if another cannot be reached
        try:
            self._wait(gather_all([server.connect(settings.timeout) for server in self._servers]))
        except BaseException:
            self.close()  # frees those already claimed
            raise
        self._beat = self._start(self._renew_claims())

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return completions in the order of the requests.

        Raises ServerLost, WeightsLost, ValueError for requests that a server rejects, RuntimeError for its failures.
        """
        slices = _divide(len(requests), len(self._servers))
        answers = self._call_all(
            server.call("/generate", **body, sampling=asdict(sampling), version=self._version)
            for server, part in zip(self._servers, slices, strict=True)
            for body in request_bodies(requests[part])
        )
        return [from_json(item) for answer in answers for item in answer["completions"]]

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send a new version of the weights to all servers.

        Reads `weights` to its end even after an error, since other ranks take part in producing them.
        """
        stream = iter(weights)
        self._updates += 1
        version = f"{self._updates} of {self._name}"
        try:
            self._call_all(server.claim() for server in self._servers)  # a restarted server does not know this run
            self._call_all(server.call("/wake") for server in self._servers)  # an earlier run may have left it asleep
            self._call_all(server.call("/weights/begin") for server in self._servers)
            self._send(stream)
            self._call_all(server.call("/weights/finish", version=version) for server in self._servers)
        except Exception:
            for _ in stream:
                pass
            raise
        self._version = version

    def _send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Fill one bucket while the previous one is sent."""
        transport = self._choose_transport()
        allocate = DeviceBuffer if transport == "group" else SharedMemory
        free = [allocate(self._settings.bucket_bytes), allocate(self._settings.bucket_bytes)]
        in_flight: tuple[Future, SharedMemory | DeviceBuffer] | None = None
        memory = free.pop()
        bucket = BucketWriter(memory.flat)

        def post() -> None:
            """Send what is in the bucket, once the one before it has arrived."""
            nonlocal in_flight, memory, bucket
            if in_flight is not None:
                self._result(in_flight[0])
                free.append(in_flight[1])
            sending = self._start(gather_all([server.send(memory, bucket, transport) for server in self._servers]))
            in_flight = sending, memory
            if transport == "group":  # collectives of `stream` must not run beside this one
                self._result(sending)
            memory = free.pop()
            bucket = BucketWriter(memory.flat)

        try:
            for name, tensor in stream:
                if bucket.entries and not bucket.fits(tensor):
                    post()
                if not bucket.fits(tensor):
                    memory.close()
                    memory = allocate(tensor.nbytes)
                    bucket = BucketWriter(memory.flat)
                bucket.put(name, tensor)
            if bucket.entries:
                post()
            if in_flight is not None:
                self._result(in_flight[0])
            self._call_all(server.loaded() for server in self._servers)
        finally:
            self._loop.call_soon_threadsafe(self._drop_loading)
            if in_flight is not None:
                free.append(in_flight[1])
            for buffer in (*free, memory):
                buffer.close()

    def _drop_loading(self) -> None:
        for server in self._servers:
            server.drop_loading()

    def _choose_transport(self) -> Transport:
        """Return the transport of buckets to the servers that are connected now."""
        if self._transport not in ("auto", "group"):
            return self._transport
        fallback: Transport = "shared" if all(server.is_local for server in self._servers) else "body"
        if self._transport == "auto" and not self._has_gpus_apart():
            return fallback
        if problems := list(filter(None, self._call_all(server.open_transfer_store() for server in self._servers))):
            notify(
                "Weights cannot be sent to the rollout servers from GPU to GPU, since a port cannot be reached "
                f"({'; '.join(problems)}). They go by {'shared memory' if fallback == 'shared' else 'HTTP'}, which "
                "takes several times as long. Open all ports of the servers' machines to this machine."
            )
            self._transport = fallback
            return fallback
        return "group"

    def _has_gpus_apart(self) -> bool:
        """Return whether this process and all servers have GPUs, and none of theirs is this one."""
        if not torch.cuda.is_available() or not all(server.has_nccl for server in self._servers):
            return False
        local_gpu = gpu_name(runtime.device())
        return not any(local_gpu in server.gpus for server in self._servers)

    def sleep(self) -> None:
        """Put the servers to sleep. A lost server is left for the next `update` to handle."""

        expected = (WeightsLost, ServerLost) if self._settings.reconnect_timeout else (WeightsLost,)

        async def put_to_sleep(server: ServerConnection) -> None:
            with suppress(*expected):
                await server.call("/sleep", level=self._settings.sleep_level)

        if self._settings.sleep_level:
            self._wait(gather_all([put_to_sleep(server) for server in self._servers]))

    def wake(self) -> None:
        if self._settings.sleep_level:
            self._call_all(server.call("/wake") for server in self._servers)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the first server's checksums. Raises RuntimeError where another server differs."""
        first, *others = self._call_all(server.call("/checksums", names=list(names)) for server in self._servers)
        for server, checksums in zip(self._servers[1:], others, strict=True):
            for name in first.keys() & checksums.keys():
                if first[name] != checksums[name]:
                    raise RuntimeError(f"{name} differs between the servers {self._servers[0].url} and {server.url}")
        return first

    def release(self) -> None:
        """Free the servers for other runs, in seconds, whether or not they still run."""
        forget(self.release)
        if self._beat is not None:
            self._beat.cancel()
        self._wait(gather_all([server.release() for server in self._servers]))

    def close(self) -> None:
        """Release the servers and stop the client thread."""
        self.release()
        self._wait(gather_all([server.close() for server in self._servers]))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- between this thread and the client thread

    def _start[T](self, work: Coroutine[object, object, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait[T](self, work: Coroutine[object, object, T]) -> T:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise

    def _call_all[T](self, calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
        """Return the results of calls to all servers, in order. After a loss, reconnects and raises WeightsLost."""
        return self._result(self._start(gather_all(list(calls))))

    def _result[T](self, future: "Future[T]") -> T:
        try:
            return future.result()
        except ServerLost as lost:
            if not self._settings.reconnect_timeout:
                raise
            notify(str(lost))
            self._wait(gather_all([server.connect(self._settings.reconnect_timeout, lost) for server in self._servers]))
            notify("All rollout servers answer again: the run continues.")
            raise WeightsLost(f"{lost} It is back, without the weights of this run.") from lost
        except BaseException:
            future.cancel()
            raise

    async def _renew_claims(self) -> None:
        """Renew the claims, however long a training step takes."""
        while True:
            await asyncio.sleep(min(server.silence for server in self._servers) / 4)
            await asyncio.gather(*(server.claim() for server in self._servers), return_exceptions=True)


def _divide(count: int, servers: int) -> list[slice]:
    """Return a slice of consecutive requests per server: neighbours often share their prompt."""
    bounds = [count * server // servers for server in range(servers + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
