"""Outputs of attention that a recomputed layer takes from its first pass, so that its kernel runs once.

With documents of 100,000 tokens a layer's forward pass is mostly attention, whose output is small.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

Outputs = tuple[Tensor, ...]


class KeptTensor(Protocol):
    """Tensor that is kept somewhere."""

    def get(self) -> Tensor:
        """Return the tensor on its device."""
        ...


class KeptOutputs:
    """Outputs of the kernels of one recomputed function, in the order of their calls."""

    def __init__(self, save: Callable[[Tensor], KeptTensor]):
        self._save = save
        self._outputs: deque[list[KeptTensor]] = deque()
        self._is_recomputed = False

    def keep(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for two calls: the first keeps the outputs of its kernels, the second takes them."""

        def run(*arguments: Any) -> Any:
            with self._as_current():
                result = function(*arguments)
            self._is_recomputed = True
            return result

        return run

    def outputs(self, kernel: Callable[[], Outputs]) -> Outputs:
        """Return what a kernel's call returns, or has returned in the first pass."""
        if self._is_recomputed:
            return tuple(saved.get() for saved in self._outputs.popleft())
        outputs = kernel()
        self._outputs.append([self._save(output) for output in outputs])
        return outputs

    @contextmanager
    def _as_current(self) -> Iterator[None]:
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before


_current: KeptOutputs | None = None


def kept_outputs(kernel: Callable[[], Outputs]) -> Outputs:
    """Call a kernel, unless this is the second pass of a recomputed function that keeps outputs."""
    return kernel() if _current is None else _current.outputs(kernel)
