"""Connection from the trainer to one rollout server: claims, supervised calls, weight buckets."""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import httpx
import torch
from torch import Tensor

from ...templates.json_types import JsonObject
from .health import ANSWER_TIMEOUT, notify, reconnect_hint, supervise, unreachable_reason
from .keys import VARIABLE, client_key
from .weight_buckets import BUCKET_BYTES, BucketWriter, SharedMemory, encode_table

if TYPE_CHECKING:
    from .process_group import WeightGroup

CHUNK = 4 * 2**20  # bytes of a request body per write
REACH_TIMEOUT = 5.0  # seconds to connect to a port of the server
RELEASE_TIMEOUT = 5.0  # seconds to release a server at the end of a run
Transport = Literal["auto", "body", "shared", "group"]


@dataclass(frozen=True)
class ClientSettings:
    """Settings of a run's connections to its rollout servers."""

    api_key: str | None = None
    timeout: float = 240.0  # seconds to wait for the servers at the start
    reconnect_timeout: float = 0.0  # seconds to wait for a server that is lost later
    sleep_level: int = 0  # memory that `sleep` frees: 0 none, 1 the cache, 2 also weights
    adapter_rank: int = 0  # rank of the adapters that `update` sends; 0: full weights
    vocab_size: int | None = None  # of the run's model; a server with another one is rejected
    images: int = 0  # most images of a prompt of the run; a server that takes fewer is rejected
    videos: int = 0  # likewise
    audios: int = 0  # likewise
    turns: tuple[str, ...] = ()  # the run's flags of multi-turn episodes; a server with others is rejected
    transport: Transport = "auto"  # of buckets; auto: the fastest that works
    bucket_bytes: int = BUCKET_BYTES
    address_flags: str = "address"  # names of the flags that set the addresses


class ServerLost(ConnectionError):
    """Raised when a rollout server no longer answers."""


class WeightsLost(RuntimeError):
    """Raised when a server was restarted without the run's weights: call `update`, then retry."""


class ServerClaimed(PermissionError):
    """Raised when another run has claimed the server."""


class DeviceBuffer:
    """Memory for a bucket on this process's GPU, or on the CPU without one."""

    def __init__(self, count: int):
        self.flat = torch.empty(count, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        vars(self).pop("flat", None)


class ServerConnection:
    """Connection to one server. All its methods run in one event loop."""

    def __init__(self, url: str, run_token: str, settings: ClientSettings):
        self.url, self.is_local, self.has_nccl, self.silence = url, False, False, 120.0  # `claim` sets the last three
        self.gpus: list[str] = []  # names of the server's GPUs
        self._store: tuple[str, int, int] | None = None  # of the weight group: host and port of its store, its size
        self._group: WeightGroup | None = None
        self._loading: list[asyncio.Future] = []  # answers about buckets that were broadcast
        self._run_token, self._settings = run_token, settings
        # Expiry before the server's own limit, so that the server closes no connection in use.
        limits = httpx.Limits(keepalive_expiry=30)
        timeout = httpx.Timeout(None, connect=ANSWER_TIMEOUT)
        self._http = httpx.AsyncClient(
            base_url=url, headers={"x-run": run_token}, timeout=timeout, limits=limits, trust_env=False
        )

    async def connect(self, timeout: float, loss: ServerLost | None = None) -> None:
        """Wait until the server answers and no other run has claimed it, then claim it.

        Raises ServerLost (with the text of `loss`, if set) or ServerClaimed after `timeout` seconds.
        """
        deadline, has_notified = (
            time.monotonic() + timeout,
            {ServerClaimed: not timeout, ServerLost: not timeout or loss is not None},
        )
        while True:
            reason, claim_error = "", None
            try:
                if not (reason := await unreachable_reason(self._http)):
                    return await self.claim()
            except ServerLost as error:
                reason = str(error)
            except ServerClaimed as error:
                claim_error = error
                if not has_notified[ServerClaimed]:
                    notify(f"{error} Waiting for it for up to {timeout:.0f} s.")
                    has_notified[ServerClaimed] = True
            if reason and not has_notified[ServerLost]:
                notify(f"No server answers at {self.url} yet ({reason}). Waiting for it for up to {timeout:.0f} s.")
                has_notified[ServerLost] = True
            if time.monotonic() > deadline:
                if claim_error is not None:
                    raise ServerClaimed(
                        f"{claim_error} It stayed so for {timeout:.0f} s. Wait longer with "
                        f"{'--vllm_server_timeout' if loss is None else '--server_reconnect_timeout'}."
                    )
                if loss is not None:
                    raise ServerLost(f"{loss} It did not come back within {timeout:.0f} s.")
                raise ServerLost(
                    f"No rollout server answers at {self.url} ({reason}) after {timeout:.0f} s. Start one there "
                    f"(swift rollout --model ... --port ...), fix {self._settings.address_flags}, or wait longer with "
                    "--vllm_server_timeout."
                )
            await asyncio.sleep(0.5)

    async def claim(self) -> None:
        """Claim the server, or renew the claim. Raises ServerClaimed where another run has claimed it."""
        # Read at each claim: a server that has just started may have created the key.
        if key := client_key(self._settings.api_key, self.url, is_rollout_server=True):
            self._http.headers["authorization"] = f"Bearer {key}"
        memory = SharedMemory(16)
        try:
            secret = secrets.token_bytes(16)
            memory.write(0, secret)
            body = {
                "run": self._run_token,
                "adapters": self._settings.adapter_rank,
                "vocab_size": self._settings.vocab_size,
                **({"images": self._settings.images} if self._settings.images else {}),
                **({"videos": self._settings.videos} if self._settings.videos else {}),
                **({"audios": self._settings.audios} if self._settings.audios else {}),
                **({"turns": list(self._settings.turns)} if self._settings.turns else {}),
                "who": f"process {os.getpid()} on {socket.gethostname()}",
                "probe": memory.handle._asdict() | {"secret": secret.hex()},
            }
            answer = await self._post("/claim", json=body, timeout=ANSWER_TIMEOUT)
        finally:
            memory.close()
        self.is_local, self.has_nccl, self.silence = answer["local"], answer["nccl"], answer["silence"]
        self.gpus = answer["gpus"]
        if answer["new"]:
            self._group = None

    async def release(self) -> None:
        """Release the server for other runs, within RELEASE_TIMEOUT."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):  # the server may be gone
            async with asyncio.timeout(RELEASE_TIMEOUT):
                await self._http.post("/release", json={})

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, memory: SharedMemory | DeviceBuffer, bucket: BucketWriter, transport: Transport) -> None:
        """Send a bucket. Returns once its memory may be overwritten; `loaded` waits for the server."""
        if isinstance(memory, DeviceBuffer):
            await self._broadcast(bucket)
            return
        if transport == "shared":
            await self.call("/weights/bucket", entries=bucket.entries, place=memory.handle, bytes=bucket.used)
            return
        table = encode_table(bucket.entries)
        headers = {"content-type": "application/octet-stream", "content-length": str(len(table) + bucket.used)}
        await self._supervise("/weights/bucket", content=_body_chunks(table, bucket), headers=headers)

    async def open_transfer_store(self) -> str | None:
        """Have the server open the store of the weight group. Return why it is unreachable, or None.

        A tunnel, a firewall or a container may expose only the server's own port.
        """
        if self._group is not None:
            return None
        answer = await self.call("/weights/group")
        host, port = httpx.URL(self.url).host, answer["port"]
        try:
            async with asyncio.timeout(REACH_TIMEOUT):
                writer = (await asyncio.open_connection(host, port))[1]
        except OSError as error:
            return f"{host}:{port}, {error or f'no answer within {REACH_TIMEOUT:.0f} s'}"
        writer.close()
        self._store = host, port, answer["size"]
        return None

    async def _broadcast(self, bucket: BucketWriter) -> None:
        """Broadcast a bucket. Returns once it has arrived: the server loads it while the next one is filled."""
        flat = bucket.flat[: bucket.used]
        self._loading.append(
            asyncio.ensure_future(self.call("/weights/bucket", entries=bucket.entries, place=None, bytes=bucket.used))
        )
        sent = asyncio.ensure_future(self._broadcast_flat(flat))
        try:
            while not sent.done():
                done, _ = await asyncio.wait({sent, *self._loading}, return_when=asyncio.FIRST_COMPLETED)
                for answer in done - {sent}:
                    self._loading.remove(answer)
                    answer.result()
            await sent
        except BaseException:
            sent.cancel()
            self.drop_loading()
            if self._group is not None:
                self._group.abort()  # otherwise `sent` would wait for unreachable GPUs
            self._group = None
            raise

    async def loaded(self) -> None:
        """Return once the server has loaded all buckets that it was sent."""
        answers, self._loading = self._loading, []
        await asyncio.gather(*answers)

    def drop_loading(self) -> None:
        """Do not wait for the server to load what it was sent."""
        while self._loading:
            self._loading.pop().cancel()

    async def _broadcast_flat(self, flat: Tensor) -> None:
        """Broadcast to the server's GPUs, which join the weight group with the first bucket."""
        loop = asyncio.get_running_loop()
        if (group := self._group) is None:
            from .process_group import WeightGroup

            assert self._store is not None
            host, port, size = self._store
            group = await loop.run_in_executor(None, WeightGroup, host, port, 0, size, flat.device)
            self._group = group
        await loop.run_in_executor(None, group.broadcast, flat)

    async def call(self, path: str, **body: object) -> JsonObject:
        """POST a JSON body and return the server's JSON response."""
        return await self._supervise(path, json=body)

    async def _supervise(self, path: str, **content: Any) -> JsonObject:
        """POST, and check the server's health until it responds."""
        return await supervise(self._http, self._post(path, **content), partial(self._lost_error, path))

    async def _post(self, path: str, **content: Any) -> JsonObject:
        try:
            try:
                response = await self._http.post(path, **content)
            except httpx.TransportError:
                if "json" not in content or await unreachable_reason(self._http):
                    raise
                # The server is up. Only the pooled connection was stale: from an earlier server, or closed as idle.
                response = await self._http.post(path, **content)
        except httpx.TransportError as error:
            raise self._lost_error(path, str(error) or type(error).__name__) from error
        if response.is_success:
            return response.json()
        raise self._response_error(path, response)

    def _lost_error(self, path: str, reason: str) -> ServerLost:
        hint = reconnect_hint(self._settings.reconnect_timeout)
        return ServerLost(f"The rollout server {self.url} is gone: {reason}, during {path}. {hint}")

    def _response_error(self, path: str, response: httpx.Response) -> Exception:
        """Return the exception for an error response."""
        try:
            kind, text = response.json()["kind"], response.json()["error"]
        except (ValueError, KeyError, TypeError):
            kind, text = "unknown", response.text[:500]
        server = f"Rollout server {self.url}"
        if kind == "request":
            return ValueError(f"{server}, {path}: {text}")
        if kind in ("weights", "unclaimed"):  # a restarted server does not know this run
            return WeightsLost(f"{server}: {text}")
        if kind == "key":
            return PermissionError(f"{server}: {text}. Set --vllm_server_api_key or {VARIABLE}.")
        if kind == "claimed":
            return ServerClaimed(f"{server}: {text}")
        return RuntimeError(f"{server}, {path}: {text} (status {response.status_code})")


async def _body_chunks(table: bytes, bucket: BucketWriter) -> AsyncIterator[bytes]:
    yield table
    view = memoryview(bucket.flat.numpy())
    for start in range(0, bucket.used, CHUNK):
        yield bytes(view[start : min(start + CHUNK, bucket.used)])
