"""`torch.compile` at the first call, for the functions that megatron-core compiles where it defines them.

`torch.compile` loads PyTorch's compiler, which takes seconds, and most runs call none of these functions.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from .imports import change


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


@contextmanager
def _compiled_lazily(package: ModuleType) -> Iterator[None]:
    """Replace `torch.compile` while the package runs, which keeps it for modules that are imported later."""
    import torch

    compiler, torch.compile = torch.compile, lazily(torch.compile)
    try:
        yield
    finally:
        torch.compile = compiler


def enable() -> None:
    """Compile megatron-core's functions lazily, unless it is imported already."""
    change("megatron.core", _compiled_lazily)
