"""Ranks of a job that need nothing but torch: forked from one process, some of which may stop or be killed."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(world: int, work: Callable[[], None], folder: Path) -> list[int]:
    """The pids of `world` processes that do `work()`; what rank N prints is in the file `folder`/err-N."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if not pids[-1]:
            os._exit(_become(rank, world, port, work, folder / f"err-{rank}"))
    return pids


def wait(pids: list[int], seconds: float = 90) -> list[int]:
    """Their exit codes, -9 for those that did not end in time, or are stopped where all others have failed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids):
        left = [pid for pid in pids if pid not in codes]
        over = time.monotonic() > deadline
        if over or (any(codes.values()) and all(_stopped(pid) for pid in left)):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def _become(rank: int, world: int, port: int, work: Callable[[], None], file: Path) -> int:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        work()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
