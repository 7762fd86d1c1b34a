"""Host memory of tensors that leave the device and return, reused from step to step."""

import bisect
from typing import Any

from torch import Tensor

from ..pinned_memory import PinnedMemory

FLAGS = "--cpu_offloading"
CLASSES = 8  # sizes per power of two that blocks are rounded up to: at most an eighth is unused
LARGEST = 2  # times its size that a tensor's block may have


class HostBlock:
    """Block of pinned memory.

    flat: uint8 [size]
    last_use: CUDA event at the end of the last copy from or to the block; None: there was none
    """

    def __init__(self, size: int):
        self.flat = PinnedMemory(size, FLAGS).flat
        self.last_use: Any = None

    def as_tensor(self, like: Tensor) -> Tensor:
        """Return the start of the block as a contiguous tensor of the shape and type of `like`."""
        return self.flat[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


class HostPool:
    """Blocks of host memory. The host does not wait for the copies of a block's last user: the next copy must.

    torch's pinned memory is reused only once the device has passed these copies. The host is often a step ahead of
    them, so that memory for another step would be allocated.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[HostBlock]] = {}  # keyed by size
        self._sizes: list[int] = []

    def take(self, size: int) -> HostBlock:
        """Return a block of at least `size` bytes. Raises RuntimeError if the host's memory is insufficient."""
        for place in range(bisect.bisect_left(self._sizes, size), len(self._sizes)):
            if self._sizes[place] > LARGEST * size:
                break
            if blocks := self._free[self._sizes[place]]:
                return blocks.pop()
        return HostBlock(_rounded(size))

    def give_back(self, block: HostBlock) -> None:
        size = len(block.flat)
        if size not in self._free:
            self._free[size] = []
            bisect.insort(self._sizes, size)
        self._free[size].append(block)


def _rounded(size: int) -> int:
    size = max(size, 1)
    step = max(1, 2 ** (size.bit_length() - 1) // CLASSES)
    return -(-size // step) * step
