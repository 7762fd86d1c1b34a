"""One rollout server, as the client's thread talks to it: claims, calls that are looked after, buckets on their way."""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import torch
from torch import Tensor

from .health import ANSWER, POLL, cure, say, silence
from .keys import VARIABLE, client_key
from .weight_buckets import Memory, Packing, table

CHUNK = 4 * 2**20  # bytes of a body that are handed over at a time
REACH = 5.0  # seconds within which a port that is open is reached
RELEASE = 5.0  # seconds that a run which ends has for its servers
Transport = Literal["auto", "body", "shared", "group"]


class ServerLost(ConnectionError):
    """A rollout server does not answer any more."""


class WeightsLost(RuntimeError):
    """A server was started again and has not the run's weights: `update`, then go on."""


class Claimed(PermissionError):
    """Another run has the server."""


class DeviceMemory:
    """Memory of this process's GPU, or of its CPU."""

    def __init__(self, count: int):
        self.flat = torch.empty(count, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")

    def close(self) -> None:
        """Let go of it, if that is yet to be done."""
        vars(self).pop("flat", None)


class Link:
    """A server. Everything here runs in one event loop. `wait`: seconds for which its user waits where it is lost;
    `given`: the flags that its address is from."""

    def __init__(
        self,
        url: str,
        run: str,
        api_key: str | None,
        adapters: int = 0,
        vocab_size: int | None = None,
        wait: float = 0.0,
        given: str = "address",
    ):
        self.url, self.local, self.nccl, self.silence = url, False, False, 120.0  # the server says
        self.gpus: list[str] = []  # that the server generates on
        self._store: tuple[str, int, int] | None = None  # where `meet` found the group's, and the group's size
        self._group: Any = None  # group.Group, once weights went that way
        self._run_token, self._adapters, self._vocab_size, self._wait = run, adapters, vocab_size, wait
        self._given, self._api_key = given, api_key
        limits = httpx.Limits(keepalive_expiry=30)  # sooner than the server lets go of an idle connection
        timeout = httpx.Timeout(None, connect=ANSWER)
        self._http = httpx.AsyncClient(
            base_url=url, headers={"x-run": run}, timeout=timeout, limits=limits, trust_env=False
        )

    async def connect(self, patience: float, lost: ServerLost | None = None) -> None:
        """Wait for the server, and for another run to let go of it, then claim it. After `patience` seconds raises
        ServerLost (`lost`, where given), or Claimed."""
        end, told = time.monotonic() + patience, {Claimed: not patience, ServerLost: not patience or lost is not None}
        while True:
            reason, held = "", None
            try:
                if not (reason := await silence(self._http)):
                    return await self.claim()
            except ServerLost as error:
                reason = str(error)
            except Claimed as error:
                held = error
                if not told[Claimed]:
                    say(f"{error} It is waited for, for up to {patience:.0f} s.")
                    told[Claimed] = True
            if reason and not told[ServerLost]:
                say(f"No server answers at {self.url} yet ({reason}). It is waited for, for up to {patience:.0f} s.")
                told[ServerLost] = True
            if time.monotonic() > end:
                if held is not None:
                    raise Claimed(
                        f"{held} It was waited for, for {patience:.0f} s: wait longer with "
                        f"{'--vllm_server_timeout' if lost is None else '--server_reconnect_timeout'}."
                    )
                if lost is not None:
                    raise ServerLost(f"{lost} It was waited for {patience:.0f} s.")
                raise ServerLost(
                    f"No rollout server answers at {self.url} ({reason}), after {patience:.0f} s. Start one there "
                    f"(swift rollout --model ... --port ...), give the right {self._given}, or wait longer for it "
                    "with --vllm_server_timeout."
                )
            await asyncio.sleep(0.5)

    async def claim(self) -> None:
        """Claim the server, or say that this run is still there. Raises Claimed where another run has it."""
        if key := client_key(self._api_key, self.url, own=True):  # read now: a server that has just started made it
            self._http.headers["authorization"] = f"Bearer {key}"
        memory = Memory(16)
        try:
            secret = secrets.token_bytes(16)
            memory.write(0, secret)
            body = {
                "run": self._run_token,
                "adapters": self._adapters,
                "vocab_size": self._vocab_size,
                "who": f"process {os.getpid()} on {socket.gethostname()}",
                "probe": memory.place._asdict() | {"secret": secret.hex()},
            }
            answer = await self._answer("/claim", json=body, timeout=ANSWER)
        finally:
            memory.close()
        self.local, self.nccl, self.silence = answer["local"], answer["nccl"], answer["silence"]
        self.gpus = answer["gpus"]
        if answer["new"]:
            self._group = None

    async def release(self) -> None:
        """Free the server for other runs, in seconds."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):  # it may be gone
            async with asyncio.timeout(RELEASE):
                await self._http.post("/release", json={})

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, memory: "Memory | DeviceMemory", packing: Packing, way: Transport) -> None:
        """Send a bucket; returns once the server has taken it."""
        if isinstance(memory, DeviceMemory):
            await self._broadcast(packing)
            return
        if way == "shared":
            await self.call("/weights/bucket", entries=packing.entries, place=memory.place, bytes=packing.used)
            return
        head = table(packing.entries)
        headers = {"content-type": "application/octet-stream", "content-length": str(len(head) + packing.used)}
        await self._watched("/weights/bucket", content=_body(head, packing), headers=headers)

    async def meet(self) -> str | None:
        """Have the server open the store by which GPUs find each other. Why it cannot be reached from here, if so: a
        tunnel, a firewall or a container's map of ports may let the server's own port through alone."""
        if self._group is not None:
            return None
        answer = await self.call("/weights/group")
        host, port = httpx.URL(self.url).host, answer["port"]
        try:
            async with asyncio.timeout(REACH):
                writer = (await asyncio.open_connection(host, port))[1]
        except OSError as error:
            return f"{host}:{port}, {error or f'no answer within {REACH:.0f} s'}"
        writer.close()
        self._store = host, port, answer["size"]
        return None

    async def _broadcast(self, packing: Packing) -> None:
        flat = packing.flat[: packing.used]
        taken = asyncio.ensure_future(
            self.call("/weights/bucket", entries=packing.entries, place=None, bytes=packing.used)
        )
        sent = asyncio.ensure_future(self._give(flat))
        try:
            await asyncio.gather(taken, sent)
        except BaseException:
            taken.cancel()
            sent.cancel()
            if self._group is not None:
                self._group.abort()  # else `sent` would wait for GPUs that are gone
            self._group = None
            raise

    async def _give(self, flat: Tensor) -> None:
        """To the server's GPUs, which join the group with the first bucket."""
        loop = asyncio.get_running_loop()
        if self._group is None:
            from .process_group import Group

            assert self._store is not None
            host, port, size = self._store
            self._group = await loop.run_in_executor(None, Group, host, port, 0, size, flat.device)
        await loop.run_in_executor(None, self._group.broadcast, flat)

    async def call(self, path: str, **body: Any) -> Any:
        """What the server answers to a JSON body."""
        return await self._watched(path, json=body)

    async def _watched(self, path: str, **content: Any) -> Any:
        """POST, and look after the server as long as it has not answered."""
        work = asyncio.ensure_future(self._answer(path, **content))
        try:
            while not (await asyncio.wait({work}, timeout=POLL))[0]:
                if reason := await silence(self._http):
                    raise self._lost(path, reason)
            return await work
        finally:
            work.cancel()

    async def _answer(self, path: str, **content: Any) -> Any:
        try:
            try:
                response = await self._http.post(path, **content)
            except httpx.TransportError:
                if "json" not in content or await silence(self._http):
                    raise
                # It is there: the connection was one that an earlier server, or an idle one, had closed.
                response = await self._http.post(path, **content)
        except httpx.TransportError as error:
            raise self._lost(path, str(error) or type(error).__name__) from error
        if response.is_success:
            return response.json()
        raise self._error(path, response)

    def _lost(self, path: str, reason: str) -> ServerLost:
        return ServerLost(f"The rollout server {self.url} is gone: {reason}, during {path}. {cure(self._wait)}")

    def _error(self, path: str, response: httpx.Response) -> Exception:
        """The exception for an answer that is an error."""
        try:
            kind, text = response.json()["kind"], response.json()["error"]
        except (ValueError, KeyError, TypeError):
            kind, text = "unknown", response.text[:500]
        where = f"Rollout server {self.url}"
        if kind == "request":
            return ValueError(f"{where}, {path}: {text}")
        if kind in ("weights", "unclaimed"):  # it does not know this run: it was started again
            return WeightsLost(f"{where}: {text}")
        if kind == "key":
            return PermissionError(f"{where}: {text}. Set --vllm_server_api_key or {VARIABLE}.")
        if kind == "claimed":
            return Claimed(f"{where}: {text}")
        return RuntimeError(f"{where}, {path}: {text} (status {response.status_code})")


async def _body(head: bytes, packing: Packing) -> AsyncIterator[bytes]:
    yield head
    view = memoryview(packing.flat.numpy())
    for start in range(0, packing.used, CHUNK):
        yield bytes(view[start : min(start + CHUNK, packing.used)])
