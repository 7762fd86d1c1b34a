"""Update of parameters whose AdamW state is on the host: on the host, and on the device that the state visits.

The host's cores and PCIe are both slower than the device's own memory, so a fixed share of the states visits the device
while the cores update the rest. The share is fixed because the host and the device round differently: a resumed run
must divide the parameters as the run before.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ...bridge import runtime
from .optimizer_buckets import BucketTensors, Piece, Workspace
from .state_tensor import BLOCK, StateTensor

VISITING_SHARE = 0.5  # share of the states on the host that visit the device: the fastest of 0 to 1
BUCKET = 2**23  # elements that are copied or updated together: the fastest of 2^21, 2^23 and 2^25
HOST_SLOTS, DEVICE_SLOTS = 2, 3  # buckets that are under way
QUEUED_AHEAD = 4  # visits that are queued before their turn, so that PCIe does not wait for the cores


class BucketOptimizer(Protocol):
    """Optimizer that updates a bucket whose tensors are all on one device (`HybridAdamW`)."""

    copies: dict[Tensor, Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def step_bucket(
        self,
        name: str,
        bucket: list[Piece],
        tensors: BucketTensors,
        workspace: Workspace,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None: ...


class CopyStream:
    """Stream of copies beside the device's other work, with an event per slot. Without CUDA copies are done at once."""

    def __init__(self, slots: int):
        self._stream = torch.cuda.Stream() if runtime.device().type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in range(slots)] if self._stream else []

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

    def hold_device(self, slot: int | None = None) -> None:
        """Begin later work of the current stream after the copies of this slot, or after all copies."""
        if self._stream is None:
            return
        if slot is None:
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            torch.cuda.current_stream().wait_event(self._copied[slot])

    def hold_host(self, slot: int | None = None) -> None:
        """Return when the copies of this slot, or all copies, are done."""
        if self._stream is not None:
            (self._stream if slot is None else self._copied[slot]).synchronize()


class HostPipeline:
    """Update of buckets on the host, beside the copies of the buckets before and after, and beside visits."""

    def __init__(self, optimizer: BucketOptimizer, buckets: list[list[Piece]], visits: "DeviceVisits"):
        self._optimizer, self._buckets, self._visits = optimizer, buckets, visits
        is_cuda = runtime.device().type == "cuda"
        self._slots = [Workspace(torch.device("cpu"), BUCKET, is_pinned=is_cuda) for _ in range(HOST_SLOTS)]
        self._narrow = Workspace(torch.device("cpu"), BUCKET)
        self._arrivals, self._departures = CopyStream(HOST_SLOTS), CopyStream(HOST_SLOTS)

    def step(self) -> None:
        """Update all buckets. Work queued on the current stream afterwards sees the new parameters."""
        optimizer = self._optimizer
        self._arrivals.wait_for_device()
        if self._buckets:
            self._receive(0)
        # These wait for the device: the end of the backward pass, and the norm over all ranks.
        found_inf = torch.zeros(()) if optimizer.found_inf is None else optimizer.found_inf.cpu()
        grad_scale = torch.ones(()) if optimizer.grad_scale is None else optimizer.grad_scale.cpu()
        if found_inf:
            return
        self._visits.begin()
        with _all_cores():
            for number, bucket in enumerate(self._buckets):
                if number + 1 < len(self._buckets):
                    self._receive(number + 1)
                self._visits.queue(until=(number + 1) / len(self._buckets))
                self._arrivals.hold_host(number % HOST_SLOTS)
                self._departures.hold_host(number % HOST_SLOTS)  # frees the slot's copies
                for piece, gradient, parameter, copy in zip(bucket, *self._staged(number), strict=True):
                    tensors = BucketTensors([gradient], [parameter], [copy])
                    optimizer.step_bucket("host", [piece], tensors, self._narrow, grad_scale, found_inf)
                self._send(number)
        self._visits.finish()
        self._departures.hold_device()

    def _receive(self, number: int) -> None:
        """Queue the copies of a bucket's gradients, and of fp32 parameters, to the host."""
        gradients, parameters, _ = self._staged(number)
        slot = number % HOST_SLOTS
        self._arrivals.wait_for(self._departures, slot)  # parameters leave from where they arrive
        with self._arrivals.copies(slot):
            for piece, gradient, parameter in zip(self._buckets[number], gradients, parameters, strict=True):
                gradient.copy_(piece.gradient, non_blocking=True)
                if parameter is not None:
                    parameter.copy_(piece.of(piece.parameter), non_blocking=True)

    def _send(self, number: int) -> None:
        """Queue the copies of a bucket's updated parameters to the device."""
        _, parameters, copies = self._staged(number)
        with self._departures.copies(number % HOST_SLOTS):
            for piece, parameter, copy in zip(self._buckets[number], parameters, copies, strict=True):
                if parameter is not None:
                    piece.of(piece.parameter).copy_(parameter, non_blocking=True)
                elif copy is not None:
                    piece.of(self._optimizer.copies[piece.parameter]).copy_(copy, non_blocking=True)

    def _staged(self, number: int) -> BucketTensors:
        """Return a bucket's tensors on the host, in one of the two slots."""
        slot, offset = self._slots[number % HOST_SLOTS], 0
        tensors = BucketTensors([], [], [])
        for piece in self._buckets[number]:
            copy = self._optimizer.copies.get(piece.parameter)
            tensors.gradients.append(slot.take("gradient", offset, piece.size))
            tensors.parameters.append(slot.take("parameter", offset, piece.size) if copy is None else None)
            tensors.copies.append(None if copy is None else slot.take("copy", offset, piece.size, copy.dtype))
            offset += piece.size
        return tensors


class DeviceVisits:
    """Update on the device of buckets whose states are in pinned host memory.

    A bucket's states arrive while the one before is updated and the one before that leaves. Gradients and parameters
    are on the device anyway.
    """

    def __init__(self, optimizer: BucketOptimizer, buckets: list[list[Piece]]):
        self._optimizer, self._buckets = optimizer, buckets
        self._workspace = Workspace(runtime.device(), BUCKET)  # for states in fp32 while they are used
        self._slots = [Workspace(runtime.device(), BUCKET) for _ in range(DEVICE_SLOTS)]
        self._arrivals, self._departures = CopyStream(DEVICE_SLOTS), CopyStream(DEVICE_SLOTS)
        self._queued = 0  # buckets of this step

    def begin(self) -> None:
        """Begin a step."""
        self._queued = 0
        self._arrivals.wait_for_device()

    def queue(self, until: float) -> None:
        """Queue visits up to a share of the buckets, and a few ahead."""
        while self._queued < min(until * len(self._buckets) + QUEUED_AHEAD, len(self._buckets)):
            self._visit(self._queued)
            self._queued += 1

    def finish(self) -> None:
        """Queue the other visits, and return when all states are on the host again."""
        self.queue(1.0)
        self._departures.hold_host()

    def _visit(self, number: int) -> None:
        bucket, slot = self._buckets[number], number % DEVICE_SLOTS
        self._arrivals.wait_for(self._departures, slot)
        with self._arrivals.copies(slot):
            visitors = [piece._replace(states=states) for piece, states in zip(bucket, self._room(number), strict=True)]
            for piece, visitor in zip(bucket, visitors, strict=True):
                _copy_states(piece.states, visitor.states)
        self._arrivals.hold_device(slot)
        optimizer = self._optimizer
        tensors = BucketTensors.on_device(visitors, optimizer.copies)
        name = f"visit {number}"
        optimizer.step_bucket(name, visitors, tensors, self._workspace, optimizer.grad_scale, optimizer.found_inf)
        self._departures.wait_for_device()
        with self._departures.copies(slot):
            for piece, visitor in zip(bucket, visitors, strict=True):
                _copy_states(visitor.states, piece.states)

    def _room(self, number: int) -> Iterator[dict[str, StateTensor]]:
        """Yield memory on the device for the states of each piece of a bucket."""
        slot, offset, block_offset = self._slots[number % DEVICE_SLOTS], 0, 0
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


@contextmanager
def _all_cores() -> Iterator[None]:
    """With a GPU, let this process use its share of the machine's cores, which it leaves to data workers otherwise."""
    if runtime.device().type != "cuda":
        yield
        return
    threads = torch.get_num_threads()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
