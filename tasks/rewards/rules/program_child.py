"""Execution of a program that a model wrote, within the limits of its process.

`execute` runs in a process forked for one test. Its result is in the files that it may write: standard output, or the
result file for calls of a function and for assertions. The expected values are not in this process, so a program cannot
read them; the token that confirms passed assertions is in the caller's local variables alone.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from .seccomp import install_filter

BYTES = 2 << 30  # address space of a test
FILE_BYTES = 16 << 20  # output of a test
RESULT = 3  # file descriptor of the result file
PR_SET_PDEATHSIG = 1
CAPABILITY_VERSION = 0x20080522  # version of capset(2)'s structures
# Names that programs of contests use without importing them.
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys, time
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
pow = __builtins__["pow"] if isinstance(__builtins__, dict) else __builtins__.pow
"""


@dataclass(frozen=True)
class Execution:
    """One test of a program, without what it must give.

    function: name of the function to call; None: run the program as a script
    arguments: of that function
    assertions: source that raises if the program is wrong; None: there is none
    token: written to the result file when all assertions have passed
    """

    program: str
    function: str | None = None
    arguments: tuple[Any, ...] = ()
    assertions: str | None = None
    token: str = ""


def enter_limits(seconds: int, input_file: int, output_file: int, result_file: int) -> None:
    """Limit this forked process, for good: time, memory, files, system calls. Standard streams become the files.

    seconds: processor time, after which the kernel kills the process
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir("/")
    silent = os.open(os.devnull, os.O_WRONLY)
    sources = [os.dup(file) for file in (input_file, output_file, silent, result_file)]
    for target, source in enumerate(sources):
        os.dup2(source, target)
    os.closerange(RESULT + 1, 4096)
    for limit, value in (
        (resource.RLIMIT_AS, BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    for name in (signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
        signal.signal(name, signal.SIG_DFL)
    os.environ.clear()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    # Without capabilities: those of root could raise the limits again.
    if libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "the capabilities of a program's process cannot be dropped")
    install_filter()


def execute(execution: Execution) -> None:
    """Run the test, and end the process: with exit code 0 if the program did not fail. Call `enter_limits` before."""
    code = 1
    try:
        _execute(execution)
        code = 0
    except SystemExit as end:
        code = int(execution.assertions is not None or end.code not in (None, 0))
    except BaseException:  # also SystemExit: the program failed
        code = 1
    finally:
        try:
            sys.stdout.flush()
        except BaseException:
            code = 1
        os._exit(code)


def _execute(execution: Execution) -> None:
    is_script = execution.function is None and execution.assertions is None
    module = types.ModuleType("__main__" if is_script else "solution")
    names = vars(module)
    exec(PRELUDE, names)
    sys.modules["solution"] = module
    if is_script:
        sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    exec(compile(execution.program, "solution.py", "exec"), names)
    if execution.function is not None:
        value = _function(names, execution.function)(*execution.arguments)
        os.write(RESULT, json.dumps(value, default=_plain).encode())
    elif execution.assertions is not None:
        _assert(execution.assertions, names)
        os.write(RESULT, execution.token.encode())
    for thread in threading.enumerate():  # programs that need a deep stack start a thread and do not wait for it
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _function(names: dict[str, Any], name: str) -> Any:
    """Return a function of the program, or a method of its class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def _assert(source: str, names: dict[str, Any]) -> None:
    """Run assertions, then the functions `test_*` that they define."""
    before = dict(names)
    exec(compile(source, "test_solution.py", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test") and callable(value) and before.get(name) is not value:
            value()


def _plain(value: Any) -> Any:
    """Return a result that JSON lacks as one that it has. Raises TypeError for other types."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        return value.tolist()
    return list(value)
