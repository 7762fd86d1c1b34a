"""`torch.compile` at the first call, for the functions that megatron-core compiles where it defines them.

`torch.compile` loads PyTorch's compiler, which takes seconds, and most runs call none of these functions.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = "megatron.core"


def lazily(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compile`, given as `compiler`, that compiles a function when it is first called.

    With TORCH_COMPILE_DISABLE=1 the function is never compiled, as in PyTorch.
    """
    import torch

    def compile_later(function: Any = None, **settings: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **settings)
        if not isinstance(function, FunctionType):
            return compiler(function, **settings)
        compiled: Any = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if torch.compiler.is_compiling():  # within another function, whose graph it becomes a part of
                return function(*args, **kwargs)
            if compiled is None:
                is_disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
                compiled = function if is_disabled else compiler(function, **settings)
            return compiled(*args, **kwargs)

        return call

    return compile_later


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron.core once, and has its package run with `torch.compile` replaced."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the package, which keeps the replaced `torch.compile` for modules that are imported later."""
        import torch

        compiler, torch.compile = torch.compile, lazily(torch.compile)
        try:
            self._loader.exec_module(module)
        finally:
            torch.compile = compiler


def enable() -> None:
    """Compile megatron-core's functions lazily, unless it is imported already."""
    if PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())
