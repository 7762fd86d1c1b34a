"""Rollout servers: what goes in comes out bit for bit, others are kept out, and one that dies is named in seconds."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.options.rollout import EngineOptions, RolloutOptions
from megaswift.tasks.rollout.addresses import server_urls
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.compatibility import turn_flags
from megaswift.tasks.rollout.engine import Completion, Request, Sampling
from megaswift.tasks.rollout.serve import bind, choose_backend
from megaswift.tasks.rollout.server_connection import ClientSettings, ServerClaimed, ServerLost, WeightsLost
from torch import Tensor

from tests import tiny
from tests.prepared import ROOT, free_port
from tests.tasks.rollout.served import serving, tensors

SAMPLING = Sampling(max_new_tokens=4, stop=("\n",))


@contextmanager
def connected(*urls: str, **settings):
    engine = ServerEngine(urls, ClientSettings(**{"timeout": 10.0, "bucket_bytes": 4096} | settings))
    try:
        yield engine
    finally:
        engine.close()


def test_completions_come_in_the_order_of_the_requests() -> None:
    requests = [Request([i, i + 1, i + 2], seed=i) for i in range(7)] + [Request([1, 2, 3], seed=1, max_new_tokens=2)]
    with serving() as (one, _, _), serving() as (other, _, _), connected(one, other) as client:
        found = client.generate(requests, SAMPLING)
    expected = [Completion(request.tokens[::-1], [-0.1 * request.seed] * 3, "stop") for request in requests[:7]]
    assert found == [*expected, Completion([3, 2], [-0.1] * 2, "stop")]  # log-probabilities to the last bit, too


def test_readiness_and_metrics() -> None:
    with serving() as (url, _, server), connected(url) as client:
        client.generate([Request([1, 2, 3], 0), Request([4, 5], 1)], SAMPLING)
        client.update(tensors().items())
        assert httpx.get(f"{url}/ready").status_code == 200
        rows = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
        counts = {name.removeprefix("megaswift_rollout_"): float(value) for name, value in rows}
        assert counts.pop("generation_seconds_total") > 0
        assert counts == {"requests_total": 2, "prompt_tokens_total": 5, "completion_tokens_total": 5,
                          "weight_updates_total": 1, "generating": 0, "ready": 1}  # fmt: skip
        server._asleep = True
        assert httpx.get(f"{url}/ready").json() == {"ready": False, "reason": "it is asleep"}
        assert httpx.get(f"{url}/ready").status_code == 503


def test_the_run_says_what_ends_a_completion() -> None:
    with serving() as (url, _, _), connected(url) as client:
        found = client.generate([Request([4, 3, 2, 1], 0)], replace(SAMPLING, ends=(3, 7)))
    assert found[0].tokens == [1, 2, 3]


def test_experts_come_where_they_are_asked_for() -> None:
    requests = [Request([i, i + 300, i + 2], seed=i) for i in range(4)]
    with serving() as (one, _, _), connected(one) as client:
        found = client.generate(requests, replace(SAMPLING, experts=True))
        plain = client.generate(requests, SAMPLING)
    for request, completion in zip(requests, found, strict=True):
        assert completion.experts is not None
        assert completion.experts.tolist() == [[[token]] for token in request.tokens]
    assert all(completion.experts is None for completion in plain)
    assert plain == found


@pytest.mark.parametrize("transport", ["body", "shared"])
def test_weights_arrive_bit_for_bit(transport: str) -> None:
    sent = tensors()
    with serving() as (one, first, _), serving() as (other, second, _):
        with connected(one, other, transport=transport) as client:
            client.update(sent.items())
            for engine in (first, second):
                assert list(engine.weights) == list(sent)
                for name, tensor in sent.items():
                    assert engine.weights[name].dtype == tensor.dtype
                    assert engine.weights[name].shape == tensor.shape
                    assert engine.weights[name].view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
            assert client.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-0.5]
            client.update([("scale", torch.tensor(3.0))])
            assert client.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-1.0]
            assert client.checksums(["scale", "unknown"]) == {"scale": "3.0"}
            second.weights["scale"] += 1
            with pytest.raises(RuntimeError, match="scale differs between the servers"):
                client.checksums(["scale"])
            client.sleep()
            assert first.awake  # it has a GPU of its own
        assert httpx.get(f"{one}/health").json()["version"].startswith("2 of ")


@pytest.mark.parametrize("level", [1, 2])
def test_asleep(level: int) -> None:
    with serving() as (url, engine, _), connected(url, sleep_level=level) as client:
        client.update([("scale", torch.tensor(3.0))])
        client.sleep()
        assert not engine.awake
        with pytest.raises(RuntimeError, match="this server is asleep"):
            client.generate([Request([1], 0)], SAMPLING)
        client.wake()
        assert engine.awake
        if level == 2:
            with pytest.raises(WeightsLost, match="freed by /sleep"):
                client.generate([Request([1], 0)], SAMPLING)
            client.update([("scale", torch.tensor(3.0))])
        assert client.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-1.0]


def test_shared_memory_is_found_by_itself() -> None:
    with serving() as (url, _, _), connected(url) as client:
        assert client._servers[0].is_local


@pytest.mark.parametrize("probe", [{"pid": 1, "fd": 0}, {"pid": os.getpid(), "fd": 10**6}])
def test_no_shared_memory_where_it_cannot_be_read(probe: dict) -> None:
    with serving() as (url, _, _):
        body = {"run": "a", "who": "a test", "probe": probe | {"bytes": 16, "secret": "00" * 16}}
        assert httpx.post(f"{url}/claim", json=body).json()["local"] is False


def test_only_the_run_that_claimed_it_changes_weights() -> None:
    with serving() as (url, engine, _), connected(url):
        for headers, status in (({}, 403), ({"x-run": "guessed"}, 403)):
            for path in ("/weights/begin", "/weights/bucket", "/weights/finish", "/release", "/sleep", "/cache/reset"):
                answer = httpx.post(f"{url}{path}", headers=headers, json={})
                assert (answer.status_code, answer.json()["kind"]) == (status, "claimed")
        assert engine.awake
        assert not engine.weights
        # Completions are for everyone.
        body = {"requests": [{"tokens": [1, 2], "seed": 0}], "sampling": {"max_new_tokens": 2}}
        assert httpx.post(f"{url}/generate", json=body).json()["completions"][0]["tokens"] == [2, 1]


def test_a_second_run_waits_for_the_first_to_end(capfd) -> None:
    """It waits as long as for a server; then the error names the other run."""
    with serving() as (url, _, _):
        taken = f"Rollout server {url}: another run has claimed this server (process {os.getpid()} on "
        with connected(url) as first:
            first.update([("scale", torch.tensor(3.0))])
            with pytest.raises(
                ServerClaimed, match=re.escape(taken) + ".*It stayed so for 1 s. .* --vllm_server_timeout"
            ):
                ServerEngine([url], ClientSettings(timeout=0.8))
            capfd.readouterr()
            threading.Timer(0.8, first.release).start()
            with connected(url) as second:
                said = capfd.readouterr().err
                assert said.count(taken) == 1
                assert said.endswith("Waiting for it for up to 10 s.\n")
                with pytest.raises(WeightsLost, match="those of an ended run"):  # the first one's are not its
                    second.generate([Request([1], 0)], SAMPLING)
                second.update([("scale", torch.tensor(6.0))])
                assert second.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-2.0]


def test_a_server_of_another_model() -> None:
    """A vocabulary of another size ends the run at its start, and the server stays free."""
    with serving(vocab_size=151936) as (url, _, server):
        with pytest.raises(ValueError, match="a vocabulary of 151936 tokens, and the trained one has 152064"):
            ServerEngine([url], ClientSettings(timeout=5.0, vocab_size=152064))
        assert server.owner.run is None
        for known in (151936, None):
            with connected(url, vocab_size=known):
                assert server.owner.run is not None


def test_a_server_with_turns() -> None:
    """A run plays the turns that its server was started with, or ends at its start."""
    options = compose(RolloutOptions, multi_turn_scheduler="gym_scheduler", max_turns=3, use_gym_env=True)
    turns = turn_flags(options)
    assert turns == ["--multi_turn_scheduler gym_scheduler", "--max_turns 3", "--use_gym_env true"]
    with serving(turns=turns) as (url, _, server):
        message = r"it was started with --max_turns 3, and the run was not\. The run plays the turns\. Set the flags"
        with pytest.raises(ValueError, match=message):
            ServerEngine([url], ClientSettings(timeout=5.0, turns=(turns[0], "--max_turns 4", turns[2])))
        assert server.owner.run is None
        with connected(url, turns=(*turns, "--gym_env lake")):
            assert server.owner.run is not None
    run = compose(GrpoOptions, multi_turn_scheduler="gym_scheduler", max_turns=3, gym_env="lake")
    assert turn_flags(run) == [*turns[:2], "--gym_env lake", turns[2]]  # --gym_env implies --use_gym_env
    assert not turn_flags(compose(GrpoOptions))


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_that_falls_silent_loses_the_server() -> None:
    with serving(silence=60.0) as (url, _, server):
        silent = {"run": "silent", "who": "a run that was killed"}
        httpx.post(f"{url}/claim", json=silent)
        httpx.post(f"{url}/weights/begin", headers={"x-run": "silent"}, json={})
        with pytest.raises(PermissionError, match="a run that was killed"):
            ServerEngine([url], ClientSettings(timeout=0.0))
    with serving(silence=1.5) as (url, _, server):
        httpx.post(f"{url}/claim", json=silent)
        httpx.post(f"{url}/weights/begin", headers={"x-run": "silent"}, json={})
        assert server._updating
        wait_until(lambda: not server._updating)
        with connected(url) as client:
            with pytest.raises(WeightsLost, match="a mixture of two versions"):
                client.generate([Request([1], 0)], SAMPLING)
            client.update([("scale", torch.tensor(3.0))])
            time.sleep(3.0)  # twice as long; it says that it is there
            assert client.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-1.0]


def test_the_api_key() -> None:
    with serving(api_key="open sesame") as (url, _, server):
        assert httpx.get(f"{url}/health").status_code == 200
        for path in [route.path for route in server.app.routes if "POST" in route.methods]:
            assert httpx.post(f"{url}{path}", json={}, headers={"authorization": "Bearer open"}).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{url}{path}").status_code == 200
        with pytest.raises(PermissionError, match="--vllm_server_api_key"):
            ServerEngine([url], ClientSettings(timeout=5.0, api_key="wrong"))
        with connected(url, api_key="open sesame") as client:
            assert client.generate([Request([1, 2], 0)], SAMPLING)[0].tokens == [2, 1]


def test_errors_of_the_engine_come_through() -> None:
    with serving() as (url, _, _), connected(url) as client:
        with pytest.raises(ValueError, match="/generate: the prompt has 98 tokens, and the model takes 97"):
            client.generate([Request([98], 0)], SAMPLING)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: a kernel broke"):
            client.generate([Request([97], 0)], SAMPLING)
        stream = iter([("scale", torch.tensor(1.0)), ("refused", torch.ones(5)), *tensors().items()])
        with pytest.raises(RuntimeError, match="the model has no weight refused"):
            client.update(stream)
        assert next(stream, None) is None  # read to its end: other ranks were giving their parts
        with pytest.raises(WeightsLost, match="a mixture of two versions"):
            client.generate([Request([1], 0)], SAMPLING)
        client.update([("scale", torch.tensor(3.0))])
        assert client.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-1.0]


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    start, url = time.monotonic(), f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        ServerLost, match=f"No rollout server answers at {url} .*--vllm_server_base_url,.*_server_timeout"
    ):
        ServerEngine([url], ClientSettings(timeout=1.0, address_flags="--vllm_server_base_url"))
    assert time.monotonic() - start < 30
    said = capsys.readouterr().err
    assert said.count(f"No server answers at {url} yet (") == said.count("Waiting for it for up to 1 s.") == 1


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ({}, ["http://127.0.0.1:8000"]),
        ({"vllm_server_host": ["a", "b"]}, ["http://a:8000", "http://b:8000"]),
        ({"vllm_server_port": [1, 2]}, ["http://127.0.0.1:1", "http://127.0.0.1:2"]),
        ({"vllm_server_host": ["a", "b"], "vllm_server_port": [1, 2]}, ["http://a:1", "http://b:2"]),
        ({"vllm_server_base_url": ["https://c/"]}, ["https://c"]),
    ],
)
def test_addresses(given: dict, urls: list[str]) -> None:
    assert server_urls(EngineOptions(**given)) == urls


def test_addresses_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="--vllm_server_host has 2 hosts and --vllm_server_port 3 ports"):
        server_urls(EngineOptions(vllm_server_host=["a", "b"], vllm_server_port=[1, 2, 3]))
    with pytest.raises(ValueError, match=r"--vllm_server_port 99999: not a port. Set one from 1 to 65535"):
        server_urls(EngineOptions(vllm_server_port=[8000, 99999]))
    with pytest.raises(ValueError, match="--vllm_server_base_url localhost:8000: it must begin with http"):
        server_urls(EngineOptions(vllm_server_base_url=["localhost:8000"]))
    for host in ("http://a", "a:8000", "a b", "", "::1"):
        with pytest.raises(ValueError, match=f"--vllm_server_host {host}: not a host name or IP address"):
            server_urls(EngineOptions(vllm_server_host=["localhost", host]))
    assert server_urls(EngineOptions(vllm_server_host=["[::1]"])) == ["http://[::1]:8000"]


@pytest.mark.parametrize("rest", ["127.0.0.1:99999", "127.0.0.1:notaport", ":8000", "", "[::1", "a b:8000", "a:0"])
def test_addresses_that_no_client_takes(rest: str) -> None:
    with pytest.raises(
        ValueError, match=f"^--vllm_server_base_url {re.escape(f'http://{rest}')}: .*Use http://host:port"
    ):
        server_urls(EngineOptions(vllm_server_base_url=["http://[::1]:8000", f"http://{rest}"]))


def test_what_cannot_be_served() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--port {port} cannot listen there \(Address already"):
            bind("127.0.0.1", port)
    for port in (-1, 65536, 99999):
        with pytest.raises(ValueError, match=f"--port {port}: not a port. Set one from 1 to 65535, or 0"):
            bind("127.0.0.1", port)
    for flags in ({"vllm_max_model_len": 128}, {"vllm_enable_prefix_caching": False}):
        with pytest.raises(ValueError, match=f"--{next(iter(flags))} .*: only vLLM reads it, not transformers"):
            choose_backend(RolloutOptions(infer_backend="transformers", **flags))
    with pytest.raises(ValueError, match="--vllm_data_parallel_size 2: with --infer_backend transformers"):
        choose_backend(RolloutOptions(infer_backend="transformers", vllm_data_parallel_size=2))
    with pytest.raises(ValueError, match="--vllm_enable_return_routed_experts true: --infer_backend transformers"):
        choose_backend(RolloutOptions(infer_backend="transformers", vllm_enable_return_routed_experts=True))
    if importlib.util.find_spec("vllm") is None:
        assert choose_backend(RolloutOptions()) == "transformers"
        with pytest.raises(ImportError, match="--infer_backend vllm: vLLM is not installed"):
            choose_backend(RolloutOptions(infer_backend="vllm"))


class Process:
    """A server in a process of its own, to be killed."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.tasks.rollout.served", str(port)]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment)

    def kill(self, how: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, how)
        if how == signal.SIGKILL:
            self.process.wait()


@pytest.fixture
def servers():
    started: list[Process] = []

    def start(port: int) -> Process:
        started.append(Process(port))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def assert_same_completions(one: list[Completion], other: list[Completion]) -> None:
    """The tokens are the same; sums of two processes, by other threads and batches, differ in their last bits."""
    assert [(each.tokens, each.finish) for each in one] == [(each.tokens, each.finish) for each in other]
    for each, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(each.log_probs), torch.tensor(wanted.log_probs), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_model_by_transformers(tmp_path) -> None:
    """`swift rollout` answers as the engine in this process does, before and after new weights; SIGTERM ends it."""
    from megaswift.tasks.rollout.transformers_engine import TransformersEngine

    folder = tiny.save(tmp_path / "model", "qwen3")
    tiny.save_tokenizer(folder)
    options = {"model": str(folder), "port": 0, "infer_backend": "transformers"}
    words = [sys.executable, "-m", "tests.tasks.rollout.serve_worker", json.dumps(options)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("Rollout server: "))
        url = said.split(" on ")[1].strip()
        here = TransformersEngine(folder, dtype=torch.float32)
        requests = [Request(list(range(5, 9 + i)), seed=i) for i in range(5)]
        sampling = Sampling(temperature=0.9, top_k=30, max_new_tokens=12)
        with connected(url, timeout=120.0, bucket_bytes=10**5) as client:
            assert_same_completions(client.generate(requests, sampling), here.generate(requests, sampling))
            weights = tiny.model("qwen3", seed=1).state_dict()
            here.update(weights.items())
            client.update(weights.items())
            assert_same_completions(client.generate(requests, sampling), here.generate(requests, sampling))
            assert client.checksums(list(weights)) == here.checksums(list(weights))
        process.terminate()
        assert process.wait(100) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_while_generating(servers) -> None:
    """Named within seconds; with time to come back the run goes on once it has sent its weights again."""
    port = free_port()
    server = servers(port)
    with connected(server.url, timeout=60.0, reconnect_timeout=60.0) as patient:
        patient.update([("scale", torch.tensor(3.0))])
        threading.Timer(1.0, server.kill).start()
        threading.Timer(3.0, servers, (port,)).start()
        start = time.monotonic()
        with pytest.raises(WeightsLost, match=f"rollout server {server.url} is gone: .* during /generate.*It is back"):
            patient.generate([Request([99], 0)], SAMPLING)
        assert time.monotonic() - start < 50
        with pytest.raises(WeightsLost, match="has version None of the weights, not 1 of"):
            patient.generate([Request([1], 0)], SAMPLING)
        patient.update([("scale", torch.tensor(3.0))])
        assert patient.generate([Request([1], 0)], SAMPLING)[0].log_probs == [-1.0]


@pytest.mark.slow
def test_a_server_that_hangs(servers, monkeypatch) -> None:
    monkeypatch.setattr("megaswift.tasks.rollout.health.ANSWER_TIMEOUT", 1.0)
    server = servers(free_port())
    with connected(server.url, timeout=60.0) as client:
        threading.Timer(1.0, server.kill, (signal.SIGSTOP,)).start()
        start = time.monotonic()
        with pytest.raises(ServerLost, match=r"is gone: no answer within 1 s, twice, during /generate.*--server_reco"):
            client.generate([Request([99], 0)], SAMPLING)
        assert time.monotonic() - start < 50  # the prompt takes 60 s


@pytest.mark.slow
def test_killed_while_weights_travel(servers) -> None:
    server = servers(free_port())
    read = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for i in range(40):
            if i == 20:
                server.kill()
            read.append(i)
            yield f"weight.{i}", torch.ones(1000)

    with connected(server.url, timeout=60.0) as client:
        with pytest.raises(ServerLost, match=rf"The rollout server {server.url} is gone: .* during /weights/bucket"):
            client.update(stream())
        assert read == list(range(40))
