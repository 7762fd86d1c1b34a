"""Plugins: a user's Python files (--external_plugins) that register rewards, schedulers and tools by name."""

import difflib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, overload

from ...bridge.option_groups import flag_values
from ...templates.json_types import JsonObject
from .ms_swift_imports import MsSwiftImportError, ms_swift_imports

MODULE_PREFIX = "megaswift_plugin"
_loaded: set[Path] = set()


class Registrar:
    """Decorator that registers a function or a class: `@reward("name")`, or `@reward` under its own name.

    Raises ValueError where the name is taken.
    """

    def __init__(self, registry: JsonObject, kind: str):
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
                raise ValueError(f'@{self._kind}("{name}"): there is already such a {self._kind}. Use another name')
            self._registry[name] = function
            return function

        return register


def unknown_name_error(flag: str, name: str, names: Iterable[str], kind: str) -> ValueError:
    """Return the error for an unregistered name, with the most similar registered one."""
    names = list(names)
    matches = difflib.get_close_matches(name, names, 1)
    nearest = f" The nearest is {matches[0]}." if matches else ""
    fix = f"Use one of {', '.join(names)}, or register it" if names else "Register it"
    return ValueError(f"{flag} {name}: no such {kind}.{nearest} {fix} in a file of --external_plugins")


def instantiate(entry: Any, options: object) -> Any:
    """Return a function unchanged, or an instance of a class. Its parameter `args`, if any, gets all flags by name."""
    if not isinstance(entry, type):
        return entry
    parameters = inspect.signature(entry).parameters.values()
    takes_options = any(p.name == "args" or p.kind is p.VAR_KEYWORD for p in parameters)
    with ms_swift_imports():
        return entry(args=SimpleNamespace(**flag_values(options))) if takes_options else entry()


def is_plugins(entry: Any) -> bool:
    """Return whether a registered function or class is from a plugin's file."""
    return getattr(entry, "__module__", "").startswith(MODULE_PREFIX)


def load_plugins(paths: Sequence[str]) -> None:
    """Import Python files, each once. Their folders are added to sys.path.

    Raises ValueError where a file is missing or raises an error.
    """
    for name in paths:
        path = Path(name).expanduser().resolve()
        if path in _loaded:
            continue
        if not path.is_file() or path.suffix != ".py":
            raise ValueError(f"--external_plugins {name}: no such Python file. Set the path of one")
        module_name = f"{MODULE_PREFIX}{len(_loaded)}_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look modules up there
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            with ms_swift_imports():
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # otherwise sys.exit(0) would end the command successfully
            raise ValueError(f"--external_plugins {name}: {_reason(error, path)}") from error
        _loaded.add(path)


def plugin_function(name: str) -> Callable | None:
    """Return the function of a name in the loaded files, or None."""
    for module_name, module in list(sys.modules.items()):
        function = getattr(module, name, None) if module_name.startswith(MODULE_PREFIX) else None
        if inspect.isfunction(function) and function.__module__ == module_name:
            return function
    return None


def _reason(error: BaseException, path: Path) -> str:
    fix = "Fix the file, or remove the flag"
    if isinstance(error, MsSwiftImportError):
        fix = "Remove it from the file"
    elif isinstance(error, ModuleNotFoundError):
        fix = "Install it"
    text, line = str(error), line_of(error.__traceback__, path)
    if isinstance(error, SyntaxError) and error.filename:  # the file has not run
        text, line = error.msg, f"{Path(error.filename).name}, line {error.lineno}"
    return f"importing it raises {type(error).__name__}: {text} ({line}). {fix}"


def line_of(origin: TracebackType | FrameType | None, file: Path | None) -> str:
    """Return the innermost line in `file`, else the innermost of all, as in `plugin.py, line 12`."""
    stack = traceback.extract_stack(origin) if isinstance(origin, FrameType) else traceback.extract_tb(origin)
    lines = [line for line in stack if file and Path(line.filename) == file] or stack
    return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}" if lines else "no line of Python"


def file_of(function: Callable) -> Path | None:
    code = function if inspect.isroutine(function) else type(function)
    try:
        return Path(inspect.getfile(code))
    except (TypeError, OSError):
        return None


class DaemonExecutor(ThreadPoolExecutor):
    """Executor for asyncio.to_thread with daemon threads, so that a running call does not delay the process's exit."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()  # a running call cannot be cancelled

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
