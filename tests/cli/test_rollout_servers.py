"""Servers that a run starts by --rollout_num_gpus: their places and flags, and that all processes end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main
from megaswift.cli.rollout_servers import Placement, free_ports, server_flags
from megaswift.cli.supervisor import server_failure
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.options.rollout import EngineOptions

from tests.cli.checks.checking import check, install, refusal
from tests.tasks.rl.runs import Place, assert_same_steps

BATCH = "--global_batch_size 8"
STEPS = "--steps_per_generation 1 --train_iters 2"
# Stand-ins for a trainer and a server, each of which writes its pid to a file.
STAND_IN = """
import os, signal, sys, time, types
from pathlib import Path

def wrote(name):
    folder = Path(os.environ["STAND_IN"])
    (folder / f"{name}.new").write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    (folder / f"{name}.new").rename(folder / name)

def train(options, sources):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    wrote("trainer")
    (Path(os.environ["STAND_IN"]) / "urls").write_text(" ".join(options.engine.vllm_server_base_url))
    while not told:
        time.sleep(0.05)
    os._exit(75)

def serve(options, sources):
    if os.environ["STAND_IN_SERVER"] == "refuses":
        raise ValueError("no such weights")
    if child := os.fork():
        wrote(f"server-{options.port}")
        time.sleep(600)
    wrote("engine")  # a process that the server has started
    time.sleep(600)

if "STAND_IN" in os.environ:
    for name, run in (("rl.grpo", train), ("rollout.serve", serve)):
        module = types.ModuleType(f"megaswift.tasks.{name}")
        module.run = run
        sys.modules[module.__name__] = module
"""


def engine(**values: object) -> GrpoOptions:
    return GrpoOptions(engine=EngineOptions(**values))  # pyright: ignore[reportArgumentType]


def test_the_last_gpus_serve() -> None:
    placement = Placement.of(engine(rollout_num_gpus=4, vllm_tensor_parallel_size=2), list("02468a"))
    assert placement == Placement(["0", "2"], [["4", "6"], ["8", "a"]])
    assert Placement.of(engine(), ["0", "1"]) == Placement(["0", "1"], [])
    assert Placement.of(engine(rollout_num_gpus=3), []) == Placement([], [[], [], []])


@pytest.mark.parametrize(
    ("gpus", "variables", "message"),
    [
        (2, {}, "leaves none of the 2 visible GPUs for training. Set at most 1, or show more"),
        (0, {"NNODES": "2"}, "starts servers for a run on one node, and NNODES is 2. Start `swift rollout`"),
        (0, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "torchrun has started this process"),
    ],
)
def test_places_that_cannot_be(gpus: int, variables: dict[str, str], message: str, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^--rollout_num_gpus 2: {re.escape(message)}"):
        Placement.of(engine(rollout_num_gpus=2), [str(number) for number in range(gpus)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vllm_mode colocate", "cannot be used with --vllm_mode colocate, which generates in the training"),
        ("--vllm_server_host a", "cannot be used with --vllm_server_host a: the command starts servers of its own."),
        ("--vllm_server_base_url http://a:1", "cannot be used with --vllm_server_base_url http://a:1: the command"),
        ("--vllm_server_port 9", "cannot be used with --vllm_server_port 9: the command starts servers of its own."),
        ("--vllm_server_api_key sesame", "cannot be used with --vllm_server_api_key ...: the command starts"),
        ("--server_reconnect_timeout 9", "cannot be used with --server_reconnect_timeout 9.0: the command starts"),
        ("--vllm_tensor_parallel_size 3", "not a multiple of --vllm_tensor_parallel_size 3, the GPUs of a server."),
    ],
)
def test_flags_that_contradict(words: str, message: str, dense: Path, monkeypatch) -> None:
    install(monkeypatch, vllm=True)
    assert f"--rollout_num_gpus 2{':' if message.startswith('not') else ''} {message}" in refusal(
        dense, f"--rollout_num_gpus 2 {words} {BATCH}"
    )


def test_flags_of_other_tasks_and_engines(dense: Path, monkeypatch) -> None:
    install(monkeypatch, vllm=False)
    words = f"--rollout_num_gpus 2 {BATCH}"
    assert "--use_vllm true: vLLM is not installed here" in refusal(dense, f"{words} --use_vllm true")
    only = "--vllm_tensor_parallel_size 2: only for vLLM, and it is not installed here"
    assert only in refusal(dense, f"{words} --vllm_tensor_parallel_size 2")
    with pytest.raises(UsageError, match="--rollout_num_gpus 2 cannot be used with --lmbda 0: the student generates"):
        check(dense, "--rollout_num_gpus 2 --lmbda 0 --teacher_model t", kind="gkd")
    with pytest.raises(UsageError, match="--rollout_num_gpus: only for --rlhf_type grpo"):
        check(dense, "--rollout_num_gpus 2", kind="dpo")


def test_what_a_server_is_given(dense: Path, monkeypatch) -> None:
    """Return the flags of `swift rollout` that the docs have a user write."""
    install(monkeypatch, vllm=True)
    words = (
        "--torch_dtype float32 --vllm_tensor_parallel_size 2 --vllm_max_model_len 9000 --vllm_enable_lora true "
        '--tuner_type lora --lora_rank 5 --vllm_engine_kwargs {"max_num_batched_tokens":8192} --use_vllm true '
        "--vllm_gpu_memory_utilization 0.5 --hub_token sesame --reward_funcs accuracy --async_generate true"
    )
    options, _ = check(dense, f"--rollout_num_gpus 2 {BATCH} {words}")
    assert server_flags(options) == [
        "--model", str(dense), "--torch_dtype", "float32", "--vllm_tensor_parallel_size", "2",
        "--vllm_max_model_len", "9000", "--vllm_enable_lora", "true",
        "--vllm_engine_kwargs", '{"max_num_batched_tokens": 8192}', "--infer_backend", "vllm",
        "--vllm_gpu_memory_utilization", "0.5", "--vllm_max_lora_rank", "5",
    ]  # fmt: skip
    options, _ = check(dense, f"--rollout_num_gpus 1 {BATCH} --use_vllm false --reward_funcs accuracy")
    assert server_flags(options) == ["--model", str(dense), "--infer_backend", "transformers"]
    assert (options.engine.vllm_mode, options.engine.vllm_server_timeout) == ("server", 0.8 * 1800)


def test_experts_are_returned_for_replay(mixture: Path, monkeypatch) -> None:
    words = f"--rollout_num_gpus 1 {BATCH} --reward_funcs accuracy --router_replay_mode R3"
    for vllm in (True, False):
        install(monkeypatch, vllm=vllm)
        options, _ = check(mixture, words)
        assert ("--vllm_enable_return_routed_experts" in server_flags(options)) == vllm


def test_a_port_is_kept_until_a_server_listens() -> None:
    with ExitStack() as reserved:
        ports = free_ports(2, reserved)
        assert len(set(ports)) == 2
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", ports[0]))
            server.listen()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def test_a_dry_run_shows_the_places(place: Place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("megaswift.cli.launch.Path.iterdir", lambda _: [Path(f"/dev/nvidia{n}") for n in range(8)])
    words = place.line(f"{STEPS} --rollout_num_gpus 2 --dry_run true", "dry").split()
    assert main("megatron", ["rlhf", "--rlhf_type", "grpo", *words]) == 0
    report = capsys.readouterr().out
    flags = "--model qwen3 --infer_backend transformers --host 127.0.0.1 --port 0"
    assert f"rollout server 1 (GPU 5): CUDA_VISIBLE_DEVICES=5 swift rollout {flags}\n" in report
    assert f"rollout server 2 (GPU 6): CUDA_VISIBLE_DEVICES=6 swift rollout {flags}\n" in report
    assert re.search(r"  command  .*CUDA_VISIBLE_DEVICES=4 ", report)
    assert "--nproc_per_node=1 " in report


@pytest.mark.slow
def test_rewards_are_those_of_an_engine_in_the_process(place: Place) -> None:
    """As they are with a server that a user has started (tests/tasks/rl/test_server_faults.py)."""
    with_servers, without = place.run(f"{STEPS} --rollout_num_gpus 1"), place.run(STEPS)
    assert "Starting 1 process and 1 rollout server" in with_servers.printed
    (log,) = with_servers.folder.glob("rollout-server-1-*.log")
    url = re.search(r"Rollout server: qwen3 by transformers on (\S+)", log.read_text())
    assert url
    with pytest.raises(httpx.ConnectError):  # it has ended
        httpx.get(f"{url[1]}/health")
    assert_same_steps(with_servers, without)
    assert [row["reward"] for row in with_servers.steps] == [row["reward"] for row in without.steps]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which each stand-in process writes its pid."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("STAND_IN_SERVER", "serves")
    return tmp_path


def started(folder: Path, model: Path) -> subprocess.Popen:
    """Start a run with two servers."""
    words = [*f"rlhf --rlhf_type grpo --dataset d --train_iters 1 --reward_funcs accuracy {BATCH}".split()]
    words += [*f"--rollout_num_gpus 2 --use_vllm false --model {model} --output_dir {folder / 'run'}".split()]
    return subprocess.Popen(
        [sys.executable, "-m", "megaswift.cli.main", "megatron", *words], stderr=subprocess.PIPE, text=True
    )


def pids(folder: Path) -> dict[str, int]:
    """Return the processes' pids by name, when all have started."""
    deadline = time.monotonic() + 300
    while True:
        files = [*folder.glob("server-*[0-9]"), *folder.glob("engine"), *folder.glob("trainer")]
        if len(files) == 4 and (folder / "urls").exists():
            return {file.name: int(file.read_text().split()[0]) for file in files}
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def words_of(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().split("\0")


def assert_ended(processes: dict[str, int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while left := [name for name, pid in processes.items() if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_servers_have_a_key_of_their_run_and_end_with_it(stand_in: Path, dense: Path, monkeypatch) -> None:
    """Also when SIGTERM lets the trainer save."""
    monkeypatch.setenv("MEGASWIFT_API_KEY", "sesame")
    parent = started(stand_in, dense)
    processes = pids(stand_in)
    servers = [pid for name, pid in processes.items() if name.startswith("server")]
    (key,) = {variable for pid in servers for variable in words_of(pid, "environ") if "MEGASWIFT_API_KEY" in variable}
    assert len(key.removeprefix("MEGASWIFT_API_KEY=")) > 20
    assert "MEGASWIFT_API_KEY=sesame" in words_of(processes["trainer"], "environ")  # for servers of others
    for pid in (parent.pid, *processes.values()):
        assert not [word for word in words_of(pid, "cmdline") if key.partition("=")[2] in word]
    for pid in servers:
        words = words_of(pid, "cmdline")
        assert words[words.index("--host") + 1] == "127.0.0.1"
    urls = (stand_in / "urls").read_text().split()
    assert {f"server-{url.rpartition(':')[2]}" for url in urls} == {name for name in processes if "server" in name}
    parent.terminate()
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 75, errors
    assert "error" not in errors
    assert_ended(processes, 1)


@pytest.mark.slow
def test_where_a_server_is_lost_the_run_ends(stand_in: Path, dense: Path) -> None:
    parent = started(stand_in, dense)
    processes = pids(stand_in)
    os.kill(next(pid for name, pid in processes.items() if "server" in name), signal.SIGKILL)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert re.search(r"^error: rollout server [12] was ended by SIGKILL", errors, re.M)
    assert_ended(processes, 1)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told_at_once(stand_in: Path, dense: Path, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_SERVER", "refuses")
    parent = started(stand_in, dense)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    said = r"^error: rollout server [12] ended with exit code 1\. The end of \S+\.log:(\n  .*)*"
    assert re.search(rf"{said}\n  ValueError: no such weights$", errors, re.M), errors


def test_the_cause_of_an_engines_end_is_named(tmp_path: Path) -> None:
    """vLLM ends with an error of its own, far below that of its engine."""
    log, frames = tmp_path / "server.log", ['  File "engine.py", line 1'] * 30
    engine = "(EngineCore pid=7) ERROR 11-28 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    end = "RuntimeError: Engine core initialization failed. See root cause above."
    log.write_text("\n".join(["ImportError: no flashinfer", engine, *frames, end]))
    failure = server_failure("rollout server 1", 1, log)
    said = (
        "error: rollout server 1 ended with exit code 1 after torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB."
    )
    assert failure.startswith(f"{said} The end of {log}:")
    assert failure.endswith(end)
    log.write_text("\n".join([*frames, "ValueError: no such weights"]))
    assert server_failure("rollout server 1", 1, log).startswith(
        f"error: rollout server 1 ended with exit code 1. The end of {log}:"
    )


@pytest.mark.slow
def test_a_killed_parent_leaves_no_process(stand_in: Path, dense: Path) -> None:
    parent = started(stand_in, dense)
    processes = pids(stand_in)
    parent.kill()
    parent.wait(60)
    assert_ended(processes)
