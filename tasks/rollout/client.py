"""The trainer's side of rollout servers: an `Engine` whose completions come over HTTP, used by one rank of a run.

Requests are spread over the servers, weights go to all of them. Buckets of weights go the fastest way that there is:
by NCCL from this GPU to vLLM's, by shared memory to a server on this host, else in the request's body; while one is on
its way the next is filled. Whatever is waited for, the server is asked now and then whether it is still there.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Literal

import httpx
from torch import Tensor

from .engine import Completion, Request, Sampling
from .options import EngineOptions
from .wire import BUCKET_BYTES, Memory, Packing, table

POLL = 2.0  # seconds between two looks at a server that is waited for
ANSWER = 10.0  # seconds within which a server that is there answers /health
CHUNK = 4 * 2**20  # bytes of a body that are handed over at a time
Transport = Literal["auto", "body", "shared", "nccl"]


class ServerLost(ConnectionError):
    """A rollout server does not answer any more."""


class WeightsLost(RuntimeError):
    """A server was started again and has not the run's weights: `update`, then go on."""


def server_urls(options: EngineOptions) -> list[str]:
    """The addresses of the servers. Raises ValueError, naming the flag, where hosts and ports do not fit together."""
    if options.vllm_server_base_url:
        for url in options.vllm_server_base_url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--vllm_server_base_url {url}: an address begins with http:// or https://.")
        return [url.rstrip("/") for url in options.vllm_server_base_url]
    hosts, ports = options.vllm_server_host or ["127.0.0.1"], options.vllm_server_port
    count = max(len(hosts), len(ports))
    if len(hosts) not in (1, count) or len(ports) not in (1, count):
        raise ValueError(
            f"--vllm_server_host has {len(hosts)} hosts and --vllm_server_port {len(ports)} ports: give a port for "
            "each host, or one of either."
        )
    return [f"http://{hosts[i % len(hosts)]}:{ports[i % len(ports)]}" for i in range(count)]


class ServerEngine:
    """An `Engine` over one or several rollout servers.

    Arguments:
        urls: where they are, as `server_urls` gives them
        timeout: seconds to wait for them at first
        wait: seconds to wait for one that is lost later; it comes back without the run's weights, so that
            `WeightsLost` is raised then, and ServerLost where it does not come back
        transport: how buckets go; auto: the fastest that works
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout: float = 240.0,
        wait: float = 0.0,
        transport: Transport = "auto",
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout client", daemon=True)
        self._thread.start()
        self._version: int | None = None  # of the weights that the servers have of us
        self._wait_for_lost, self._bucket_bytes, self._transport = wait, bucket_bytes, transport
        run = secrets.token_hex(16)
        self._links = [Link(url, run, api_key) for url in urls]
        self._run(_all(link.connect(timeout) for link in self._links))
        self._beat = asyncio.run_coroutine_threadsafe(self._keep(), self._loop)

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
        return [Completion(**item) for answer in answers for item in answer["completions"]]

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send a new version of the weights to all servers.

        `weights` is read to its end whatever happens: other ranks may be giving their parts of it.
        """
        stream = iter(weights)
        version = (self._version or 0) + 1
        try:
            self._asked(link.claim() for link in self._links)  # of one that was started again
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
        way: Transport = self._transport
        if way == "auto":
            way = "shared" if all(link.local for link in self._links) else "body"
        free = [Memory(self._bucket_bytes), Memory(self._bucket_bytes)]
        on_its_way: tuple[Future, Memory] | None = None
        memory = free.pop()
        packing = Packing(memory.flat)

        def post() -> None:
            """Send what is in the bucket, once the one before it has arrived."""
            nonlocal on_its_way, memory, packing
            if on_its_way is not None:
                self._settled(on_its_way[0])
                free.append(on_its_way[1])
            sending = self._start(_all([link.send(memory, packing, way) for link in self._links]))
            on_its_way = sending, memory
            memory = free.pop()
            packing = Packing(memory.flat)

        try:
            for name, tensor in stream:
                if packing.entries and not packing.fits(tensor):
                    post()
                if not packing.fits(tensor):
                    memory.close()
                    memory = Memory(tensor.nbytes)
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

    def sleep(self, level: int = 1) -> None:
        """Free the servers' caches, and their weights by level, until `wake`."""
        self._asked(link.call("/sleep", level=level) for link in self._links)

    def wake(self) -> None:
        self._asked(link.call("/wake") for link in self._links)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """The first server's; raises RuntimeError where another has other weights."""
        first, *others = self._asked(link.call("/checksums", names=list(names)) for link in self._links)
        for link, found in zip(self._links[1:], others, strict=True):
            for name in first.keys() & found.keys():
                if first[name] != found[name]:
                    raise RuntimeError(f"{name} is not the same in the servers {self._links[0].url} and {link.url}")
        return first

    def close(self) -> None:
        """Let go of the servers. They need not be there any more."""
        self._beat.cancel()
        self._run(_all([link.release() for link in self._links]))
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
        return self._settled(self._start(_all(list(calls))))

    def _settled(self, future: Future) -> Any:
        try:
            return future.result()
        except ServerLost as lost:
            if not self._wait_for_lost:
                raise
            self._run(_all([link.connect(self._wait_for_lost, lost) for link in self._links]))
            raise WeightsLost(f"{lost} It is there again, without the weights of this run.") from lost
        except BaseException:
            future.cancel()
            raise

    async def _keep(self) -> None:
        """Tell the servers that this run is still there, however long its training step takes."""
        while True:
            await asyncio.sleep(min(link.silence for link in self._links) / 4)
            await asyncio.gather(*(link.claim() for link in self._links), return_exceptions=True)


class Link:
    """One server, as the thread of `ServerEngine` talks to it."""

    def __init__(self, url: str, run: str, api_key: str | None):
        self.url, self.local, self.silence = url, False, 120.0
        self._run_token = run
        headers = {"x-run": run} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        limits = httpx.Limits(keepalive_expiry=30)  # sooner than the server lets go of an idle connection
        timeout = httpx.Timeout(None, connect=ANSWER)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)

    async def connect(self, patience: float, lost: ServerLost | None = None) -> None:
        """Wait for the server, then claim it. Raises ServerLost (`lost`, where given) after `patience` seconds."""
        end = time.monotonic() + patience
        while True:
            try:
                if not (reason := await self._silent()):
                    return await self.claim()
            except ServerLost as error:
                reason = str(error)
            if time.monotonic() > end:
                if lost is not None:
                    raise ServerLost(f"{lost} It was waited for {patience:.0f} s.")
                raise ServerLost(
                    f"No rollout server answers at {self.url} ({reason}), after {patience:.0f} s. Start one there "
                    "(swift rollout --model ... --port ...), give the right --vllm_server_host and --vllm_server_port, "
                    "or wait longer for it with --vllm_server_timeout."
                )
            await asyncio.sleep(0.5)

    async def claim(self) -> None:
        """Claim the server, or say that this run is still there. Raises PermissionError where another run has it."""
        memory = Memory(16)
        try:
            secret = secrets.token_bytes(16)
            memory.write(0, secret)
            body = {
                "run": self._run_token,
                "who": f"process {os.getpid()} on {socket.gethostname()}",
                "probe": memory.place._asdict() | {"secret": secret.hex()},
            }
            answer = await self._answer("/claim", json=body, timeout=ANSWER)
        finally:
            memory.close()
        self.local, self.silence = answer["local"], answer["silence"]

    async def release(self) -> None:
        with contextlib.suppress(httpx.HTTPError):  # it may be gone
            await self._http.post("/release", timeout=ANSWER)
        await self._http.aclose()

    async def send(self, memory: Memory, packing: Packing, way: Transport) -> None:
        """Send a bucket; returns once the server has taken it."""
        if way == "shared":
            await self.call("/weights/bucket", entries=packing.entries, place=memory.place, bytes=packing.used)
            return
        head = table(packing.entries)
        headers = {"content-type": "application/octet-stream", "content-length": str(len(head) + packing.used)}
        await self._watched("/weights/bucket", content=_body(head, packing), headers=headers)

    async def call(self, path: str, **body: Any) -> Any:
        """What the server answers to a JSON body."""
        return await self._watched(path, json=body)

    async def _watched(self, path: str, **content: Any) -> Any:
        """POST, and look after the server as long as it has not answered."""
        work = asyncio.ensure_future(self._answer(path, **content))
        try:
            while not (await asyncio.wait({work}, timeout=POLL))[0]:
                if reason := await self._silent():
                    raise self._lost(path, reason)
            return await work
        finally:
            work.cancel()

    async def _answer(self, path: str, **content: Any) -> Any:
        try:
            try:
                response = await self._http.post(path, **content)
            except httpx.TransportError:
                if "json" not in content or await self._silent():
                    raise
                # It is there: the connection was one that an earlier server, or an idle one, had closed.
                response = await self._http.post(path, **content)
        except httpx.TransportError as error:
            raise self._lost(path, str(error) or type(error).__name__) from error
        if response.is_success:
            return response.json()
        raise self._error(path, response)

    async def _silent(self) -> str | None:
        """Why the server is taken to be gone; None where it answers."""
        for last in (False, True):
            try:
                response = await self._http.get("/health", timeout=ANSWER)
                return None if response.is_success else f"/health gives {response.status_code}"
            except httpx.TimeoutException:
                if last:
                    return f"no answer within {ANSWER:.0f} s, twice"
            except httpx.TransportError as error:
                return str(error) or type(error).__name__
        return None

    def _lost(self, path: str, reason: str) -> ServerLost:
        return ServerLost(
            f"The rollout server {self.url} is gone: {reason}, during {path}. See what it printed, start it again and "
            "resume the run; with --wait_for_server SECONDS a run waits for it instead."
        )

    def _error(self, path: str, response: httpx.Response) -> Exception:
        """The exception for an answer that is an error."""
        try:
            kind, text = response.json()["kind"], response.json()["error"]
        except (ValueError, KeyError, TypeError):
            kind, text = "unknown", response.text[:500]
        where = f"Rollout server {self.url}"
        if kind == "request":
            return ValueError(f"{where}, {path}: {text}")
        if kind == "weights":
            return WeightsLost(f"{where}: {text}")
        if kind == "key":
            return PermissionError(f"{where}: {text}. Give it as --vllm_server_api_key.")
        if kind == "claimed":
            return PermissionError(f"{where}: {text}")
        return RuntimeError(f"{where}, {path}: {text} (status {response.status_code})")


async def _body(head: bytes, packing: Packing) -> AsyncIterator[bytes]:
    yield head
    view = memoryview(packing.flat.numpy())
    for start in range(0, packing.used, CHUNK):
        yield bytes(view[start : min(start + CHUNK, packing.used)])


async def _all(calls: Iterable[Coroutine]) -> list[Any]:
    """All answers in order; once one fails the others are left off, and its exception is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _spread(count: int, servers: int) -> list[slice]:
    """Neighbours, who often share their prompt, go to the same server."""
    bounds = [count * server // servers for server in range(servers + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
