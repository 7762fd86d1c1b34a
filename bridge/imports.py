"""Imports of large packages: changes to a package while it is imported, and imports without garbage collection."""

import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

type Change = Callable[[ModuleType], AbstractContextManager[object]]  # takes the module, and runs around its code


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collection, and exempt from it what is there at the end.

    Modules consist of millions of objects that stay, and each full collection would visit all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def change(name: str, around: Change) -> None:
    """Have a module run within a context when it is imported, unless it is imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, around))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module once, by the other finders."""

    def __init__(self, name: str, around: Change):
        self._name, self._around = name, around

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self._around)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, around: Change):
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # asked for the package's files by readers of resources
        if module.__spec__:
            module.__spec__.loader = self._loader
        with self._around(module):
            self._loader.exec_module(module)
