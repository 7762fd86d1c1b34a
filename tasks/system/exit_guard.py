"""Keeps a run that has not reached its last line from ending as a success, whoever ends its process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from . import console
from .plugins import place_of

STDERR = 2  # written to by its number: os._exit flushes nothing


@contextmanager
def guarded_exit() -> Iterator[None]:
    """Within, os._exit(0) ends this process with 1 and says who called it; sys.exit(...) is a RuntimeError.

    A plugin, or a library's worker, may call either. A supervising parent would see less, and signals would no longer
    be the run's own. Children are left alone: multiprocessing ends them by os._exit(0).
    """
    pid, exit_at_once = os.getpid(), os._exit

    def guarded(status: Any) -> NoReturn:
        if status == 0 and os.getpid() == pid:
            said = f"error: {_ended('os._exit(0)', sys._getframe(1))}"
            console.record(said)
            os.write(STDERR, f"{said}\n".encode())
            status = 1
        exit_at_once(status)

    os._exit = guarded
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise RuntimeError(_ended(f"sys.exit({code})", error.__traceback__)) from error
    finally:
        os._exit = exit_at_once


def _ended(call: str, where: Any) -> str:
    return f"{place_of(where, None)} called {call} before the end of the run. Remove that call, or raise an exception"
