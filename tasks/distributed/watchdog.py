"""Watchdog that ends a hung run: reports the stacks of all ranks and which ranks block the others."""

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

MIN_LEARNED = 10  # durations from which a limit is learned
SLOWDOWN = 10
MIN_LIMIT = 300.0  # seconds: a file system or a network switch may stall for minutes
EXIT_HANGS = 70  # EX_SOFTWARE
STDERR = 2  # descriptor: a hung thread may hold the lock of sys.stderr


@dataclass(frozen=True)
class Status:
    """Progress of a rank."""

    phase: str | None
    count: int  # phases entered and ticks so far
    since: float  # seconds since the epoch


class Watchdog:
    """Thread that ends the process when a rank makes no progress for `seconds`.

    Phases with `learn` have a lower limit: SLOWDOWN times the longest of the last 50 of them, at least MIN_LIMIT
    seconds.

        watchdog = Watchdog(options.ddp_timeout, run.folder)
        watchdog.phase("step 7", learn=True)  # from now on
        with watchdog.phase("saving checkpoint-10"):
            ...  # afterwards it is "step 7" again
        watchdog.tick()  # progress within a phase

    Every rank goes through the same phases and ticks, so the ranks with the fewest block the others. Nothing is watched
    before the first phase, nor in phase None. Only the time in which this thread runs counts: a suspended process is
    not a hang.

    The ranks communicate through the process group's store. Every wait for the store or the disk has a limit, since
    they may hang too. Collectives must have longer timeouts than the watchdog.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        progress: Callable[[], int] = lambda: 0,
        on_phase: Callable[[str | None], None] = lambda phase: None,
    ):
        """Start the watchdog. Every rank calls this.

        `folder`: folder of the run; stacks go to its subfolder `hang`.
        `progress`: returns a number that changes when this rank makes progress other than phases and ticks.
        `on_phase`: is called with each phase that is entered.
        """
        self._progress, self._on_phase = progress, on_phase
        self.seconds, self.folder = seconds, folder / "hang"
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._interval = min(max(seconds / 10, 0.05), 10.0)
        # Seconds for the other ranks to notice a hang and write their stacks.
        self._answer_timeout = 4 * self._interval + 2
        self._status = Status(None, 0, time.time())
        self._durations: deque[float] = deque(maxlen=50)  # seconds of the latest phases with `learn`
        self._phase_start: float | None = None  # start of the current phase if it has `learn`
        self._limit = seconds  # allowed seconds without progress in the current phase
        self._hang_reported, self._closed = threading.Event(), threading.Event()
        self._heard_beats: list[bytes] | None = None  # last heartbeats of the ranks that this rank listens to
        self._next_listen = 0.0  # time to read the heartbeats again
        # A separate connection: on the process group's, a rank that waits for a key blocks all its other requests.
        shared: Any = _get_default_store()
        self._store = PrefixStore("watchdog", shared.clone())
        for work in [self._watch] + [self._publish] * (self._world > 1):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def phase(self, text: str | None, *, learn: bool = False) -> AbstractContextManager[None]:
        """Enter a phase. As a context manager, return to the previous phase at the end.

        learn: the phase takes about as long each time it is entered.
        """
        previous, now = self._status.phase, time.monotonic()
        if self._phase_start is not None:
            self._durations.append(now - self._phase_start)
        self._phase_start = now if learn else None
        is_learned = learn and len(self._durations) >= MIN_LEARNED
        self._limit = min(self.seconds, max(MIN_LIMIT, SLOWDOWN * max(self._durations))) if is_learned else self.seconds
        self._enter(text)
        self._on_phase(text)
        return self._restore_phase(previous)

    def tick(self) -> None:
        """Record progress within the current phase."""
        self._enter(self._status.phase)

    def tick_while_waiting(self) -> None:
        """Record progress as long as the ranks that this rank waits for send heartbeats.

        Call it repeatedly while ranks work in different numbers of steps. Rank 0 listens to all ranks, and they listen
        to rank 0, which reports a hang to them.
        """
        if self._world == 1 or time.monotonic() < self._next_listen:
            return
        self._next_listen = time.monotonic() + 2 * self._interval
        peers = range(1, self._world) if self._rank == 0 else [0]
        keys, before = [f"beat-{rank}" for rank in peers], self._heard_beats
        with suppress(RuntimeError):  # the host of the store has exited
            self._heard_beats = self._store.multi_get(keys) if self._store.check(keys) else []
            if before is None or all(old != new for old, new in zip(before, self._heard_beats, strict=False)):
                self._status = replace(self._status, since=time.time())

    def close(self) -> None:
        """Stop watching. Call this where all ranks have reached the end, not where a rank fails."""
        self._closed.set()

    def _enter(self, phase: str | None) -> None:
        self._status = Status(phase, self._status.count + 1, time.time())

    @contextmanager
    def _restore_phase(self, phase: str | None) -> Generator[None]:
        try:
            yield
        finally:
            self._phase_start, self._limit = None, self.seconds
            self._enter(phase)
            self._on_phase(phase)

    def _publish(self) -> None:
        """Publish this rank's heartbeat and status, and listen for a reported hang."""
        with suppress(RuntimeError):  # the host of the store has exited; `_watch` does not need it
            for beat in count():
                if self._closed.wait(self._interval) or self._hang_reported.is_set():
                    break
                self._store.set(f"beat-{self._rank}", str(beat))
                self._store.set(f"status-{self._rank}", json.dumps(astuple(self._status)))
                if self._store.check(["hangs"]):
                    self._hang_reported.set()

    def _watch(self) -> None:
        idle, last_progress, last_check = 0.0, (self._status, self._progress()), time.monotonic()
        while not self._closed.wait(self._interval):
            status, now = self._status, time.monotonic()
            is_idle = status is last_progress[0] and self._progress() == last_progress[1] and status.phase is not None
            idle = idle + min(now - last_check, 2 * self._interval) if is_idle else 0.0
            last_progress, last_check = (status, self._progress()), now
            if idle >= self._limit or self._hang_reported.is_set():
                self._report_and_exit(status)

    def _report_and_exit(self, status: Status) -> None:
        if not _try_within(self._answer_timeout, self._write_stacks):  # the disk is full or hangs
            faulthandler.dump_traceback(STDERR)
        if self._world == 1:
            self._report(describe({0: status}, silent=[]))
        elif (statuses := _try_within(3 * self._answer_timeout, self._gather)) is None:
            time.sleep(min(self._rank, 3))  # one report is enough: the first exit makes torchrun end the other ranks
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            description = describe({self._rank: status}, silent=[])
            self._report(
                f"{description}; the store of all ranks at {address} does not answer: rank 0 or its machine has stopped"
            )
        elif statuses:
            self._report(describe(*statuses))
            _try_within(self._interval, lambda: self._store.set("said", ""))
            time.sleep(0.2)  # lets the other ranks read it: the store may end with this process
        os._exit(EXIT_HANGS)

    def _write_stacks(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank-{self._rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        with suppress(Exception):  # a private API of torch
            recorder: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
            dump = recorder._dump_nccl_trace_json if dist.get_backend() == "nccl" else recorder._dump_fr_trace_json
            (self.folder / f"rank-{self._rank}-collectives.json").write_bytes(dump())
        return True

    def _gather(self) -> tuple[dict[int, Status], list[int]] | tuple[()]:
        """Return all statuses and the ranks that do not answer, on the first rank that asks; () on the other ranks."""
        store, deadline = self._store, time.monotonic() + self._answer_timeout
        store.set("hangs", "")
        store.set(f"answer-{self._rank}", "")
        store.add("answers", 1)
        with suppress(RuntimeError):  # a rank has reported already, and the store has ended with it
            while store.add("answers", 0) < self._world and time.monotonic() < deadline:
                time.sleep(self._interval / 4)
            if store.add("tellers", 1) == 1:
                return self._read_statuses()
            store.wait(["said"], timedelta(seconds=self._answer_timeout))
        return ()

    def _read_statuses(self) -> tuple[dict[int, Status], list[int]]:
        """Return the published statuses and the ranks that do not answer."""
        silent = [rank for rank in range(self._world) if not self._store.check([f"answer-{rank}"])]
        reported = [rank for rank in range(self._world) if self._store.check([f"status-{rank}"])]
        values = self._store.multi_get([f"status-{rank}" for rank in reported])
        return {rank: Status(*json.loads(value)) for rank, value in zip(reported, values, strict=True)}, silent

    def _report(self, description: str) -> None:
        limit = "--ddp_timeout" if self._limit == self.seconds else f"{SLOWDOWN} times the slowest of the last steps"
        text = f"error: no progress for {self._limit:.4g} s ({limit}): {description}. Stacks: {self.folder}/"
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())
        _try_within(self._interval, lambda: console.record(text))  # the disk may hang


def describe(statuses: dict[int, Status], silent: list[int]) -> str:
    """Describe the ranks that do not answer, then those that block the others, then the rest."""
    parts = []
    if silent:
        phases = [_phase_text(statuses[rank]) for rank in silent if rank in statuses]
        last_phases = f" (last seen in {' and '.join(dict.fromkeys(phases))})" if phases else ""
        parts.append(f"{_ranks_text(silent)} {_verb(silent, 'does', 'do')} not answer{last_phases}")
    answering = {rank: status for rank, status in statuses.items() if rank not in silent}
    positions = sorted({(status.phase is None, status.count, status.phase) for status in answering.values()})
    for position in positions:
        ranks = [rank for rank, status in answering.items() if (status.count, status.phase) == position[1:]]
        first = min((answering[rank] for rank in ranks), key=lambda status: status.since)
        is_blocking = not silent and position is positions[0] and position[1] < positions[-1][1]
        state = f"{_verb(ranks, 'blocks', 'block')} the others" if is_blocking else _verb(ranks, "is", "are")
        since = f"{datetime.fromtimestamp(first.since):%Y-%m-%d %H:%M:%S}"
        parts.append(f"{_ranks_text(ranks)} {state} in {_phase_text(first)} since {since}")
    return "; ".join(parts)


def _phase_text(status: Status) -> str:
    return repr(status.phase) if status.phase else "no watched phase"


def _verb(ranks: list[int], singular: str, plural: str) -> str:
    return singular if len(ranks) == 1 else plural


def _ranks_text(ranks: Iterable[int]) -> str:
    """Return [0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs = [
        [rank for _, rank in run] for _, run in groupby(zip(count(), sorted(ranks)), lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _try_within[T](seconds: float, do: Callable[[], T]) -> T | None:
    """Return `do()`; None if it fails or takes longer than `seconds`."""
    results: list[T] = []

    def work() -> None:
        with suppress(Exception):
            results.append(do())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
