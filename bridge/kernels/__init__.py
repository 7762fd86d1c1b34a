"""Fused kernels in Triton.

Sums are computed in fp32 and in a fixed order. `TRITON_INTERPRET=1` runs the kernels on a CPU, slowly, to test them
without a GPU.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

LaunchArgs = dict[str, Any]  # compile-time constants and launch settings of a kernel


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Return whether the fused kernels support these tensors."""
    for tensor in tensors:  # each layer asks: a generator would take longer
        if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return False
    return _is_installed()
