"""Host memory of offloaded tensors is reused, also for tensors of other sizes, and does not grow from step to step."""

import pytest
import torch
from megaswift.bridge import runtime
from megaswift.bridge.layers import host_pool
from megaswift.bridge.layers.activation_offload import LayerTensors, Streams
from megaswift.bridge.layers.host_pool import HostPool


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the sizes of the blocks that are allocated."""
    allocated, allocate = list[int](), host_pool.PinnedMemory

    def count(size: int, flags: str) -> host_pool.PinnedMemory:
        allocated.append(size)
        return allocate(size, flags)

    monkeypatch.setattr(host_pool, "PinnedMemory", count)
    return allocated


def test_a_block_is_at_most_an_eighth_larger(sizes: list[int]) -> None:
    for size in (0, 1, 7, 4096, 4097, 671_088_640, 700_000_001):
        host_pool._rounded(size)
        assert size <= host_pool._rounded(size) <= max(1, size * 9 / 8)
    pool = HostPool()
    block = pool.take(4097)
    tensor = torch.ones(2, 512, dtype=torch.bfloat16)
    assert block.as_tensor(tensor).shape == (2, 512)
    assert block.as_tensor(tensor).data_ptr() == block.flat.data_ptr()


def test_the_smallest_block_that_is_large_enough_is_reused(sizes: list[int]) -> None:
    pool = HostPool()
    small, large = pool.take(1000), pool.take(1900)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(990) is small
    assert pool.take(1000) is large  # at most twice as large
    pool.give_back(large)
    assert pool.take(500) is not large
    assert pool.take(2000) is not large


def test_steps_with_other_lengths_take_the_same_memory(sizes: list[int]) -> None:
    runtime.enable()
    streams = Streams()

    def step(rows: int) -> None:
        layer = LayerTensors(None)
        tensors = [torch.full((rows, 64), float(n)) for n in range(3)]
        saved = [layer.save(tensor, streams) for tensor in tensors]
        layer.release()
        for tensor, each in zip(tensors, saved, strict=True):
            assert torch.equal(each.get(), tensor)

    step(64)
    assert len(sizes) == 3
    for rows in (64, 63, 40, 64):
        step(rows)
    assert len(sizes) == 3
