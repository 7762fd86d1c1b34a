"""Handling of Ctrl-C: prints the run's progress and how to continue, frees its servers, and exits with code 130.

Python runs no signal handlers while the main thread waits in a collective. A thread therefore reads the signals'
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
REPEAT_INTERVAL = 0.5  # seconds: terminals and `timeout` signal a process and its group, which counts as one Ctrl-C
CALLBACK_TIMEOUT = 8.0  # seconds for the callbacks
STDERR = 2  # file descriptor, because the main thread may hold the lock of sys.stderr


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
_is_watching = False  # whether this process has the thread


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
        thread.join(CALLBACK_TIMEOUT)


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process on Ctrl-C within the context as described above; on a second Ctrl-C at once. Main thread only."""
    global _is_watching, _progress
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former_handlers = {number: signal.signal(number, _ignore_signal) for number in (signal.SIGINT, OTHER_FAILED)}
    former_wakeup_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="interrupt", daemon=True).start()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching, _progress = False, None
        signal.set_wakeup_fd(former_wakeup_fd)
        for number, handler in former_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(writer)


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing. Python writes only the numbers of signals with a handler to the pipe."""


def _restore_handlers_in_child() -> None:
    """Restore the handlers in a forked data loader, which has no such thread and shares its parent's pipe."""
    global _is_watching
    if _is_watching:
        _is_watching = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(OTHER_FAILED, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_handlers_in_child)


def _watch(reader: int) -> None:
    first_signal: float | None = None
    while number := os.read(reader, 1):
        if number[0] not in (signal.SIGINT, OTHER_FAILED):
            continue
        if first_signal is None:
            first_signal = time.monotonic()
            threading.Thread(target=_end, args=(number[0],), daemon=True).start()
        elif time.monotonic() - first_signal > REPEAT_INTERVAL:
            os._exit(EXIT_INTERRUPTED)
    os.close(reader)


def _end(number: int) -> None:
    if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
        text = str(_progress) if _progress else "Interrupted before the first step."
        console.record(text)
        newline = "\n" if os.isatty(STDERR) else ""  # after the line with the progress bar and ^C
        with suppress(OSError):
            os.write(STDERR, f"{newline}{text}\n".encode())
    finish()
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 1)
