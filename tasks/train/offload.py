"""Offload of the trainer's weights and optimizer state to the host during generation; gradients are freed.

Only storages move: tensors and their views remain the same objects, with empty storages in between.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from ...bridge import runtime
from ...bridge.pinned_memory import ALIGNMENT, PinnedMemory
from .optimizer import chained_optimizers
from .step import TrainState

FLAGS = "--offload_model, --offload_optimizer, --offload_critic"


class HostBuffer:
    """Pinned host memory for offloaded tensor storages, reused by later offloads."""

    def __init__(self) -> None:
        self._memory: PinnedMemory | None = None
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []  # each storage and its bytes on the host

    @property
    def is_offloaded(self) -> bool:
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host, and free them on the device.

        All readers of the tensors must already be queued on the current stream. Raises RuntimeError if host memory is
        insufficient.
        """
        storages = list(_storages_by_id(tensors).values())
        if not storages:
            return
        ends = list(itertools.accumulate(-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages))
        if self._memory is None or len(self._memory.flat) < ends[-1]:
            self.close()
            self._memory = PinnedMemory(ends[-1], FLAGS)
        for storage, start in zip(storages, [0, *ends], strict=False):
            host = self._memory.flat[start : start + storage.nbytes()]
            host.copy_(_as_bytes(storage), non_blocking=True)
            self._offloaded.append((storage, host))
        runtime.synchronize()
        for storage in storages:
            storage.resize_(0)

    def onload(self) -> None:
        for storage, host in self._offloaded:
            storage.resize_(len(host))
            _as_bytes(storage).copy_(host, non_blocking=True)
        self._offloaded = []

    def close(self) -> None:
        """Free the host memory. No storage may be offloaded."""
        if self._memory is not None:
            runtime.synchronize()
            self._memory.close()
            self._memory = None


class TrainerOffload:
    """Offload of a trainer's state: `offload_step` and `offload_weights`; `onload` restores everything.

    Arguments:
        weights, optimizer: whether to offload these; gradients are always freed, and zero at the next step
    """

    def __init__(self, training: TrainState, *, weights: bool, optimizer: bool):
        self._training = training
        self._weights = HostBuffer() if weights else None
        self._optimizer = HostBuffer() if optimizer else None
        self._gradients: list[tuple[torch.UntypedStorage, int]] = []  # freed storages and their sizes in bytes

    def offload_step(self) -> None:
        """Free gradients and offload the optimizer state. A second call does nothing."""
        if self._gradients:
            return
        self._training.optimizer.zero_grad()  # fp32 copies of gradients
        runtime.synchronize()
        for storage in _storages_by_id(gradients(self._training.modules)).values():
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
            _as_bytes(storage).zero_()
        self._gradients = []


def weights(training: TrainState) -> Iterator[Tensor]:
    """Yield all parameters and buffers, and megatron-core's flat parameter buffers."""
    for part in training.model.parts:
        yield from part.parameters()
        yield from part.buffers()
    for module in training.modules:
        yield from (buffer.param_data for buffer in _buffers(module) if buffer.param_data is not None)


def gradients(modules: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for module in modules:
        yield from (buffer.grad_data for buffer in _buffers(module))


def optimizer_state(training: TrainState) -> Iterator[Tensor]:
    """Yield the optimizer's state and fp32 masters, except masters that share a parameter's storage."""
    weight_storages = _storages_by_id(weights(training))
    for part in chained_optimizers(training.optimizer):
        if part.optimizer is None:
            continue
        tensors = [
            value for state in part.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        tensors += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        yield from (tensor for tensor in tensors if tensor.untyped_storage()._cdata not in weight_storages)


def _buffers(module: Any) -> list[Any]:
    return [*module.buffers, *module.expert_parallel_buffers]


def _storages_by_id(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the tensors' distinct storages by id, without those on other devices or not resizable (mapped files)."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == runtime.device().type and storage.resizable() and storage.nbytes():
            storages[storage._cdata] = storage
    return storages


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def free_memory() -> None:
    """Return torch's cached free memory to the device, for other allocators."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
