"""Time limits of math-verify outside the main thread.

math-verify limits its time by a signal, which only the main thread can receive: in other threads it raises ValueError.
Rewards run in threads, and plugins that catch all errors of `parse` and `verify` would silently score 0.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any


def allow_time_limits_in_threads() -> None:
    """Replace math-verify's time limit, outside the main thread, by an exception that a timer raises in the thread.

    Like the signal, it takes effect between two instructions of Python, not within a long computation in C.
    """
    try:
        from math_verify import grader, parser
    except ImportError:  # not installed, so that no plugin uses it
        return
    for module in (parser, grader):
        names = vars(module)
        if not isinstance(names["timeout"], ThreadTimeLimit):
            names["timeout"] = ThreadTimeLimit(names["timeout"])


class ThreadTimeLimit:
    """Replacement of `math_verify.utils.timeout`, a function that returns a decorator."""

    def __init__(self, original: Callable):
        self._original = original

    def __call__(self, timeout_seconds: float | None = 10) -> Callable[[Callable], Callable]:
        if not timeout_seconds or timeout_seconds <= 0:
            return lambda function: function
        seconds = timeout_seconds

        def decorate(function: Callable) -> Callable:
            def call(*arguments: Any, **settings: Any) -> Any:
                if threading.current_thread() is threading.main_thread():
                    return self._original(timeout_seconds=seconds)(function)(*arguments, **settings)
                return _call_in_thread(seconds, function, *arguments, **settings)

            return call

        return decorate


def _call_in_thread(seconds: float, function: Callable, *arguments: Any, **settings: Any) -> Any:
    from math_verify.errors import TimeoutException

    thread, lock = threading.get_ident(), threading.Lock()
    is_running = True

    def expire() -> None:
        with lock:
            if is_running:
                _raise_in(thread, TimeoutException)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        return function(*arguments, **settings)
    finally:
        with lock:
            is_running = False
        timer.cancel()


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
