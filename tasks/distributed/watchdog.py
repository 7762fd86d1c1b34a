"""A run that hangs: found, told with the stacks of all ranks and with those that hold the others up, and ended."""

import faulthandler
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timedelta
from itertools import count, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..system import console

LEARNED_FROM = 10  # phases
SLOWEST = 10
LEAST = 300.0  # seconds: a file system or a switch that hesitates comes back within minutes
EXIT_HANGS = 70  # EX_SOFTWARE
STDERR = 2  # written to by its number: who hangs may hold the lock of sys.stderr


@dataclass(frozen=True)
class Status:
    """Where a rank is."""

    phase: str | None
    count: int  # of the phases entered and ticks so far
    since: float  # seconds since the epoch


class Watchdog:
    """Ends the process where this rank, or another that says so, makes no progress for `seconds`.

    In phases that `learn` it ends sooner: after SLOWEST times the longest of the last 50, and LEAST seconds at least.

        watchdog = Watchdog(options.ddp_timeout, run.folder)
        watchdog.phase("step 7", learn=True)  # from now on
        with watchdog.phase("saving checkpoint-10"):
            ...  # and afterwards it is "step 7" again
        watchdog.tick()  # progress within a phase

    Every rank goes through the same phases and ticks: those with the fewest hold the others up. Nothing is watched
    before the first phase, nor in phase None. A process that was suspended and goes on has not hung: only the time in
    which this thread runs counts.

    The ranks tell each other through the process group's store. It may be what hangs, as may the disk: neither is
    waited for without a limit. Collectives must not give up before: their own timeouts are to be longer.
    """

    def __init__(self, seconds: float, folder: Path, progress: Callable[[], int] = lambda: 0):
        """`folder`: of the run; stacks go to its subfolder `hang`. Every rank calls this.

        `progress`: a number of this rank that changes while there is progress of another kind.
        """
        self._progress = progress
        self.seconds, self.folder = seconds, folder / "hang"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._interval = min(max(seconds / 10, 0.05), 10.0)
        self._patience = 4 * self._interval + 2  # in which the others notice and write their stacks
        self._status = Status(None, 0, time.time())
        self._durations: deque[float] = deque(maxlen=50)  # seconds of the last phases that have a learned limit
        self._learns: float | None = None  # when the present one began, if it does
        self._limit = seconds  # without progress, in the present phase
        self._told, self._closed = threading.Event(), threading.Event()
        self._beats: list[bytes] | None = None  # of those that this rank listens to
        self._listens = 0.0  # when it does so again
        # A connection of its own: on the process group's nothing else is sent while a rank waits for a key.
        shared: Any = _get_default_store()
        self._store = PrefixStore("watchdog", shared.clone())
        for work in [self._watch] + [self._talk] * (self._world > 1):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def phase(self, text: str | None, *, learn: bool = False) -> AbstractContextManager[None]:
        """This rank has come to `text`. As a context it returns to the phase of before.

        learn: a phase that takes about as long each time.
        """
        former, now = self._status.phase, time.monotonic()
        if self._learns is not None:
            self._durations.append(now - self._learns)
        self._learns = now if learn else None
        learned = learn and len(self._durations) >= LEARNED_FROM
        self._limit = min(self.seconds, max(LEAST, SLOWEST * max(self._durations))) if learned else self.seconds
        self._enter(text)
        return self._return_to(former)

    def tick(self) -> None:
        """This rank has made progress in the same phase."""
        self._enter(self._status.phase)

    def others_work(self) -> None:
        """The same, where other ranks make it, each in its own number of steps: as long as these are heard of.

        To be called again and again. Rank 0 listens to all, and the others to rank 0, which tells them if it hangs.
        """
        if self._world == 1 or time.monotonic() < self._listens:
            return
        self._listens = time.monotonic() + 2 * self._interval
        others = range(1, self._world) if self._rank == 0 else [0]
        keys, before = [f"beat-{rank}" for rank in others], self._beats
        with suppress(RuntimeError):  # the store has gone with its host
            self._beats = self._store.multi_get(keys) if self._store.check(keys) else []
            if before is None or all(one != other for one, other in zip(before, self._beats, strict=False)):
                self._status = replace(self._status, since=time.time())

    def close(self) -> None:
        """Watch no more. To be called where all ranks have come to the end; not where one fails."""
        self._closed.set()

    def _enter(self, phase: str | None) -> None:
        self._status = Status(phase, self._status.count + 1, time.time())

    @contextmanager
    def _return_to(self, phase: str | None) -> Generator[None]:
        try:
            yield
        finally:
            self._learns, self._limit = None, self.seconds
            self._enter(phase)

    def _talk(self) -> None:
        """Tell the others where this rank is, and hear whether one of them says that the run hangs."""
        with suppress(RuntimeError):  # the store has gone with its host: what happens here can still be watched
            for beat in count():
                if self._closed.wait(self._interval) or self._told.is_set():
                    break
                self._store.set(f"beat-{self._rank}", str(beat))
                self._store.set(f"status-{self._rank}", json.dumps(astuple(self._status)))
                if self._store.check(["hangs"]):
                    self._told.set()

    def _watch(self) -> None:
        idle, seen, last = 0.0, (self._status, self._progress()), time.monotonic()
        while not self._closed.wait(self._interval):
            status, now = self._status, time.monotonic()
            stands = status is seen[0] and self._progress() == seen[1] and status.phase is not None
            idle = idle + min(now - last, 2 * self._interval) if stands else 0.0
            seen, last = (status, self._progress()), now
            if idle >= self._limit or self._told.is_set():
                self._end(status)

    def _end(self, status: Status) -> None:
        if not _within(self._patience, self._write_stacks):  # the disk is full, or is what hangs
            faulthandler.dump_traceback(STDERR)
        if self._world == 1:
            self._say(described({0: status}, silent=[]))
        elif (found := _within(3 * self._patience, self._gather)) is None:
            time.sleep(min(self._rank, 3))  # one of them is enough: when it ends, torchrun ends the others
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            here = described({self._rank: status}, silent=[])
            self._say(f"{here}; the store of all ranks at {address} does not answer: rank 0 or its machine is stopped")
        elif found:
            self._say(described(*found))
            _within(self._interval, lambda: self._store.set("said", ""))
            time.sleep(0.2)  # for the others to hear it: the store may end with this process
        os._exit(EXIT_HANGS)

    def _write_stacks(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self._rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        with suppress(Exception):  # private to torch
            recorder: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
            dump = recorder._dump_nccl_trace_json if dist.get_backend() == "nccl" else recorder._dump_fr_trace_json
            (self.folder / f"rank-{self._rank}-collectives.json").write_bytes(dump())
        return True

    def _gather(self) -> tuple[dict[int, Status], list[int]] | tuple[()]:
        """Where all ranks are, and which do not answer: for the first that knows. For the others nothing, as soon as
        that one has said it."""
        store, deadline = self._store, time.monotonic() + self._patience
        store.set("hangs", "")
        store.set(f"answer-{self._rank}", "")
        store.add("answers", 1)
        with suppress(RuntimeError):  # it has been said, and the store has ended with the rank that said it
            while store.add("answers", 0) < self._world and time.monotonic() < deadline:
                time.sleep(self._interval / 4)
            if store.add("tellers", 1) == 1:
                return self._known()
            store.wait(["said"], timedelta(seconds=self._patience))
        return ()

    def _known(self) -> tuple[dict[int, Status], list[int]]:
        """Where the ranks were that have said it, and the ranks that do not answer."""
        silent = [rank for rank in range(self._world) if not self._store.check([f"answer-{rank}"])]
        known = [rank for rank in range(self._world) if self._store.check([f"status-{rank}"])]
        values = self._store.multi_get([f"status-{rank}" for rank in known])
        return {rank: Status(*json.loads(value)) for rank, value in zip(known, values, strict=True)}, silent

    def _say(self, where: str) -> None:
        why = "--ddp_timeout" if self._limit == self.seconds else f"{SLOWEST} times the slowest of the last steps"
        text = f"error: no progress for {self._limit:.4g} s ({why}): {where}. Stacks: {self.folder}/"
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())
        _within(self._interval, lambda: console.record(text))  # the disk may be what hangs


def described(statuses: dict[int, Status], silent: list[int]) -> str:
    """Where the ranks are; first those that do not answer, then those that hold the others up."""
    parts = []
    if silent:
        last = [_phase(statuses[rank]) for rank in silent if rank in statuses]
        seen = f" (last seen in {' and '.join(dict.fromkeys(last))})" if last else ""
        parts.append(f"{_ranks(silent)} {_verb(silent, 'does', 'do')} not answer{seen}")
    answering = {rank: status for rank, status in statuses.items() if rank not in silent}
    places = sorted({(status.phase is None, status.count, status.phase) for status in answering.values()})
    for place in places:
        there = [rank for rank, status in answering.items() if (status.count, status.phase) == place[1:]]
        first = min((answering[rank] for rank in there), key=lambda status: status.since)
        holds = not silent and place is places[0] and place[1] < places[-1][1]
        what = f"{_verb(there, 'holds', 'hold')} the others up" if holds else _verb(there, "is", "are")
        since = f"{datetime.fromtimestamp(first.since):%Y-%m-%d %H:%M:%S}"
        parts.append(f"{_ranks(there)} {what} in {_phase(first)} since {since}")
    return "; ".join(parts)


def _phase(status: Status) -> str:
    return repr(status.phase) if status.phase else "no phase that is watched"


def _verb(ranks: list[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _ranks(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5" """
    runs = [[rank for _, rank in run] for _, run in groupby(zip(count(), sorted(ranks)), lambda at: at[1] - at[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _within[T](seconds: float, do: Callable[[], T]) -> T | None:
    """What `do()` returns; None where it fails, or has not come back in `seconds`."""
    results: list[T] = []

    def work() -> None:
        with suppress(Exception):
            results.append(do())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
