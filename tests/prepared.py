"""Processes that begin where their imports end.

Importing torch, megatron-core and transformers takes seconds, in each process. A server imports them once for a session
of tests, and forks each process that a test asks for: what runs in it is as if Python had just started it.

    run(["-m", "megaswift.cli.main", "megatron", "sft", ...], cwd=place)     # as `python -m ...`; or a script's path
    run([...], processes=2)                                                  # ranks of a job, as torchrun starts them
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = (  # by most commands, sooner or later
    "megaswift.cli.app", "megaswift.cli.launch", "megaswift.cli.parse", "megaswift.cli.saved_args",
    "megaswift.cli.rollout_servers", "megaswift.cli.training_launch", "megaswift.tasks.convert.export",
    "megaswift.tasks.distillation.gkd", "megaswift.tasks.observability.curves", "megaswift.tasks.preference.preference",
    "megaswift.tasks.rl.grpo", "megaswift.tasks.rl.ppo", "megaswift.tasks.supervised.sft",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "math_verify", "peft", "pydantic.type_adapter",
    "torch.utils.tensorboard", "transformers.loss.loss_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_vl.modeling_qwen3_vl", "transformers.models.qwen3_vl.video_processing_qwen3_vl",
    "typer.main",
)  # fmt: skip
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Running:
    """Processes that were started together. `processes` None: one that is no rank of a job."""

    def __init__(self, words: list[str], *, processes: int | None, cwd: Path, environment: Mapping[str, str]):
        self._server, self._words = _server(), words
        self.files = [Path(self._server.folder) / f"{time.monotonic_ns()}.{name}" for name in ("out", "err")]
        job = {"words": words, "processes": processes, "cwd": str(cwd), "environment": dict(environment) | ON_CPU}
        self.pids: list[int] = self._server.ask(job | {"files": [str(file) for file in self.files]})

    def wait(self, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """What they printed, and the exit code of the first that failed. Raises subprocess.TimeoutExpired."""
        code = self._server.answer(timeout)
        if code is None:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._server.answer(60)
        printed = [file.read_text() for file in self.files]
        if code is None:
            raise subprocess.TimeoutExpired(self._words, timeout, *printed)
        return subprocess.CompletedProcess(self._words, code, *printed)


def run(
    words: list[str],
    *,
    processes: int | None = None,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Start, and wait for the end. `environment`: the whole of it; left out: this process's."""
    return Running(words, processes=processes, cwd=cwd, environment=environment or os.environ).wait(timeout)


class _Server:
    def __init__(self):
        self._temporary = tempfile.TemporaryDirectory(prefix="prepared-")
        self.folder = self._temporary.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.prepared"],
            cwd=ROOT,
            env=os.environ | ON_CPU,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        atexit.register(self.close)

    def ask(self, job: dict) -> list[int]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return self.answer(300)

    def answer(self, timeout: float):
        """The next line of the server, None where it does not come in time."""
        assert self._process.stdout
        if not wait([self._process.stdout], timeout):
            return None
        line = self._process.stdout.readline()
        assert line, f"{__file__} has ended"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._temporary.cleanup()


_servers = threading.local()  # each thread's own: a server starts one job after the other


def _server() -> _Server:
    if not hasattr(_servers, "own"):
        _servers.own = _Server()
    return _servers.own


def serve() -> None:
    """For each line of the input: fork, print the processes' ids, and when all have ended the exit code."""
    import megaswift.cli.checks as checks

    for module in (*IMPORTED, *(f"{checks.__name__}.{each.name}" for each in pkgutil.iter_modules(checks.__path__))):
        importlib.import_module(module)
    gc.freeze()  # else each collection in a process would copy all pages
    warnings.filterwarnings("ignore", r"This process .* is multi-threaded")  # with idle pools of numpy and Arrow
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [None] if job["processes"] is None else list(range(job["processes"]))
        port, reserved = reserve_port()
        pids = []
        for rank in ranks:
            pids.append(os.fork())
            if not pids[-1]:
                os._exit(_become(job, rank, port))  # without taking apart what was imported, which takes a second
        print(json.dumps(pids), flush=True)
        print(json.dumps(_wait(pids)), flush=True)
        reserved.close()


_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port for a server that a test starts later; no other test takes it as long as this process lives."""
    port, reserved = reserve_port()
    _reserved.append(reserved)
    return port


def reserve_port() -> tuple[int, socket.socket]:
    """One that the system gives to nobody who asks for any, nor another server as long as the second is open: no test's
    connection takes it meanwhile."""
    while True:
        port, reserved = random.randrange(12000, 32000), socket.socket(socket.AF_UNIX)
        with socket.socket() as listener, contextlib.suppress(OSError):
            reserved.bind(f"\0prepared-port-{port}")  # a name, no file
            listener.bind(("127.0.0.1", port))
            return port, reserved
        reserved.close()


def _become(job: dict, rank: int | None, port: int) -> int:
    """The process that was asked for; its exit code."""
    _end_with_server()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest under nohup ignores it, and so would this process
    for number, file in enumerate([os.devnull, *job["files"]]):
        descriptor = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    if rank is not None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["processes"], "LOCAL_WORLD_SIZE": job["processes"]}
        os.environ.update({name: str(number) for name, number in place.items()})
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(job["cwd"])
    words, code = job["words"], 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _end_with_server() -> None:
    import ctypes

    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _wait(pids: list[int]) -> int:
    """The exit code of the first process that failed, which ends the others as torchrun would; 0 where none did."""
    code, left = 0, set(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        left.discard(pid)
        if not code and (code := os.waitstatus_to_exitcode(status)):
            time.sleep(0.3)  # others may be about to say why they fail
            for other in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return code


if __name__ == "__main__":
    serve()
