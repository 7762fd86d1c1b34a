"""Watchdog for hangs: reports the stacks of all ranks and the ranks that block the others, then ends the run."""

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

MIN_LEARNED = 10  # phases before the limit is learned
SLOWDOWN = 10
MIN_LIMIT = 300.0  # seconds: stalls of a file system or a switch last minutes
EXIT_HANGS = 70  # EX_SOFTWARE
STDERR = 2  # written to by number: a hung thread may hold the lock of sys.stderr


@dataclass(frozen=True)
class Status:
    """Progress of a rank."""

    phase: str | None
    count: int  # of the phases entered and ticks so far
    since: float  # seconds since the epoch


class Watchdog:
    """Ends the process when a rank makes no progress for `seconds`.

    In phases with `learn` the limit is lower: SLOWDOWN times the longest of the last 50, at least MIN_LIMIT seconds.

        watchdog = Watchdog(options.ddp_timeout, run.folder)
        watchdog.phase("step 7", learn=True)  # from now on
        with watchdog.phase("saving checkpoint-10"):
            ...  # afterwards it is "step 7" again
        watchdog.tick()  # progress within a phase

    Every rank goes through the same phases and ticks: those with the fewest block the others. Nothing is watched before
    the first phase, nor in phase None. Only the time in which this thread runs counts, so that a suspended process has
    not hung.

    The ranks communicate through the process group's store. The store and the disk may hang themselves: every wait for
    them has a limit. Collectives must have longer timeouts than the watchdog.
    """

    def __init__(self, seconds: float, folder: Path, progress: Callable[[], int] = lambda: 0):
        """Start the watchdog. Every rank calls this.

        `folder`: of the run; stacks go to its subfolder `hang`.
        `progress`: returns a number of this rank that changes with progress of another kind.
        """
        self._progress = progress
        self.seconds, self.folder = seconds, folder / "hang"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._interval = min(max(seconds / 10, 0.05), 10.0)
        self._patience = 4 * self._interval + 2  # for the other ranks to notice and write their stacks
        self._status = Status(None, 0, time.time())
        self._durations: deque[float] = deque(maxlen=50)  # seconds of the last phases with `learn`
        self._phase_start: float | None = None  # start of the present phase if it has `learn`
        self._limit = seconds  # seconds without progress in the present phase
        self._hang_reported, self._closed = threading.Event(), threading.Event()
        self._beats: list[bytes] | None = None  # of the ranks that this one listens to
        self._next_listen = 0.0  # time of the next listening
        # A separate connection: on the process group's own, a rank that waits for a key blocks all other requests.
        shared: Any = _get_default_store()
        self._store = PrefixStore("watchdog", shared.clone())
        for work in [self._watch] + [self._talk] * (self._world > 1):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def phase(self, text: str | None, *, learn: bool = False) -> AbstractContextManager[None]:
        """Enter a phase. As a context manager, return to the former one at its end.

        learn: the phase takes about as long each time.
        """
        former, now = self._status.phase, time.monotonic()
        if self._phase_start is not None:
            self._durations.append(now - self._phase_start)
        self._phase_start = now if learn else None
        learned = learn and len(self._durations) >= MIN_LEARNED
        self._limit = min(self.seconds, max(MIN_LIMIT, SLOWDOWN * max(self._durations))) if learned else self.seconds
        self._enter(text)
        return self._return_to(former)

    def tick(self) -> None:
        """Record progress within the phase."""
        self._enter(self._status.phase)

    def others_work(self) -> None:
        """Record progress while other ranks work, each in its own number of steps, and can be heard.

        Call it repeatedly. Rank 0 listens to all, and the others to rank 0, which reports a hang to them.
        """
        if self._world == 1 or time.monotonic() < self._next_listen:
            return
        self._next_listen = time.monotonic() + 2 * self._interval
        others = range(1, self._world) if self._rank == 0 else [0]
        keys, before = [f"beat-{rank}" for rank in others], self._beats
        with suppress(RuntimeError):  # the store has gone with its host
            self._beats = self._store.multi_get(keys) if self._store.check(keys) else []
            if before is None or all(one != other for one, other in zip(before, self._beats, strict=False)):
                self._status = replace(self._status, since=time.time())

    def close(self) -> None:
        """End the watch. Call it where all ranks have reached the end, not where one fails."""
        self._closed.set()

    def _enter(self, phase: str | None) -> None:
        self._status = Status(phase, self._status.count + 1, time.time())

    @contextmanager
    def _return_to(self, phase: str | None) -> Generator[None]:
        try:
            yield
        finally:
            self._phase_start, self._limit = None, self.seconds
            self._enter(phase)

    def _talk(self) -> None:
        """Publish this rank's status, and listen for a reported hang."""
        with suppress(RuntimeError):  # the store has gone with its host: this rank is still watched
            for beat in count():
                if self._closed.wait(self._interval) or self._hang_reported.is_set():
                    break
                self._store.set(f"beat-{self._rank}", str(beat))
                self._store.set(f"status-{self._rank}", json.dumps(astuple(self._status)))
                if self._store.check(["hangs"]):
                    self._hang_reported.set()

    def _watch(self) -> None:
        idle, seen, last = 0.0, (self._status, self._progress()), time.monotonic()
        while not self._closed.wait(self._interval):
            status, now = self._status, time.monotonic()
            is_idle = status is seen[0] and self._progress() == seen[1] and status.phase is not None
            idle = idle + min(now - last, 2 * self._interval) if is_idle else 0.0
            seen, last = (status, self._progress()), now
            if idle >= self._limit or self._hang_reported.is_set():
                self._end(status)

    def _end(self, status: Status) -> None:
        if not _within(self._patience, self._write_stacks):  # the disk is full or hangs
            faulthandler.dump_traceback(STDERR)
        if self._world == 1:
            self._report(describe({0: status}, silent=[]))
        elif (statuses := _within(3 * self._patience, self._gather)) is None:
            time.sleep(min(self._rank, 3))  # one report is enough: torchrun ends the other ranks with the first
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            description = describe({self._rank: status}, silent=[])
            self._report(
                f"{description}; the store of all ranks at {address} does not answer: rank 0 or its machine has stopped"
            )
        elif statuses:
            self._report(describe(*statuses))
            _within(self._interval, lambda: self._store.set("said", ""))
            time.sleep(0.2)  # for the others: the store may end with this process
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
        """Return the status of all ranks and the silent ones, on the first rank that asks; () on the others."""
        store, deadline = self._store, time.monotonic() + self._patience
        store.set("hangs", "")
        store.set(f"answer-{self._rank}", "")
        store.add("answers", 1)
        with suppress(RuntimeError):  # already reported, and the store has ended with the reporting rank
            while store.add("answers", 0) < self._world and time.monotonic() < deadline:
                time.sleep(self._interval / 4)
            if store.add("tellers", 1) == 1:
                return self._read_statuses()
            store.wait(["said"], timedelta(seconds=self._patience))
        return ()

    def _read_statuses(self) -> tuple[dict[int, Status], list[int]]:
        """Return the published statuses, and the ranks that do not answer."""
        silent = [rank for rank in range(self._world) if not self._store.check([f"answer-{rank}"])]
        reported = [rank for rank in range(self._world) if self._store.check([f"status-{rank}"])]
        values = self._store.multi_get([f"status-{rank}" for rank in reported])
        return {rank: Status(*json.loads(value)) for rank, value in zip(reported, values, strict=True)}, silent

    def _report(self, description: str) -> None:
        limit = "--ddp_timeout" if self._limit == self.seconds else f"{SLOWDOWN} times the slowest of the last steps"
        text = f"error: no progress for {self._limit:.4g} s ({limit}): {description}. Stacks: {self.folder}/"
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())
        _within(self._interval, lambda: console.record(text))  # the disk may hang


def describe(statuses: dict[int, Status], silent: list[int]) -> str:
    """Describe the ranks: first those that do not answer, then those that block the others."""
    parts = []
    if silent:
        last = [_phase(statuses[rank]) for rank in silent if rank in statuses]
        seen = f" (last seen in {' and '.join(dict.fromkeys(last))})" if last else ""
        parts.append(f"{_ranks(silent)} {_verb(silent, 'does', 'do')} not answer{seen}")
    answering = {rank: status for rank, status in statuses.items() if rank not in silent}
    positions = sorted({(status.phase is None, status.count, status.phase) for status in answering.values()})
    for position in positions:
        ranks = [rank for rank, status in answering.items() if (status.count, status.phase) == position[1:]]
        first = min((answering[rank] for rank in ranks), key=lambda status: status.since)
        blocks = not silent and position is positions[0] and position[1] < positions[-1][1]
        what = f"{_verb(ranks, 'blocks', 'block')} the others" if blocks else _verb(ranks, "is", "are")
        since = f"{datetime.fromtimestamp(first.since):%Y-%m-%d %H:%M:%S}"
        parts.append(f"{_ranks(ranks)} {what} in {_phase(first)} since {since}")
    return "; ".join(parts)


def _phase(status: Status) -> str:
    return repr(status.phase) if status.phase else "no watched phase"


def _verb(ranks: list[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _ranks(ranks: Iterable[int]) -> str:
    """Return [0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(zip(count(), sorted(ranks)), lambda at: at[1] - at[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _within[T](seconds: float, do: Callable[[], T]) -> T | None:
    """Return `do()`, None where it fails or takes longer than `seconds`."""
    results: list[T] = []

    def work() -> None:
        with suppress(Exception):
            results.append(do())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
