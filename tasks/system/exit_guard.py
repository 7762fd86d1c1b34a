"""Guard against a process that ends a run early with exit code 0."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from . import console
from .plugins import line_of

STDERR = 2  # descriptor: os._exit does not flush streams


@contextmanager
def guarded_exit() -> Iterator[None]:
    """Turn os._exit(0) within the context into exit code 1 with a message, and sys.exit(...) into a RuntimeError.

    Plugins and workers of libraries may call them. A supervising parent process would know less about the cause
    and would have to forward signals. Child processes are not affected: multiprocessing ends them by os._exit(0).
    """
    pid, exit_at_once = os.getpid(), os._exit

    def guarded(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:
            text = f"error: {_message('os._exit(0)', sys._getframe(1))}"
            console.record(text)
            os.write(STDERR, f"{text}\n".encode())
            status = 1
        exit_at_once(status)

    os._exit = guarded
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise RuntimeError(_message(f"sys.exit({code})", error.__traceback__)) from error
    finally:
        os._exit = exit_at_once


def _message(call: str, origin: TracebackType | FrameType | None) -> str:
    return f"{line_of(origin, None)} called {call} before the end of the run. Remove that call, or raise an exception"
