"""Number, start and end of the processes of a run, with a stand-in for the task."""

import gc
import importlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from megaswift.bridge.options import BuildOptions
from megaswift.cli import main
from megaswift.cli.commands import Command
from megaswift.cli.flags import UsageError
from megaswift.cli.launch import (
    Processes,
    environment,
    hidden_words,
    shown_command,
    start,
    torchrun_command,
    unseen_gpus,
    visible_gpus,
)

from tests.another_user import readable

MEGATRON = str(Path(sys.executable).with_name("megatron"))

STAND_IN = """
import os, signal, sys, time, types

def save_at(signals, seconds):
    told = []
    for number in signals:
        signal.signal(number, lambda number, frame: told.append(signal.Signals(number).name))
    began()
    while not told:
        time.sleep(0.05)
    time.sleep(seconds)
    with open(os.path.join(os.environ["STAND_IN"], "saved-" + os.environ["RANK"]), "w") as file:
        print(told[0], file=file)
    os._exit(75)

def began():
    with open(os.path.join(os.environ["STAND_IN"], "rank-" + os.environ["RANK"]), "w") as file:
        print(os.getpid(), os.environ["WORLD_SIZE"], os.environ.get("OMP_NUM_THREADS"), file=file)

def run(options, sources):
    rank = os.environ["RANK"]
    what = os.environ["STAND_IN_DOES"]
    if what == "save":
        save_at([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], seconds=float(rank))  # rank 0 is the first to end
    if what == "save long":
        save_at([signal.SIGTERM], seconds=600)
    if what in ("train", "train, rank 1 fails"):
        from pathlib import Path
        from megaswift.tasks.run.interrupt import Progress, before_exit, interruptible, report
        with interruptible():
            folder = Path(os.environ["STAND_IN"])
            before_exit((folder / ("freed-" + rank)).touch)
            report(Progress(folder, 7, 30))
            began()
            if rank == "1" and what != "train":
                time.sleep(2)
                os._exit(3)
            time.sleep(600)
    began()
    if what == "fail once" and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(70)
    if what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other = os.path.join(os.environ["STAND_IN"], "rank-1")
        while rank == "1" or not os.path.exists(other):
            time.sleep(0.1)
        time.sleep(0.5)
        os._exit(70)
    if what == "stand still":
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)
        os._exit(70)
    if what == "fail" and rank == "1":
        raise KeyError("a fault of ours")
    if what == "refuse":
        from megaswift.bridge.checkpoint.hub import read_config
        read_config("/no/such/folder")
    if what == "wait":
        time.sleep(600)

if "STAND_IN" in os.environ:
    task = types.ModuleType("megaswift.tasks.supervised.sft")
    task.run = run
    sys.modules["megaswift.tasks.supervised.sft"] = task
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which each stand-in process writes its pid, world size and OMP_NUM_THREADS."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("STAND_IN_DOES", "nothing")
    return tmp_path


def line(model: Path, *words: str) -> list[str]:
    return ["sft", "--model", str(model), "--dataset", "d", "--train_iters", "1", "--save_interval", "3", *words]


def started(folder: Path, ranks: int) -> list[int]:
    """Return the pids of the processes when all have started."""
    files = [folder / f"rank-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + 900  # a busy machine starts them slowly
    while not all(file.exists() and file.read_text().endswith("\n") for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [int(file.read_text().split()[0]) for file in files]


def begin(does: str, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen, list[int]]:
    """Start torchrun with two stand-in processes. Return it and their pids when both have started."""
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("STAND_IN_DOES", does)
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where pytest runs under nohup
    parent = subprocess.Popen([MEGATRON, *line(model)], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGHUP, former)
    return parent, started(folder, 2)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long), (signal.SIGINT, 130)]
)
def test_a_signal_ends_every_process(number: int, code: int, stand_in: Path, dense: Path, monkeypatch) -> None:
    parent, pids = begin("wait", stand_in, dense, monkeypatch)
    assert all(map(alive, [parent.pid, *pids]))
    parent.send_signal(number)
    assert parent.wait(300) == code
    assert not any(map(alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGUSR1, signal.SIGHUP))],
)
def test_a_signal_lets_every_process_save(number: int, stand_in: Path, dense: Path, monkeypatch) -> None:
    monkeypatch.setenv("MAX_RESTARTS", "1")
    parent, _ = begin("save", stand_in, dense, monkeypatch)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 75  # and not restarted
    assert "started again" not in errors
    assert "error" not in errors
    for rank in (0, 1):
        assert (stand_in / f"saved-{rank}").read_text().strip() == signal.Signals(number).name


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(stand_in: Path, dense: Path, monkeypatch) -> None:
    parent, pids = begin("save long", stand_in, dense, monkeypatch)
    parent.terminate()
    parent.terminate()  # that is the same one: `timeout` and schedulers send it to a process and to its group
    time.sleep(2.5)
    assert all(map(alive, [parent.pid, *pids]))
    parent.terminate()
    assert parent.wait(300) == 143
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_where_one_fails_the_others_end(stand_in: Path, dense: Path, monkeypatch) -> None:
    """Also those that take SIGTERM as the wish to save, and would be waited for for 30 s."""
    parent, pids = begin("hang", stand_in, dense, monkeypatch)
    assert parent.wait(300) == 70
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_process_that_stands_still_is_ended_soon(stand_in: Path, dense: Path, monkeypatch) -> None:
    """Where another has found that the run hangs: not after the 30 s that torchrun gives one which obeys no signal."""
    parent, pids = begin("stand still", stand_in, dense, monkeypatch)
    since = time.monotonic()
    assert parent.wait(300) == 70
    assert time.monotonic() - since < 25
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_ctrl_c_says_once_how_to_continue(stand_in: Path, dense: Path, monkeypatch) -> None:
    (stand_in / "checkpoint-5").mkdir()
    parent, pids = begin("train", stand_in, dense, monkeypatch)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 130
    said = f"Interrupted at step 7 of 30. Last checkpoint: {stand_in}/checkpoint-5. Add --resume_from_checkpoint auto "
    assert errors.count(said) == errors.count("Interrupted") == 1
    assert "Traceback" not in errors
    assert all((stand_in / f"freed-{rank}").exists() for rank in (0, 1))
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_servers_are_freed_where_another_process_fails(stand_in: Path, dense: Path, monkeypatch) -> None:
    parent, _ = begin("train, rank 1 fails", stand_in, dense, monkeypatch)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 3
    assert (stand_in / "freed-0").exists()
    assert "Interrupted" not in errors


@pytest.mark.slow
def test_processes_that_failed_are_started_again(stand_in: Path, dense: Path, monkeypatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("MAX_RESTARTS", "2")
    monkeypatch.setenv("STAND_IN_DOES", "fail once")
    done = subprocess.run([MEGATRON, *line(dense)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: restarting all processes (restarts left: 1)") == 1


@pytest.mark.slow
def test_a_killed_process_is_told_and_ends_all(stand_in: Path, dense: Path, monkeypatch) -> None:
    parent, pids = begin("wait", stand_in, dense, monkeypatch)
    os.kill(pids[1], signal.SIGKILL)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[-1].startswith(f"error: rank 1 (process {pids[1]}) was ended by SIGKILL")
    assert not any(map(alive, pids))


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_process(stand_in: Path, dense: Path, monkeypatch) -> None:
    parent, pids = begin("wait", stand_in, dense, monkeypatch)
    parent.kill()
    parent.wait(150)
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_others_on_the_machine_see_no_key_and_no_port(stand_in: Path, dense: Path, monkeypatch, tmp_path: Path) -> None:
    """Nor does a file of the working folder take the place of a module."""
    (tmp_path / "types.py").write_text("raise SystemExit('a file of the working folder was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("STAND_IN_DOES", "wait")
    parent = subprocess.Popen([MEGATRON, *line(dense), "--hub_token", "sesame"], stderr=subprocess.PIPE, text=True)
    pids = started(stand_in, 2)
    assert not [pid for pid in (parent.pid, *pids) if b"sesame" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not [pid for pid in (parent.pid, *pids) if listens(pid)]
    store = Path(dict(entry.split("=", 1) for entry in environment_of(pids[0]) if "=" in entry)["MEGASWIFT_STORE"])
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    secrets = [store, store.parent, *(Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "fd"))]
    assert readable([Path("/etc/hosts"), *secrets]) == [Path("/etc/hosts")]
    os.kill(pids[1], signal.SIGKILL)
    parent.communicate(timeout=300)
    assert not store.parent.exists()


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def listens(pid: int) -> bool:
    """Return whether a process listens for TCP connections."""
    files = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in files for row in rows)


@pytest.mark.slow
def test_an_error_is_said_once_and_ends_all(stand_in: Path, dense: Path, monkeypatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("STAND_IN_DOES", "refuse")
    done = subprocess.run([MEGATRON, *line(dense)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("error: --model /no/such/folder: it has no config.json") == 1
    assert "Traceback" not in done.stderr
    assert "closing signal" not in done.stderr  # torchrun's own account
    assert done.stderr.count("--save_interval 3 is an older spelling") == 1  # before the processes, not in each

    monkeypatch.setenv("STAND_IN_DOES", "fail")
    done = subprocess.run([MEGATRON, *line(dense)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'a fault of ours'") == 1  # with its traceback
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [[MEGATRON], pytest.param(["-m", "megaswift.cli.main", "megatron"], marks=pytest.mark.long)]
)
def test_under_an_outer_torchrun(how: list[str], stand_in: Path, dense: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, *how, *line(dense)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {(stand_in / f"rank-{rank}").read_text().split()[1] for rank in (0, 1)} == {"2"}
    assert done.stderr.count("--save_interval 3 is an older spelling") == 1


def test_one_process_runs_at_once(stand_in: Path, dense: Path) -> None:
    process = subprocess.Popen([MEGATRON, *line(dense)], stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert (stand_in / "rank-0").read_text().split() == [str(process.pid), "1", "None"]
    assert "torch" not in errors


def test_torchrun_is_started_without_torch(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, sys; from megaswift.cli.main import main\n"
        "def execv(*_): print({'torch', 'megatron', 'transformers', 'datasets'} & set(sys.modules)); raise OSError\n"
        "os.execv = execv; main('megatron', sys.argv[1:])"
    )
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    done = subprocess.run([sys.executable, "-c", program, *line(dense)], capture_output=True, text=True)
    assert (done.stdout, "Starting 2 processes" in done.stderr) == ("set()\n", True), done.stderr


def test_one_process_opens_a_port_that_is_free_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    start(Processes(per_node=1), [], {})
    assert (os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]) == ("1", "0")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_is_taken(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "execv", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^MASTER_PORT={port}: cannot listen on this port \(Address already in"):
            start(Processes(processes, master_port=port), ["megatron"], {})
        start(Processes(processes, nodes=2, node_rank=1, master_port=port), ["megatron"], {})  # the first node listens
    start(Processes(processes, master_port=port), ["megatron"], {})


def test_processes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Processes.of_environment(gpus=0).world == 1
    assert Processes.of_environment(gpus=4).world == 4
    for name, value in {"NPROC_PER_NODE": "2", "NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    processes = Processes.of_environment(gpus=8)
    assert (processes.world, processes.node_rank, processes.master_port) == (6, 1, 29500)
    command = torchrun_command(processes, ["megatron", "sft", "config.yaml"])
    assert "--max_restarts=3" in torchrun_command(replace(processes, max_restarts=3), ["megatron"])
    assert command[4:] == ["--nproc_per_node=2", "--nnodes=3", "--node_rank=1", "--master_addr=host",
                           "--master_port=29500",
                           "-m", "megaswift.cli.main", "megatron", "sft", "config.yaml"]  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE=two: invalid. Set a whole number of at least 1."),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0: invalid. Set a whole number of at least 1"),
        ({"NPROC_PER_NODE": "²"}, "NPROC_PER_NODE=²: invalid. Set a whole number of at least 1."),
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: not a port. Set 1 to 65535."),
        ({"NNODES": "2", "MASTER_ADDR": "h", "NODE_RANK": "2"}, "NODE_RANK=2: not below NNODES=2. Set 0 to 1."),
    ],
)
def test_an_environment_that_is_wrong(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(message)):
        Processes.of_environment(gpus=0)


def test_what_a_run_wants_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    dense, split = BuildOptions(), BuildOptions(tensor_model_parallel_size=2)
    assert environment(dense, Processes(2), gpus=0) == {"OMP_NUM_THREADS": str(max(1, cores // 2))}
    queues, memory = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert environment(dense, Processes(1), gpus=1) == queues | memory
    queues["OMP_NUM_THREADS"] = "1"
    assert environment(dense, Processes(2), gpus=2) == queues | memory
    assert environment(split, Processes(2), gpus=2) == queues | memory | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert environment(dense, Processes(2), gpus=2) == queues
    monkeypatch.setenv("CUDA_SCALE_LAUNCH_QUEUES", "1x")
    assert environment(dense, Processes(2), gpus=2) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(dense, Processes(2), gpus=0) == {}


def test_hidden_gpus_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    devices = [Path("/dev") / name for name in ("null", "nvidia0", "nvidia1", "nvidiactl")]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(devices))
    assert visible_gpus() == 2
    for shown, count in (("1", 1), ("0,1", 2), ("0,1,2,3", 2), ("MIG-a,MIG-b", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert visible_gpus() == count


def test_tokens_and_keys_reach_the_processes_by_the_environment(monkeypatch) -> None:
    commands = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    monkeypatch.setenv("MEGASWIFT_STARTED", "")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    secret = ["--hub_token", "se=same", "--vllm-server-api-key=open"]
    start(Processes(2), ["megatron", "sft", "--lr", "1e-5", *secret, "--packing", "true"], {})
    assert commands[0][-6:] == ["megatron", "sft", "--lr", "1e-5", "--packing", "true"]
    assert hidden_words() == secret
    assert hidden_words() == []


def test_a_token_is_not_shown() -> None:
    assert shown_command(["x", "--hub_token", "secret", "--hub_token=secret", "a b"], {"N": "1"}) == (
        "N=1 x --hub_token ... --hub_token=... 'a b'"
    )
    hyphens = shown_command(["--hub-token", "secret", "--teacher-model-server-api-key=secret", "x"], {})
    assert hyphens == "--hub-token ... --teacher-model-server-api-key=... x"
    key = "--teacher_model_server_api_key"
    assert shown_command([key, "secret", f"{key}=secret", "--api_keys"], {}) == f"{key} ... {key}=... --api_keys"


@pytest.mark.parametrize(
    ("names", "gpus", "said"), [("0,1", 0, True), ("0,1", 1, False), ("", 0, False), ("-1", 0, False)]
)
def test_gpus_that_are_named_and_not_there_are_told(names, gpus, said, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    note = "CUDA_VISIBLE_DEVICES=0,1: this machine has no such NVIDIA GPU. The run uses the CPU."
    assert unseen_gpus(gpus) == [note] * said


def test_a_task_is_imported_without_garbage_collection_and_runs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []

    def import_module(name: str, package: str) -> SimpleNamespace:
        states.append(gc.isenabled())
        return SimpleNamespace(run=lambda options, sources: states.append(gc.isenabled()))

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert main._run(Command("", task="task"), None, {}) == 0
    gc.unfreeze()
    assert states == [False, True]
