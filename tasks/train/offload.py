"""The trainer's memory while engines generate: weights and optimizer state wait on the host, gradients are let go.

What moves are storages: tensors, and all views of them, stay the objects that they are, and have no bytes meanwhile.
"""

import itertools
import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ...bridge import runtime
from .optimizer import parts
from .step import TrainState

ALIGNED = 512  # bytes: where a storage's may begin on the host


class HostBuffer:
    """Tensor storages that move between the device and pinned host memory, which is kept for the next time."""

    def __init__(self) -> None:
        self._memory: _Host | None = None
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []  # and their bytes

    @property
    def is_offloaded(self) -> bool:
        return bool(self._kept)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the bytes of the tensors' storages to the host, and free them here. All that reads them has to have
        been given to this device's stream. Raises RuntimeError where the host has not the memory."""
        storages = list(_distinct(tensors).values())
        if not storages:
            return
        ends = list(itertools.accumulate(-(-storage.nbytes() // ALIGNED) * ALIGNED for storage in storages))
        if self._memory is None or len(self._memory.flat) < ends[-1]:
            self.close()
            self._memory = _Host(ends[-1])
        for storage, start in zip(storages, [0, *ends], strict=False):
            host = self._memory.flat[start : start + storage.nbytes()]
            host.copy_(_bytes(storage), non_blocking=True)
            self._kept.append((storage, host))
        runtime.synchronize()
        for storage in storages:
            storage.resize_(0)

    def onload(self) -> None:
        for storage, host in self._kept:
            storage.resize_(len(host))
            _bytes(storage).copy_(host, non_blocking=True)
        self._kept = []

    def close(self) -> None:
        """Free the host memory. Nothing may be offloaded."""
        if self._memory is not None:
            runtime.synchronize()
            self._memory.close()
            self._memory = None


class _Host:
    """Memory of the host, locked where there is a GPU: torch's own would be rounded up to a power of two."""

    def __init__(self, count: int):
        self.flat = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        if not torch.cuda.is_available():
            return
        self._cuda: Any = torch.cuda.cudart()
        if error := int(self._cuda.cudaHostRegister(self.flat.data_ptr(), count, 0)):
            raise RuntimeError(
                f"--offload_model, --offload_optimizer: {count / 2**30:.2f} GiB of the host's memory cannot be locked "
                f"(CUDA error {error}). Is there enough of it? Give them as false, or use more processes"
            )

    def close(self) -> None:
        if torch.cuda.is_available():
            self._cuda.cudaHostUnregister(self.flat.data_ptr())


class TrainerOffload:
    """Offloading of a trainer's state: `offload_step` and `offload_weights`; `onload` loads all of it.

    Arguments:
        weights, optimizer: whether these leave; gradients, which the next step begins with zeros, always do
    """

    def __init__(self, training: TrainState, *, weights: bool, optimizer: bool):
        self._training = training
        self._weights = HostBuffer() if weights else None
        self._optimizer = HostBuffer() if optimizer else None
        self._gradients: list[tuple[torch.UntypedStorage, int]] = []  # without bytes: how many they had

    def offload_step(self) -> None:
        """Offload what only a step needs. A second call does nothing."""
        if self._gradients:
            return
        self._training.optimizer.zero_grad()  # copies in fp32
        runtime.synchronize()
        for storage in _distinct(gradients(self._training.chunks)).values():
            self._gradients.append((storage, storage.nbytes()))
            storage.resize_(0)
        if self._optimizer is not None:
            self._optimizer.offload(optimizer_state(self._training))
        free_memory()

    def offload_weights(self) -> None:
        if self._weights is not None and not self._weights.is_offloaded:
            self._weights.offload(weights(self._training))
            free_memory()

    def onload_weights(self) -> None:
        if self._weights is not None:
            self._weights.onload()

    def onload(self) -> None:
        self.onload_weights()
        if self._optimizer is not None:
            self._optimizer.onload()
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._gradients = []


def weights(training: TrainState) -> Iterator[Tensor]:
    """Parameters and buffers, trained or not, with the buffers that megatron-core keeps parameters in."""
    for chunk in training.chunks:
        yield from chunk.module.parameters()
        yield from chunk.module.buffers()
        yield from (buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None)


def gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in _buffers(chunk))


def optimizer_state(training: TrainState) -> Iterator[Tensor]:
    """Yield the optimizer's state and fp32 masters; not those that are (parts of) the parameters."""
    weight_storages = _distinct(weights(training))
    for part in parts(training.optimizer):
        if part.optimizer is None:
            continue
        tensors = [
            value for state in part.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        tensors += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        yield from (each for each in tensors if each.untyped_storage()._cdata not in weight_storages)


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _distinct(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the tensors' storages, each once, without those that have no memory of their own here (of a file, say)."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == runtime.device().type and storage.resizable() and storage.nbytes():
            storages[storage._cdata] = storage
    return storages


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def free_memory() -> None:
    """Return torch's cached free memory to the device, for other allocators."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
