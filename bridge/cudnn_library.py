"""The cuDNN that PyTorch was installed with, for Transformer Engine too.

PyTorch's wheels bring a cuDNN. Transformer Engine prefers one of the system when it is imported, and PyTorch's loader
then takes the kernels of that one. Mixed versions give wrong numbers without an error: with kernels of 9.14 behind the
loader of 9.19, gradients of attention with heads above 128 are wrong by a fifth or not finite (H100).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from .imports import change

# A library needs those before it. Loaded in this order, none of them looks for another in LD_LIBRARY_PATH.
ORDER = "graph", "engines_precompiled", "engines_runtime_compiled", "heuristic", "ops", "cnn", "adv"


def enable() -> None:
    """Have Transformer Engine run with PyTorch's cuDNN, unless it is imported already."""
    change("transformer_engine", _with_libraries)


@contextmanager
def _with_libraries(package: ModuleType) -> Iterator[None]:
    load()
    yield


def load() -> None:
    """Load the libraries of PyTorch's cuDNN, where it was installed as a package and a GPU is visible."""
    import torch

    if not torch.cuda.is_available():
        return
    for library in libraries():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def libraries() -> list[Path]:
    """Return the files of the package beside PyTorch, in the order in which they must be loaded."""
    import torch

    folder = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"  # where PyTorch's wheels look for it
    return sorted(sorted(folder.glob("libcudnn*.so.*")), key=_position)


def _position(library: Path) -> int:
    name = library.name.split(".")[0]
    if name == "libcudnn":  # loads the others
        return len(ORDER) + 1
    kind = name.removeprefix("libcudnn_")
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def fault() -> str | None:
    """Return why cuDNN must not be used: another than PyTorch's is loaded, and it is older. None: it may be."""
    import torch
    import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]

    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).split(". ")[0]
    return None
