"""Ctrl-C in a run: prints its progress and how to continue, frees its servers, and exits with code 130.

The main thread may wait in a collective, where Python runs no signal handlers. A thread therefore reads the signals'
numbers from a pipe (signal.set_wakeup_fd) and ends the process. No torch: the command line uses this too.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..system import console
from .run_dir import checkpoints

EXIT_INTERRUPTED = 128 + signal.SIGINT
OTHER_FAILED = signal.SIGUSR2  # sent by cli/torchrun.py after another rank has failed
AGAIN = 0.5  # seconds: terminals and `timeout` signal a process and its group, which counts as one Ctrl-C
PATIENCE = 8.0  # seconds for the callbacks
STDERR = 2  # written to by number: the main thread may hold the lock of sys.stderr


@dataclass
class Progress:
    """Progress of a run."""

    folder: Path
    step: int
    max_steps: int
    resumed: Path | None = None  # the checkpoint it started from

    def __str__(self) -> str:
        text = f"Interrupted at step {self.step} of {self.max_steps}. "
        if saved := checkpoints(self.folder):
            return f"{text}Last checkpoint: {saved[-1]}. Add --resume_from_checkpoint auto to continue."
        if self.resumed:
            return f"{text}Last checkpoint: {self.resumed}. Add --resume_from_checkpoint {self.resumed} to continue."
        return f"{text}No checkpoint has been saved."


_progress: Progress | None = None
_callbacks: list[Callable[[], None]] = []
_watching = False  # in this process


def report(progress: Progress) -> None:
    """Record the progress of the run."""
    global _progress
    _progress = progress


def before_exit(callback: Callable[[], None]) -> None:
    """Register a callback for an early end of the run: Ctrl-C, an error, or another failed process."""
    _callbacks.append(callback)


def forget(callback: Callable[[], None]) -> None:
    with suppress(ValueError):
        _callbacks.remove(callback)


def finish() -> None:
    """Run the callbacks of an early end, each once, within PATIENCE seconds."""

    def work() -> None:
        while _callbacks:
            with suppress(Exception):
                _callbacks.pop()()

    if _callbacks:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE)


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process on Ctrl-C within the context, as described above; at once on a second one. Main thread only."""
    global _watching, _progress
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = {number: signal.signal(number, _leave_to_thread) for number in (signal.SIGINT, OTHER_FAILED)}
    former_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()
    _watching = True
    try:
        yield
    finally:
        _watching, _progress = False, None
        signal.set_wakeup_fd(former_writer)
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(writer)


def _leave_to_thread(number: int, frame: object) -> None:
    """Do nothing: Python writes to the pipe only the numbers of signals that have a handler."""


def _forget_in_child() -> None:
    """Restore the handlers in a forked data loader: it has no such thread, and the pipe is its parent's."""
    global _watching
    if _watching:
        _watching = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(OTHER_FAILED, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def _watch(reader: int) -> None:
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] not in (signal.SIGINT, OTHER_FAILED):
            continue
        if first is None:
            first = time.monotonic()
            threading.Thread(target=_end, args=(number[0],), daemon=True).start()
        elif time.monotonic() - first > AGAIN:
            os._exit(EXIT_INTERRUPTED)
    os.close(reader)


def _end(number: int) -> None:
    if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
        text = str(_progress) if _progress else "Interrupted before the first step."
        console.record(text)
        above = "\n" if os.isatty(STDERR) else ""  # the line with the progress bar and ^C
        with suppress(OSError):
            os.write(STDERR, f"{above}{text}\n".encode())
    finish()
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 1)
