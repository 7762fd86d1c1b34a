"""Runs on Ray: refusals without it, and the numbers, signals and ends of torchrun with it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from megaswift.cli.flags import UsageError
from megaswift.cli.launch import Processes
from megaswift.cli.ray_launcher import Hosted, HostedProcess, check_ray
from megaswift.cli.rollout_servers import Placement

from tests.cli.test_rollout_servers import alive, engine
from tests.prepared import ON_CPU
from tests.tasks.rl.runs import Place

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


def test_ray_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    with pytest.raises(UsageError, match=r"^--use_ray true: Ray is not installed. Run pip install 'megaswift\[ray\]'"):
        check_ray()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UsageError, match=r"^--use_ray true: torchrun has started this process"):
        check_ray()


def test_ray_chooses_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    processes = Processes.of_environment(gpus=4, uses_ray=True)  # and needs no MASTER_ADDR
    assert (processes.world, processes.master_port) == (8, None)
    options = engine(rollout_num_gpus=8, vllm_tensor_parallel_size=4)
    assert Placement.of(options, list("0123"), uses_ray=True) == Placement(list("0123"), [[], []])
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(UsageError, match=r"^NODE_RANK=1: --use_ray true starts all nodes"):
        Processes.of_environment(gpus=4, uses_ray=True)
    monkeypatch.setenv("NNODES", "1")
    options = engine(rollout_num_gpus=2)
    assert Placement.of(options, list("0123"), uses_ray=True) == Placement(list("01"), [[], []])


def test_a_process_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output, signals and end, as an actor has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # Ray's
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, os.getcwd(), os.environ.get('OMP_NUM_THREADS'), os.environ['X'], flush=True)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    hosted = HostedProcess()
    hosted.start(["-c", script], {"X": "1"}, str(tmp_path))
    text, deadline = "", time.monotonic() + 60
    while "to stderr" not in text and time.monotonic() < deadline:
        text += hosted.read()[0]
    child, *rest = text.split("\n")[0].split()
    assert rest == [str(tmp_path), "None", "1"]
    hosted.send(signal.SIGUSR1)
    while "told" not in text and time.monotonic() < deadline:
        text += hosted.read()[0]
    hosted.end(signal.SIGTERM, 10.0)
    assert hosted.read() == ("", -signal.SIGTERM)
    while alive(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(child))


def test_lines_show_their_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    node = Hosted("node 1", None, "[node 1] ")
    node.take("step 1\nst")
    node.take("ep 2\n")
    assert capsys.readouterr().out == "[node 1] step 1\n[node 1] step 2\n"
    server = Hosted("rollout server 1", None, log=tmp_path / "log")
    server.take("half a ")
    server.take("line\n")
    assert (tmp_path / "log").read_text() == "half a line\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables of a run on a Ray cluster of this machine."""
    import ray

    context = ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    yield os.environ | ON_CPU | {"RAY_ADDRESS": context.address_info["address"]}
    ray.shutdown()


def megatron(place: Place, words: str, environment: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "megaswift.cli.main", "megatron", *words.split()]
    return subprocess.Popen(
        command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "logging.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@with_ray
@pytest.mark.slow
@pytest.mark.long
def test_losses_are_those_of_torchrun(place: Place, cluster: dict[str, str]) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}]} for n in (1, 3)]
    (place.folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "sft --model qwen3 --dataset sft.jsonl --train_iters 3 --global_batch_size 2 --logging_steps 1"
    for name, flags, variables in (
        ("torchrun", "", {"NPROC_PER_NODE": "2"}),
        ("ray", "--use_ray true", {"NNODES": "2"}),
    ):
        line = f"{words} {flags} --output_dir {name} --add_version false"
        printed, _ = megatron(place, line, cluster | variables).communicate(timeout=300)
        assert (place.folder / name / "logging.jsonl").exists(), printed.decode()
    assert losses(place.folder / "ray") == losses(place.folder / "torchrun")
    assert b"[node 0] step 3/3" in printed


@with_ray
@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_fails_ends_all(place: Place, cluster: dict[str, str]) -> None:
    """With its error in the terminal, and a server on another actor."""
    line = place.line("--steps_per_generation 1 --rollout_num_gpus 1 --use_ray true --reward_funcs raises", "fails")
    run = megatron(place, f"rlhf --rlhf_type grpo {line}", cluster)
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert b"ZeroDivisionError" in printed
