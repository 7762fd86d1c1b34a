"""Early stop by a signal or a time limit, at the same step on all ranks."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from .collectives import gloo_group

EXIT_STOPPED = 75  # exit code of a run that stopped early with a checkpoint (EX_TEMPFAIL: retry)
REPEAT_SECONDS = 2.0  # a scheduler signals each process and torchrun forwards its own signal: both count as one

STARTED_AT = time.monotonic()  # approximate start of the process
TIME_LIMIT = 1  # stop codes: the largest one over all ranks wins
CODES = {signal.SIGUSR1: 2, signal.SIGHUP: 3, signal.SIGTERM: 4}


def is_ignored(number: signal.Signals) -> bool:
    """Return whether the process was started (nohup) to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class Stop:
    """Stop request that every rank sees at the same step. Use in each step, on every rank:

        stop.exchange()              # at the start: begin the exchange, without waiting
        ...
        if reason := stop.reason():  # at the end, when the answers have arrived

    Once constructed, it only records SIGTERM, SIGUSR1 and SIGHUP (a closed terminal). A SIGTERM repeated after
    REPEAT_SECONDS ends the process at once. Under nohup SIGHUP stays ignored.
    """

    def __init__(self, minutes: float | None):
        """Install the handlers. Every rank calls this, in its main thread.

        `minutes`: time limit of the run, by the clock of rank 0. The ranks communicate over gloo, without synchronising
        devices.
        """
        self._minutes, self._code, self._first_sigterm = minutes, 0, 0.0
        self._deadline = None if minutes is None or dist.get_rank() else STARTED_AT + 60 * minutes
        self._group = gloo_group()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        signals = [number for number in CODES if not is_ignored(number)]
        self._previous_handlers = {number: signal.signal(number, self._handle) for number in signals}

    def exchange(self) -> None:
        """Begin the exchange with all ranks."""
        if self._group is not None:
            code = torch.tensor([self._local_code()])
            work = dist.all_reduce(code, dist.ReduceOp.MAX, self._group, async_op=True)
            assert work is not None
            self._pending = code, work

    def reason(self) -> str | None:
        """Return the reason to stop according to the last exchange, as text for the user; None to continue."""
        code = self._local_code()
        if self._group is not None:
            if self._pending is None:
                return None
            vector, work = self._pending
            work.wait()
            code = int(vector)
        if code == TIME_LIMIT:
            return f"--exit_duration_in_mins {self._minutes:g} is over"
        return next((number.name for number, signal_code in CODES.items() if signal_code == code), None)

    def close(self) -> None:
        """Restore the signal handlers. Call this where a run reaches its end, not where it stops early."""
        for number, previous in self._previous_handlers.items():
            if previous is not None:  # None: Python did not install it
                signal.signal(number, previous)

    def _local_code(self) -> int:
        is_over = self._deadline is not None and time.monotonic() > self._deadline
        return self._code or (TIME_LIMIT if is_over else 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._first_sigterm and time.monotonic() - self._first_sigterm > REPEAT_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if number == signal.SIGTERM:
            self._first_sigterm = self._first_sigterm or time.monotonic()
        self._code = max(self._code, CODES[signal.Signals(number)])
