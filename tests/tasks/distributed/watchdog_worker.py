"""Jobs whose ranks hang, each in its own way, all at once. Writes codes.json (job -> exit codes) into a folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.tasks.distributed.watchdog import Watchdog

from tests.tasks.distributed.forked import fork, wait

SECONDS = 2.0


def begin(folder: Path) -> Watchdog:
    dist.init_process_group("gloo")
    watchdog = Watchdog(SECONDS, folder)
    dist.barrier()
    return watchdog


def hang(folder: Path, culprit: int, do: Callable[[], None], *, where: str = "step 7") -> None:
    """The rank `culprit` does `do` in its phase `where`; the others wait for it in a collective of "step 7"."""
    watchdog = begin(folder)
    for phase in ("step 6", "data of step 7", "step 7"):
        watchdog.phase(phase)
        if dist.get_rank() == culprit and phase == where:
            time.sleep(0.5)  # all know where it is
            do()
    dist.all_reduce(torch.zeros(1))


def sleep() -> None:
    time.sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def told(folder: Path) -> None:
    """Rank 1 hangs while the others are in no phase."""
    watchdog = begin(folder)
    watchdog.phase("saving" if dist.get_rank() == 1 else None)
    sleep()


def slow(folder: Path) -> None:
    """Nothing hangs: ticks, contexts, no phase."""
    watchdog = begin(folder)
    time.sleep(1.5 * SECONDS)
    watchdog.phase("evaluation")
    for _ in range(6):
        time.sleep(SECONDS / 3)
        watchdog.tick()
    with watchdog.phase(None):
        time.sleep(1.5 * SECONDS)
    dist.barrier()
    watchdog.close()
    time.sleep(1.5 * SECONDS)


def saving(folder: Path, culprit: int) -> None:
    """All wait for what the others do in the background; the rank `culprit` stops meanwhile, if there is one."""
    watchdog = begin(folder)
    watchdog.phase("saving")
    end = time.monotonic() + (60 if culprit >= 0 else 3 * SECONDS)
    while time.monotonic() < end:
        watchdog.tick_while_waiting()
        time.sleep(0.02)
        if dist.get_rank() == culprit and time.monotonic() > end - 60 + SECONDS:
            stop()
    dist.barrier()
    watchdog.close()


def suspended(folder: Path) -> None:
    """Stopped for long, and then on its way again."""
    watchdog = begin(folder)
    watchdog.phase("step 7")
    subprocess.Popen(["sh", "-c", f"sleep {2 * SECONDS}; kill -CONT {os.getpid()}"])
    time.sleep(SECONDS / 4)  # the phase is seen
    stop()
    time.sleep(SECONDS / 4)
    watchdog.close()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "disk").mkdir()
    (root / "disk" / "hang").write_text("no folder can be made here")
    jobs = {
        "data": (3, partial(hang, root / "data", 1, sleep, where="data of step 7")),
        "stopped": (3, partial(hang, root / "stopped", 2, stop)),
        "host": (3, partial(hang, root / "host", 0, stop)),
        "loop": (3, partial(hang, root / "loop", 1, loop)),
        "told": (3, partial(told, root / "told")),
        "disk": (2, partial(hang, root / "disk", 1, sleep)),
        "one": (1, partial(hang, root / "one", 0, sleep)),
        "saving": (3, partial(saving, root / "saving", 2)),
        "slow": (2, partial(slow, root / "slow")),
        "saved": (3, partial(saving, root / "saved", -1)),
        "suspended": (1, partial(suspended, root / "suspended")),
    }
    pids = {name: fork(world, work, root / name) for name, (world, work) in jobs.items()}
    codes: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda name=name: codes.update({name: wait(pids[name])})) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (root / "codes.json").write_text(json.dumps(codes))
