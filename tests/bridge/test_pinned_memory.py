"""Memory that a GPU reads and writes directly."""

import gc
import os
from pathlib import Path

import torch
from megaswift.bridge.pinned_memory import PinnedAllocator, PinnedMemory


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_a_forked_process_does_not_have_the_memory():
    """Else Linux copies all pinned pages for each worker of a data loader."""
    memory = PinnedMemory(1 << 20, "--flag")
    address = memory.flat.data_ptr()
    assert is_mapped(address)
    assert not memory.flat.any()
    child = os.fork()
    if not child:
        os._exit(int(is_mapped(address)))
    assert os.waitpid(child, 0)[1] == 0


def test_memory_is_freed_with_its_last_tensor():
    allocator = PinnedAllocator("--flag")
    tensor = allocator.zeros(1000, torch.float32)
    other = allocator.zeros(1000, torch.float32)
    tensor.fill_(3)
    assert not other.any()
    address = tensor.data_ptr()
    del allocator, other
    gc.collect()
    assert is_mapped(address)
    del tensor
    gc.collect()
    assert not is_mapped(address)
