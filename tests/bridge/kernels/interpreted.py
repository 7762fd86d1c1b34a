"""Triton's interpreter, which runs kernels on a CPU under TRITON_INTERPRET=1."""

from collections.abc import Callable
from typing import Any


def with_indices(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Return the interpreter's `_patch_lang_tensor` for NumPy 2.5.

    Bounds of loops are arrays of one number there, which that does not turn into a number by itself.
    """

    def patch_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch_index
