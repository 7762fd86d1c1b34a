"""Tests of programs that a model wrote, in a pool of processes with limits.

A worker forks a process for each test, limits it (program_child.py), waits for it, kills it after its time, and
compares its output. A program cannot start processes, so killing its process ends all of it. Run as a module, this
file is a worker: it reads a program with its tests as a JSON line, and writes which tests the program passes.
"""

import contextlib
import ctypes
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, TypeGuard

from ...system.readable import readable
from ..worker_process import WorkerProcess
from .program_child import PRELUDE, Execution, enter_limits, execute

CPU_SECONDS = 5  # per test
WALL_SECONDS = 10.0  # per test, for a program that waits
PROGRAM_SECONDS = 30.0  # per program, for all of its tests
MAX_WORKERS = 16
PR_SET_DUMPABLE = 4  # linux/prctl.h
# Variables that a worker needs: a program's own environment is empty, and its parent's holds no keys.
ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class ProgramTest:
    """One test: text for a script, arguments for a function, or assertions.

    expected: output of the script, or result of the function
    """

    text: str = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    assertions: str | None = None
    expected: Any = None


Request = tuple[str, Sequence[ProgramTest]]  # program and its tests
Verdicts = list[bool]  # one per test


class Sandbox:
    """Pool of worker processes, which start on first use and end with this process."""

    def __init__(self) -> None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._max_workers = min(MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) // local_world_size))
        self._idle: list[_SandboxWorker] = []

    def __call__(self, requests: Sequence[Request], seconds: float) -> list[Verdicts | None]:
        """Return which tests each program passes; None for programs that were not run within these seconds.

        Raises RuntimeError if this machine cannot limit a program.
        """
        verdicts: list[Verdicts | None] = [None] * len(requests)
        deadline = time.monotonic() + seconds
        workers = [
            self._idle.pop() if self._idle else _SandboxWorker() for _ in range(min(self._max_workers, len(requests)))
        ]
        queue = iter(enumerate(requests))
        busy: dict[_SandboxWorker, int] = {}  # worker -> index of its program
        try:
            for worker in workers:
                busy |= _send_next(worker, queue)
            while busy and (left := deadline - time.monotonic()) > 0:
                for worker in readable(list(busy), min(left, 1.0)):
                    i = busy.pop(worker)
                    try:
                        verdicts[i] = worker.receive()
                    except EOFError:  # the worker died, for example of too little memory
                        verdicts[i] = [False] * len(requests[i][1])
                        workers[workers.index(worker)] = worker = _SandboxWorker()
                    busy |= _send_next(worker, queue)
                for worker in [worker for worker in busy if worker.is_late]:
                    i = busy.pop(worker)
                    worker.kill()
                    verdicts[i] = [False] * len(requests[i][1])
                    workers[workers.index(worker)] = worker = _SandboxWorker()
                    busy |= _send_next(worker, queue)
        finally:
            for worker in busy:
                worker.kill()
            self._idle += [worker for worker in workers if worker not in busy]
        return verdicts


def _send_next(worker: "_SandboxWorker", queue: Iterator[tuple[int, Request]]) -> dict["_SandboxWorker", int]:
    for i, (program, tests) in queue:
        worker.send(program, tests)
        return {worker: i}
    return {}


class _SandboxWorker(WorkerProcess):
    def __init__(self) -> None:
        super().__init__(__name__, {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD)
        self._started = time.monotonic()
        line = self.read_line()
        if line != b"ready\n":
            self.kill()
            reason = line.decode(errors="replace").strip() or "its process did not start; see its error above"
            raise RuntimeError(f"programs cannot be tested on this machine: {reason}")

    @property
    def is_late(self) -> bool:
        """Return whether the worker exceeds the time of a program: the worker itself is at fault then."""
        return time.monotonic() - self._started > PROGRAM_SECONDS + 3 * WALL_SECONDS

    def send(self, program: str, tests: Sequence[ProgramTest]) -> None:
        self._started = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the worker died: `receive` says so
            self.write([program, [asdict(test) for test in tests]])


def passed_tests(program: str, tests: Sequence[ProgramTest]) -> Verdicts:
    """Return which tests a program passes. Tests that its time leaves no room for count as failed."""
    deadline = time.monotonic() + PROGRAM_SECONDS
    return [time.monotonic() < deadline and passes(program, test) for test in tests]


def passes(program: str, test: ProgramTest) -> bool:
    """Return whether a program passes a test."""
    execution = Execution(program, test.function, test.arguments, test.assertions)
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        text.write(test.text.encode(errors="replace"))
        text.flush()
        text.seek(0)
        if test.assertions is not None:
            execution = replace(execution, token=secrets.token_hex(16))
        if not run(execution, text, output, result):
            return False
        if test.assertions is not None:
            return _read(result) == execution.token
        if test.function is not None:
            return equal_results(_read(result), test.expected)
        return equal_outputs(_read(output), str(test.expected))


def run(execution: Execution, text: IO[bytes], output: IO[bytes], result: IO[bytes]) -> bool:
    """Run a test in a process of its own, and return whether it ended well within its time."""
    child = os.fork()
    if child == 0:
        try:
            enter_limits(CPU_SECONDS, text.fileno(), output.fileno(), result.fileno())
            execute(execution)
        finally:
            os._exit(2)
    ended = os.pidfd_open(child)
    try:
        if not readable([ended], WALL_SECONDS):
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(ended)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) == 0


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def equal_results(text: str, expected: Any) -> bool:
    """Return whether a function's result, as JSON, is the expected one, or the only item of a list of such."""
    try:
        result = json.loads(text)
    except ValueError:
        return False
    return _equal(result, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0])
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if _is_number(one) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    if _is_number(one) and _is_number(other):
        return one == other
    return type(one) is type(other) and one == other


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal_outputs(output: str, expected: str) -> bool:
    """Return whether two outputs have the same words in each line; decimal fractions may differ by 1e-6."""
    lines, expected_lines = (text.strip().split("\n") for text in (output, expected))
    return len(lines) == len(expected_lines) and all(
        len(words := line.split()) == len(expected_words := other.split())
        and all(map(_equal_words, words, expected_words))
        for line, other in zip(lines, expected_lines, strict=True)
    )


def _equal_words(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def check_limits() -> str:
    """Return "ready" if a program's process is limited on this machine, else the reason."""
    reason = "its kernel has no system-call filter (seccomp), which limits them"
    forks = "import os\ntry:\n    os.fork()\nexcept PermissionError:\n    print('limited')"
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result:
        try:
            is_limited = run(Execution(forks), text, output, result) and _read(output) == "limited\n"
        except OSError as error:  # before Linux 5.3
            return f"its kernel cannot wait for them ({error.strerror})"
    return "ready" if is_limited else reason


def main() -> None:
    # Keeps programs from reading /proc/<pid>/mem of this process, which holds the expected outputs.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    exec(PRELUDE, {})  # its modules are then in memory, and each test's process begins with them
    print(check_limits(), flush=True)
    for line in sys.stdin:
        program, tests = json.loads(line)
        tests = [ProgramTest(**{**test, "arguments": tuple(test["arguments"])}) for test in tests]
        print(json.dumps(passed_tests(program, tests)), flush=True)


if __name__ == "__main__":
    main()
