"""Host memory that a GPU reads and writes directly. torch's pinned allocator would round up to a power of two."""

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, of each tensor's start
BLOCK = 2**28  # bytes that are pinned in one call


class PinnedMemory:
    """Zeros in host memory, pinned if there is a GPU, and until `close` or until no tensor uses them.

    Processes that this one forks, as the data loader's workers, do not have the memory: Linux would copy pinned pages
    for each of them.

    flat: uint8 [size]
    """

    def __init__(self, size: int, flags: str):
        """Allocate `size` bytes. flags: those that need them, for the error: RuntimeError if they cannot be pinned."""
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        memory = np.frombuffer(pages, np.uint8, count=size)
        self.flat = torch.from_numpy(memory).zero_()  # all threads map pages; pinning would map them one by one
        self._unpin = lambda: None
        if not torch.cuda.is_available():
            return
        cuda: Any = torch.cuda.cudart()
        if error := int(cuda.cudaHostRegister(self.flat.data_ptr(), size, 0)):
            raise RuntimeError(
                f"{flags}: {size / 2**30:.2f} GiB of the host's memory cannot be locked (CUDA error {error}). Is there "
                "enough of it? Turn this off, or use more processes"
            )
        self._unpin = weakref.finalize(memory, cuda.cudaHostUnregister, self.flat.data_ptr())
        self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory, which is freed with its last tensor."""
        self._unpin()


class PinnedAllocator:
    """Allocator of tensors in blocks of pinned memory, which are freed with their tensors."""

    def __init__(self, flags: str):
        self._flags = flags
        self._free = torch.empty(0, dtype=torch.uint8)  # rest of the last block

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [size]. Raises RuntimeError if memory cannot be pinned."""
        used = size * dtype.itemsize
        aligned = -(-used // ALIGNMENT) * ALIGNMENT
        if aligned > len(self._free):
            self._free = PinnedMemory(max(aligned, BLOCK), self._flags).flat
        tensor, self._free = self._free[:used].view(dtype), self._free[aligned:]
        return tensor
