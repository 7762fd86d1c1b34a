"""Rollout servers that go from run to run, and what breaks on the way: the next run or update finds them in order."""

import asyncio
import os
import socket
import time
from pathlib import Path

import httpx
import pytest
import torch
from megaswift.tasks.rollout import client as clients
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.in_process import InProcessBackend
from megaswift.tasks.rollout.process_group import WeightGroup
from megaswift.tasks.rollout.server import Server
from megaswift.tasks.rollout.server_connection import (
    ClientSettings,
    ServerClaimed,
    ServerConnection,
    ServerLost,
    WeightsLost,
)
from megaswift.tasks.rollout.weight_buckets import Bucket, SharedMemory

from tests.prepared import free_port
from tests.tasks.rollout.served import serving, tensors
from tests.tasks.rollout.test_server import SAMPLING, connected

ONE = [("scale", torch.tensor(3.0))]  # by which a token has a log-probability of -1


class Joined(InProcessBackend):
    """Takes buckets by a group of its own with the trainer: of CPUs, by gloo."""

    joined: WeightGroup | None = None

    async def group(self, host: str, port: int) -> None:
        self.joined = await self._apart(WeightGroup, host, port, 1, 2, torch.device("cpu"))

    async def load(self, bucket: Bucket) -> None:
        if bucket.handle is not None:
            return await super().load(bucket)
        if bucket.entries[0].name == "broken":
            raise OSError("a worker broke")
        assert self.joined is not None
        memory = SharedMemory(bucket.bytes)
        await self._apart(self.joined.broadcast, memory.flat)
        await super().load(Bucket(bucket.entries, memory.handle))
        memory.close()

    async def _apart(self, call, *arguments):
        import asyncio

        return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


def drawn(client: ServerEngine) -> list[float]:
    return client.generate([Request([1], 0)], SAMPLING)[0].log_probs


def listening(port: int) -> list[str]:
    """The addresses at which something listens on a port, as the kernel writes them."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    return [line[1].split(":")[0] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


def test_weights_go_from_group_to_group() -> None:
    """And nobody but who comes to the server's own address finds the group's store."""
    sent = tensors()
    with serving(backend=Joined) as (url, engine, server), connected(url, transport="group") as client:
        client.update(sent.items())
        assert engine.weights.keys() == sent.keys()
        for name, tensor in sent.items():
            assert engine.weights[name].view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name
        assert listening(server._store.port) == ["0100007F"]  # 127.0.0.1
        client.update(ONE)
        assert drawn(client) == [-1.0]


class Patient(Joined):
    """Loads the first bucket only once it has received the second."""

    count, has_two = 0, asyncio.Event()

    async def load(self, bucket: Bucket) -> None:
        assert self.joined is not None
        memory = SharedMemory(bucket.bytes)
        await self._apart(self.joined.broadcast, memory.flat)
        self.count += 1
        if self.count == 1:
            await asyncio.wait_for(self.has_two.wait(), 60)
        self.has_two.set()
        await InProcessBackend.load(self, Bucket(bucket.entries, memory.handle))
        memory.close()


def test_a_bucket_is_loaded_while_the_next_one_travels() -> None:
    sent = {str(number): torch.full((900,), float(number)) for number in range(5)}
    with (
        serving(backend=Patient) as (url, engine, _),
        connected(url, transport="group", bucket_bytes=4096) as client,
    ):
        client.update(sent.items())
        assert engine.weights.keys() == sent.keys()
        assert all(torch.equal(engine.weights[name].view(-1), tensor) for name, tensor in sent.items())


def test_an_error_while_weights_go_from_group_to_group() -> None:
    """Is told as it is, and the next update is whole."""
    with serving(backend=Joined) as (url, _, _), connected(url, transport="group") as client:
        with pytest.raises(RuntimeError, match="OSError: a worker broke"):
            client.update([("broken", torch.ones(3))])
        client.update(ONE)
        assert drawn(client) == [-1.0]


@pytest.mark.parametrize(
    ("transport", "wait", "kind"),
    [("group", 0.0, ServerLost), ("group", 5.0, WeightsLost), ("shared", 5.0, WeightsLost)],
)
def test_lost_while_weights_travel(transport, wait, kind, monkeypatch, capfd) -> None:
    async def send(*_):
        raise ServerLost("The rollout server is gone.")

    with serving(backend=Joined) as (url, _, _), connected(url, transport=transport, reconnect_timeout=wait) as client:
        with monkeypatch.context() as patch:
            patch.setattr(ServerConnection, "send", send)
            with pytest.raises(kind, match="is gone"):
                client.update(tensors().items())
        client.update(ONE)
        assert drawn(client) == [-1.0]
    lines = ["The rollout server is gone.", "All rollout servers answer again: the run continues."]
    assert capfd.readouterr().err.splitlines() == (lines if wait else [])


def test_no_memory_for_a_large_tensor(monkeypatch) -> None:
    def scarce(count: int) -> SharedMemory:
        if count > 4096:
            raise OSError("no memory")
        return SharedMemory(count)

    monkeypatch.setattr(clients, "SharedMemory", scarce)
    with serving() as (url, _, _), connected(url) as client, pytest.raises(OSError, match="no memory"):
        client.update([("large", torch.zeros(5000))])


def test_a_port_that_is_not_reached(monkeypatch, capfd) -> None:
    """Weights go another way then, and the run says so, once."""
    closed = free_port()

    async def group(self):
        return {"port": closed, "size": 2}

    monkeypatch.setattr(Server, "group", group)
    with serving(backend=Joined) as (url, _, _), connected(url, transport="group") as client:
        for _ in range(2):
            client.update(ONE)
        assert drawn(client) == [-1.0]
    said = capfd.readouterr().err
    assert said.count(f"127.0.0.1:{closed}, [Errno 111]") == 1
    assert "They go by shared memory, which takes several times as long" in said


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_after_one_that_ended_asleep(level: int) -> None:
    with serving() as (url, engine, _):
        with connected(url, sleep_level=1) as first:
            first.update(ONE)
            first.sleep()
        assert not engine.awake
        with connected(url, sleep_level=level) as second:
            second.update(ONE)
            assert engine.awake
            assert drawn(second) == [-1.0]


def test_started_again_while_the_model_trains() -> None:
    """The next update notices it, asleep or about to sleep, and wakes it."""
    port = free_port()
    with serving(port) as (url, _, _):
        client = ServerEngine(
            [url], ClientSettings(timeout=10.0, bucket_bytes=4096, sleep_level=1, reconnect_timeout=10.0)
        )
        client.update(ONE)
        client.sleep()
    client.sleep()  # it is not there
    with serving(port) as (_, engine, _):
        client.sleep()  # it does not know the run
        engine.awake = False
        client.update(ONE)
        assert drawn(client) == [-1.0]
        client.close()


def test_a_run_that_cannot_have_all_servers_frees_the_others() -> None:
    with serving() as (url, _, _):
        with pytest.raises(ServerLost, match="No rollout server answers"):
            ServerEngine([url, f"http://127.0.0.1:{free_port()}"], ClientSettings(timeout=0.6))
        assert httpx.get(f"{url}/health").json()["run"] is None


def test_another_runs_weights_are_not_drawn_from() -> None:
    """Though both runs have sent theirs once."""
    with serving(silence=0.4) as (url, _, _), connected(url) as first:
        first.update(ONE)
        assert first._beat is not None
        first._beat.cancel()  # it is cut off
        time.sleep(0.6)
        with connected(url) as second:
            second.update([("scale", torch.tensor(30.0))])
            assert drawn(second) == [-10.0]
            with pytest.raises(WeightsLost, match=r"this server has version 1 of \w+ of the weights, not 1 of"):
                drawn(first)
            with pytest.raises(ServerClaimed, match="another run has claimed this server"):
                first.update(ONE)


def test_uploads_that_break_leave_nothing_behind() -> None:
    def files() -> int:
        return sum(
            "memfd:megaswift-weights" in os.path.realpath(f"/proc/self/fd/{file}")
            for file in os.listdir("/proc/self/fd")
        )

    with serving() as (url, _, _), connected(url) as client:
        client._call_all([client._servers[0].call("/weights/begin")])
        before = files()
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as sock:
                lines = [
                    "POST /weights/bucket HTTP/1.1",
                    "host: x",
                    f"x-run: {client._servers[0]._run_token}",
                    "content-type: application/octet-stream",
                    "content-length: 1000000",
                ]
                sock.sendall("\r\n".join([*lines, "", ""]).encode() + b"x" * 70_000)
                time.sleep(0.1)
        end = time.monotonic() + 60
        while files() > before and time.monotonic() < end:
            time.sleep(0.05)
        assert files() == before
        client.update(ONE)


def test_an_update_that_waits_when_its_run_ends() -> None:
    """Never begins: it would wait for weights that nobody sends, and the next run's with it."""
    with serving() as (url, _, server):
        server._generating += 1  # a stranger's, that takes long
        with connected(url) as first:
            begun = first._start(first._servers[0].call("/weights/begin"))
            while not server._updating:
                time.sleep(0.01)
            first.release()
            with pytest.raises(RuntimeError, match="aborted before it began"):
                begun.result(60)
        server._generating -= 1
        with connected(url) as second:
            second.update(ONE)
            assert drawn(second) == [-1.0]


def test_an_engine_that_cannot_break_off() -> None:
    """The first error is reported, and the server keeps running."""
    with serving(silence=0.8) as (url, _, server), connected(url) as client:
        abort = server.backend.abort

        async def broken() -> None:
            await abort()
            raise RuntimeError("a worker does not break off")

        server.backend.abort = broken
        with pytest.raises(RuntimeError, match="the model has no weight refused"):
            client.update([("refused", torch.ones(1))])
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        client._call_all([client._servers[0].call("/weights/begin")])
        client.release()
        silent = {"run": "silent", "who": "a run that was killed"}
        httpx.post(f"{url}/claim", json=silent)
        httpx.post(f"{url}/weights/begin", headers={"x-run": "silent"}, json={})
        end = time.monotonic() + 60  # the watch goes on too
        while httpx.get(f"{url}/health").json()["run"] and time.monotonic() < end:
            time.sleep(0.1)
        client.update(ONE)
        assert drawn(client) == [-1.0]
