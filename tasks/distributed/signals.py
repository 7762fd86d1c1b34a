"""Early stop by a signal or a time limit, at the same step on all ranks."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from .collectives import gloo_group

EXIT_STOPPED = 75  # exit code of a run that stopped early with a checkpoint (EX_TEMPFAIL: retry)
AGAIN = 2.0  # seconds: a scheduler signals each process and torchrun forwards its own, which counts as one signal

STARTED_AT = time.monotonic()  # approximate start of the process
TIME_LIMIT = 1  # codes: the largest over all ranks wins
CODES = {signal.SIGUSR1: 2, signal.SIGHUP: 3, signal.SIGTERM: 4}


def is_ignored(number: signal.Signals) -> bool:
    """Return whether the process was started (nohup) to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class Stop:
    """Stop request, the same on every rank at the same step. In each step, on every rank:

        stop.exchange()              # at its start: begin the exchange, without waiting
        ...
        if reason := stop.reason():  # at its end, when the answers have arrived

    SIGTERM, SIGUSR1 and SIGHUP (a closed terminal) are recorded from construction on and do nothing else, except that a
    SIGTERM repeated after `AGAIN` seconds ends the process at once. Under nohup SIGHUP stays ignored.
    """

    def __init__(self, minutes: float | None):
        """Install the handlers. Every rank calls this, in its main thread.

        `minutes`: time limit of the run, by the clock of rank 0. The ranks communicate over gloo, without synchronising
        devices.
        """
        self._minutes, self._code, self._terminated = minutes, 0, 0.0
        self._deadline = None if minutes is None or dist.get_rank() else STARTED_AT + 60 * minutes
        self._group = gloo_group()
        self._exchanged: tuple[torch.Tensor, dist.Work] | None = None
        handled = [number for number in CODES if not is_ignored(number)]
        self._former = {number: signal.signal(number, self._note) for number in handled}

    def exchange(self) -> None:
        """Begin the exchange with all ranks."""
        if self._group is not None:
            code = torch.tensor([self._local_code()])
            work = dist.all_reduce(code, dist.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._exchanged = code, work

    def reason(self) -> str | None:
        """Return the reason for a stop by the last exchange, for the user; None to go on."""
        code = self._local_code()
        if self._group is not None:
            if self._exchanged is None:
                return None
            vector, work = self._exchanged
            work.wait()
            code = int(vector)
        if code == TIME_LIMIT:
            return f"--exit_duration_in_mins {self._minutes:g} is over"
        return next((number.name for number, signal_code in CODES.items() if signal_code == code), None)

    def close(self) -> None:
        """Restore the signal handlers. Call it where a run continues to its end, not where it stops."""
        for number, former in self._former.items():
            if former is not None:  # None: not installed by Python
                signal.signal(number, former)

    def _local_code(self) -> int:
        over = self._deadline is not None and time.monotonic() > self._deadline
        return self._code or (TIME_LIMIT if over else 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._terminated and time.monotonic() - self._terminated > AGAIN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGTERM:
            self._terminated = self._terminated or time.monotonic()
        self._code = max(self._code, CODES[signal.Signals(number)])
