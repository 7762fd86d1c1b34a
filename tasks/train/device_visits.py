"""Update on the device of parameters whose optimizer state is in pinned host memory.

The host's cores would take longer for the update than PCIe for the copies, and round differently.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ...bridge import runtime
from .optimizer_buckets import Piece, Workspace
from .state_tensor import BLOCK, StateTensor

BUCKET = 2**23  # elements that are copied and updated together: the fastest of 2^21, 2^23 and 2^25
SLOTS = 3  # buckets on the device at a time


class BucketOptimizer(Protocol):
    """Optimizer that updates a bucket whose states are on the device (`HybridAdamW`)."""

    def step_bucket(self, name: str, bucket: list[Piece], workspace: Workspace) -> None: ...


class CopyStream:
    """Stream of copies beside the device's other work, with an event per slot. Without CUDA copies are done at once."""

    def __init__(self):
        self._stream = torch.cuda.Stream() if runtime.device().type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)] if self._stream else []

    @contextmanager
    def copies(self, slot: int) -> Iterator[None]:
        """Queue the copies of this context, and mark the slot's end after them."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._copied[slot].record(self._stream)

    def wait_for_device(self) -> None:
        """Begin later copies after what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def wait_for(self, other: "CopyStream", slot: int) -> None:
        """Begin later copies after the other stream's copies of this slot."""
        if self._stream is not None:
            self._stream.wait_event(other._copied[slot])

    def hold_device(self, slot: int) -> None:
        """Begin later work of the current stream after the copies of this slot."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._copied[slot])

    def hold_host(self) -> None:
        """Return when all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceVisits:
    """Update of buckets whose states visit the device.

    A bucket's states arrive while the one before is updated and the one before that leaves. Gradients and parameters
    are on the device anyway.
    """

    def __init__(self, optimizer: BucketOptimizer, buckets: list[list[Piece]]):
        self._optimizer, self._buckets = optimizer, buckets
        self._workspace = Workspace(runtime.device(), BUCKET)  # for states in fp32 while they are used
        self._slots = [Workspace(runtime.device(), BUCKET) for _ in range(SLOTS)]
        self._arrivals, self._departures = CopyStream(), CopyStream()

    def step(self) -> None:
        """Update all buckets, and return when their states are on the host again."""
        for number, bucket in enumerate(self._buckets):
            self._visit(number, bucket)
        self._departures.hold_host()

    def _visit(self, number: int, bucket: list[Piece]) -> None:
        slot = number % SLOTS
        self._arrivals.wait_for(self._departures, slot)
        with self._arrivals.copies(slot):
            visitors = [piece._replace(states=states) for piece, states in zip(bucket, self._room(number), strict=True)]
            for piece, visitor in zip(bucket, visitors, strict=True):
                _copy_states(piece.states, visitor.states)
        self._arrivals.hold_device(slot)
        self._optimizer.step_bucket(f"visit {number}", visitors, self._workspace)
        self._departures.wait_for_device()
        with self._departures.copies(slot):
            for piece, visitor in zip(bucket, visitors, strict=True):
                _copy_states(visitor.states, piece.states)

    def _room(self, number: int) -> Iterator[dict[str, StateTensor]]:
        """Yield memory on the device for the states of each piece of a bucket."""
        slot, offset, block_offset = self._slots[number % SLOTS], 0, 0
        for piece in self._buckets[number]:
            blocks = -(-piece.size // BLOCK)
            yield {
                name: state._replace(
                    values=slot.take(name, offset, piece.size, state.values.dtype),
                    exponents=slot.take(f"{name} exponents", block_offset, blocks, torch.int8)
                    if state.is_scaled
                    else None,
                )
                for name, state in piece.states.items()
            }
            offset, block_offset = offset + piece.size, block_offset + blocks


def _copy_states(sources: dict[str, StateTensor], targets: dict[str, StateTensor]) -> None:
    for name, target in targets.items():
        target.values.copy_(sources[name].values, non_blocking=True)
        if target.exponents is not None:
            exponents = sources[name].exponents
            assert exponents is not None
            target.exponents.copy_(exponents, non_blocking=True)
