"""Our own fused kernels, in Triton: what Transformer Engine has, and more, with nothing to build.

Each file has a plain function, which any machine runs, and the same computed in one kernel. What is summed is summed in
fp32 and in a fixed order. `TRITON_INTERPRET=1` runs the kernels on a CPU, slowly: so they are tested without a GPU.
"""

import os
from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether the fused kernels can take these tensors."""
    on_device = all(tensor.is_cuda for tensor in tensors) or os.environ.get("TRITON_INTERPRET") == "1"
    return on_device and _installed()
