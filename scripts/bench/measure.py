"""A training run watched from outside: when each of its log lines comes, by one clock for all systems."""

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
    printed: Path,
    *,
    steps: int,
    timeout: float,
    read: Callable[[dict[str, Any]], Step | None],
) -> tuple[list[Step], str | None]:
    """Run `command` until its `log` (a file of JSON lines) has `steps` steps, then end it, with all it has started.

    Ends it there because what follows, a checkpoint, is no part of a step. Returns the steps, each with `at`: the
    seconds from the command's start to its line; and what went wrong, None where all steps came.
    """
    found: list[Step] = []
    with printed.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            for line in _lines(log, until=lambda: process.poll() is not None or time.perf_counter() - start > timeout):
                step = read(json.loads(line))
                if step:
                    found.append(step | {"at": time.perf_counter() - start})
                if len(found) == steps:
                    break
            code = process.poll()
        finally:
            end(process)
    if len(found) >= steps:
        return found, None
    why = f"took more than {timeout:.0f} s" if code is None else f"ended with code {code}"
    return found, f"{why} after {len(found)} of {steps} steps: {_last_words(printed)}"


def _lines(file: Path, until: Callable[[], bool]):
    """The lines of a file as they come, which may not be there yet."""
    rest, place = "", 0
    while True:
        last = until()  # before the file is read: what came until then counts
        if file.exists():
            with file.open() as stream:
                stream.seek(place)
                rest += stream.read()
                place = stream.tell()
        *whole, rest = rest.split("\n")
        yield from whole
        if last:
            return
        time.sleep(POLL)


def _last_words(printed: Path) -> str:
    lines = [line.strip() for line in printed.read_text(errors="replace").replace("\r", "\n").splitlines()]
    said = [line for line in lines if line.startswith("error:") or "Error: " in line or "Error\n" in line]
    return (said or [line for line in lines if line] or ["it printed nothing"])[-1][:300]


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it has started, whatever their session. There is nothing that they should finish."""
    family = descendants(process.pid)
    while True:
        for pid in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        family = [pid for pid in family if _alive(pid)]
        if not family:
            return
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Return the processes below one (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue += (below := children.get(queue.pop(), []))
        found += below
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
