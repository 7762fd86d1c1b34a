"""What a user's Python files bring to a run (--external_plugins): rewards, schedulers, tools, each by its name."""

import difflib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, overload

_loaded: set[Path] = set()


class Registrar:
    """Decorator that puts a function or a class into a registry: `@reward("name")`, or `@reward` under its own name.

    Raises ValueError where the name is taken.
    """

    def __init__(self, registry: dict[str, Any], kind: str):
        self._registry, self._kind = registry, kind

    @overload
    def __call__[T: Callable](self, name: str) -> Callable[[T], T]: ...
    @overload
    def __call__[T: Callable](self, name: T) -> T: ...
    def __call__(self, name: Any) -> Any:
        if callable(name):
            return self(name.__name__)(name)

        def register(function: Any) -> Any:
            if name in self._registry:
                raise ValueError(f'@{self._kind}("{name}"): there is a {self._kind} of this name. Choose another one')
            self._registry[name] = function
            return function

        return register


def unknown(flag: str, name: str, known: Iterable[str], what: str) -> ValueError:
    """The error for a name that no registry has."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    nearest = f" The nearest is {close[0]}." if close else ""
    return ValueError(
        f"{flag} {name}: there is no such {what}.{nearest} There are {', '.join(known)}; more come from "
        "--external_plugins"
    )


def made(entry: Any, options: Any) -> Any:
    """A function as it is; of a class an instance, with the options where it takes `args`."""
    if not isinstance(entry, type):
        return entry
    parameters = inspect.signature(entry).parameters.values()
    takes = any(p.name == "args" or p.kind is p.VAR_KEYWORD for p in parameters)
    return entry(args=options) if takes else entry()


def load_plugins(paths: Sequence[str]) -> None:
    """Import Python files, each once. What is beside one can be imported by it.

    Raises ValueError where one is missing, or raises itself.
    """
    for name in paths:
        path = Path(name).expanduser().resolve()
        if path in _loaded:
            continue
        if not path.is_file() or path.suffix != ".py":
            raise ValueError(f"--external_plugins {name}: there is no such Python file")
        module_name = f"megaswift_plugin{len(_loaded)}_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where dataclasses and pickle look for it
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # sys.exit(0) would end the command as a success
            raise ValueError(f"--external_plugins {name}: {_reason(error, path)}") from error
        _loaded.add(path)


def _reason(error: BaseException, path: Path) -> str:
    cure = "Fix the file, or remove the flag"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "swift":
        cure = (
            "Write `from megaswift.tasks.rewards import ORM, AsyncORM, orms`, or `from megaswift.tasks.multi_turn "
            "import MultiTurnScheduler, multi_turns`, which are the same here"
        )
    elif isinstance(error, ModuleNotFoundError):
        cure = "Install it"
    said, place = str(error), place_of(error.__traceback__, path)
    if isinstance(error, SyntaxError) and error.filename:  # of a file that did not get to run
        said, place = error.msg, f"{Path(error.filename).name}, line {error.lineno}"
    return f"importing it raises {type(error).__name__}: {said} ({place}). {cure}"


def place_of(where: TracebackType | FrameType | None, file: Path | None) -> str:
    """As in `plugin.py, line 12`: the innermost line that is in `file`, else the innermost of all."""
    stack = traceback.extract_stack(where) if isinstance(where, FrameType) else traceback.extract_tb(where)
    lines = [line for line in stack if file and Path(line.filename) == file] or stack
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else "no line of Python"


def file_of(function: Callable) -> Path | None:
    code = function if inspect.isroutine(function) else type(function)
    try:
        return Path(inspect.getfile(code))
    except (TypeError, OSError):
        return None


class Daemons(ThreadPoolExecutor):
    """For asyncio.to_thread: its own threads would keep the process from ending."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()  # who waits no longer does not cancel what runs

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
