"""Stopping before the end: a scheduler's signal, or the time that a run may take. All ranks learn of it at one step."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from .collectives import patient_group

EXIT_STOPPED = 75  # of a run that has saved and ended early (EX_TEMPFAIL: try again later)
AGAIN = 2.0  # seconds: schedulers signal each process, and torchrun passes on what it gets: that is one signal

BEGAN = time.monotonic()  # this process, more or less
TIME_IS_OVER = 1  # codes: the largest of all ranks counts
CODES = {signal.SIGUSR1: 2, signal.SIGHUP: 3, signal.SIGTERM: 4}


def is_ignored(number: signal.Signals) -> bool:
    """Whether whoever started this process (nohup) wants it to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class Stop:
    """Whether the run is to stop, the same on every rank at the same step. In each step, on every rank:

        stop.exchange()        # at its start: begins to ask the others, which waits for nobody
        ...
        if reason := stop.reason():  # at its end, when the answer has long come

    From its construction on, SIGTERM, SIGUSR1 and SIGHUP (a terminal that is closed) are noted and do nothing else,
    save for a SIGTERM that comes again later than `AGAIN`: that one ends the process at once. Under nohup SIGHUP stays
    ignored.
    """

    def __init__(self, minutes: float | None):
        """`minutes`: after which the run is to stop, by the clock of rank 0. Every rank calls this, in its main thread.

        The ranks ask each other over gloo: no device is waited for.
        """
        self._minutes, self._code, self._terminated = minutes, 0, 0.0
        self._deadline = None if minutes is None or dist.get_rank() else BEGAN + 60 * minutes
        self._group = patient_group()
        self._exchanged: tuple[torch.Tensor, dist.Work] | None = None
        heeded = [number for number in CODES if not is_ignored(number)]
        self._former = {number: signal.signal(number, self._note) for number in heeded}

    def exchange(self) -> None:
        """Begin to ask all ranks."""
        if self._group is not None:
            code = torch.tensor([self._own_code()])
            work = dist.all_reduce(code, dist.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._exchanged = code, work

    def reason(self) -> str | None:
        """What the last exchange says: why to stop, as a user is told; None where there is no reason."""
        code = self._own_code()
        if self._group is not None:
            if self._exchanged is None:
                return None
            vector, work = self._exchanged
            work.wait()
            code = int(vector)
        if code == TIME_IS_OVER:
            return f"--exit_duration_in_mins {self._minutes:g} is over"
        return next((number.name for number, its in CODES.items() if its == code), None)

    def close(self) -> None:
        """Signals do again what they did before. To be called where a run goes on to its end, not where it stops."""
        for number, former in self._former.items():
            if former is not None:  # else it was not Python's
                signal.signal(number, former)

    def _own_code(self) -> int:
        over = self._deadline is not None and time.monotonic() > self._deadline
        return self._code or (TIME_IS_OVER if over else 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._terminated and time.monotonic() - self._terminated > AGAIN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGTERM:
            self._terminated = self._terminated or time.monotonic()
        self._code = max(self._code, CODES[signal.Signals(number)])
