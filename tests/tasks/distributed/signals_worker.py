"""Ranks that are signalled: on which step each learns of it. Jobs of 1 and of 3 ranks write <ranks>/rank-N.json."""

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megaswift.tasks.distributed.signals import Stop

from tests.tasks.distributed.forked import fork, wait


def stopped_at(stop: Stop, during, *, steps: int = 1000) -> tuple[int, str | None]:
    """The step after which there is a reason, and which; `during(step)` is what the step does."""
    for step in range(1, steps + 1):
        stop.exchange()
        during(step)
        if reason := stop.reason():
            return step, reason
    return steps, None


def send(number: int, at: int, by: int):
    return lambda step: (step, dist.get_rank()) == (at, by) and os.kill(os.getpid(), number)


def scenarios(rank: int, last: int) -> dict[str, object]:
    found: dict[str, object] = {}
    former = signal.getsignal(signal.SIGUSR1)
    for name, during in {
        "usr1": send(signal.SIGUSR1, at=3, by=last),
        "term": send(signal.SIGTERM, at=5, by=0),
        "nothing": lambda step: None,
    }.items():
        stop = Stop(None)
        assert stop.reason() is None
        found[name] = stopped_at(stop, during, steps=8)
        stop.close()
    found["restored"] = signal.getsignal(signal.SIGUSR1) == former

    stop = Stop(1e-9 if rank == 0 else 60)  # only rank 0's clock counts
    found["time"] = stopped_at(stop, lambda step: None)
    stop.close()
    stop = Stop(1e-9 if rank else 60)
    found["not yet"] = stopped_at(stop, lambda step: None, steps=3)
    stop.close()

    stop = Stop(0)
    stop.exchange()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    stop.reason()
    stop.exchange()
    found["all at once"] = stop.reason()
    stop.close()
    return found


def at_any_moment(rank: int, world: int) -> list[tuple[int, str | None]]:
    """One rank after another is signalled from outside, at a random moment."""
    seeded, found = random.Random(1), []
    for _ in range(20):
        by, after, stop = seeded.randrange(world), seeded.uniform(0, 0.02), Stop(None)
        if rank == by:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
        found.append(stopped_at(stop, lambda step: time.sleep(0.0005 * random.random()), steps=100_000))
        stop.close()
    return found


def cost() -> float:
    """Seconds that a step of 5 ms takes longer, the median."""
    stop, spent = Stop(60), []
    for _ in range(50):
        start = time.perf_counter()
        stop.exchange()
        asked = time.perf_counter()
        time.sleep(0.005)
        answer = time.perf_counter()
        stop.reason()
        spent.append(asked - start + time.perf_counter() - answer)
    stop.close()
    return statistics.median(spent)


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {"scenarios": scenarios(rank, world - 1), "any moment": at_any_moment(rank, world), "cost": cost()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    for world in (1, 3):
        folder = Path(sys.argv[1]) / str(world)
        assert set(wait(fork(world, partial(work, folder), folder))) == {0}, (folder / "err-0").read_text()
