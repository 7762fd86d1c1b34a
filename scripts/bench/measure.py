"""Timing of a training run from outside: when each log line appears, by the same clock for all systems."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL = 0.004  # seconds
Step = dict[str, Any]


def measure(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    console_log: Path,
    *,
    steps: int,
    timeout: float,
    read: Callable[[dict[str, Any]], Step | None],
    is_complete: Callable[[], bool] = lambda: True,
    enough: int | None = None,
) -> tuple[list[Step], str | None]:
    """Run `command` until its `log` (JSON lines) has `steps` steps, then kill it with its descendants.

    is_complete: is waited for after the last step, before the process is killed.
    enough: steps that will do if the time is up; None: all.
    The checkpoint that it would save next is not part of a step. Returns the steps, each with `at`, the seconds from
    the start of the command to its log line, and an error message, None if enough steps were logged.
    """
    records: list[Step] = []
    with console_log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            for line in _lines(
                log, is_finished=lambda: process.poll() is not None or time.perf_counter() - start > timeout
            ):
                step = read(json.loads(line))
                if step:
                    records.append(step | {"at": time.perf_counter() - start})
                if len(records) == steps:
                    break
            while not is_complete() and process.poll() is None and time.perf_counter() - start < timeout:
                time.sleep(POLL)
            code = process.poll()
        finally:
            kill_with_descendants(process)
    if len(records) >= (steps if enough is None or code is not None else enough) and is_complete():
        return records, None
    problem = f"took more than {timeout:.0f} s" if code is None else f"ended with code {code}"
    return records, f"{problem} after {len(records)} of {steps} steps: {_error_line(console_log)}"


def run_command(command: list[str], environment: dict[str, str], console_log: Path, *, timeout: float) -> float:
    """Run a command to its end, and return the seconds. Raises RuntimeError if it fails, or takes too long."""
    with console_log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(0.0, timeout))
            seconds = time.perf_counter() - start
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"took more than {timeout:.0f} s: {_error_line(console_log)}") from None
        finally:
            kill_with_descendants(process)
    if code:
        raise RuntimeError(f"ended with code {code}: {_error_line(console_log)}")
    return seconds


def _lines(file: Path, is_finished: Callable[[], bool]):
    """Yield the lines of a file as they are written. The file may not exist yet."""
    partial_line, offset = "", 0
    while True:
        is_last_read = is_finished()  # before reading the file, so that lines written until then count
        if file.exists():
            with file.open() as stream:
                stream.seek(offset)
                partial_line += stream.read()
                offset = stream.tell()
        *lines, partial_line = partial_line.split("\n")
        yield from lines
        if is_last_read:
            return
        time.sleep(POLL)


def _error_line(console_log: Path) -> str:
    lines = [line.strip() for line in console_log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    errors = [line for line in lines if line.startswith("error:") or "Error: " in line or "Error\n" in line]
    return (errors or [line for line in lines if line] or ["it printed nothing"])[-1][:300]


def kill_with_descendants(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants, in any session. Nothing of theirs has to be finished."""
    descendant_pids = descendants(process.pid)
    while True:
        for pid in (process.pid, *descendant_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        descendant_pids = [pid for pid in descendant_pids if _alive(pid)]
        if not descendant_pids:
            return
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's descendants (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    pids, unvisited = [], [pid]
    while unvisited:
        unvisited += (child_pids := children.get(unvisited.pop(), []))
        pids += child_pids
    return pids


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
