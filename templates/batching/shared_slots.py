"""Shared memory for the large arrays of batches that worker processes send.

A pickled array is copied while Python's lock is held: milliseconds for the pixels of a micro batch, in which the
training process launches no kernels. From shared memory it is copied without the lock. The memory is anonymous, so it
ends with the processes, and a container's limit of /dev/shm does not apply.
"""

import io
import mmap
import pickle
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import get_worker_info

MIN_BYTES = 2**20  # smallest array that is shared; others are pickled
SLOT_BYTES = 2**28  # address space of the arrays of a batch, which takes memory where it was used

_open_slots: "WeakValueDictionary[int, SharedSlots]" = WeakValueDictionary()


class SharedSlots:
    """Slots for the batches of each worker process, used in turn. Workers must be forked from this process."""

    def __init__(self, workers: int, slots: int):
        """Arguments: slots: per worker, more than its unread batches. Raises OSError without enough address space."""
        self._slots, self._sent = slots, 0
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, workers * slots * SLOT_BYTES, flags=flags)
        _open_slots[id(self)] = self

    def pack(self, batch: Any) -> "Packed":
        """Return the batch as DataLoader's `collate_fn` sends it: whoever unpickles it gets the batch."""
        return Packed(self, batch)

    def dumps(self, batch: Any) -> bytes:
        """Pickle a batch in a worker process. Large arrays go to its next slot, as far as they fit."""
        worker = get_worker_info()
        start = ((worker.id if worker else 0) * self._slots + self._sent % self._slots) * SLOT_BYTES
        self._sent += 1
        buffer = io.BytesIO()
        _SlotPickler(buffer, self._memory, start).dump(batch)
        return buffer.getvalue()

    def loads(self, pickled: bytes) -> Any:
        return _SlotUnpickler(io.BytesIO(pickled), self._memory).load()


class Packed:
    """Batch that is pickled into shared slots."""

    def __init__(self, slots: SharedSlots, batch: Any):
        self._slots, self._batch = slots, batch

    def __reduce__(self) -> Any:
        return _unpack, (id(self._slots), self._slots.dumps(self._batch))


def _unpack(key: int, pickled: bytes) -> Any:
    return _open_slots[key].loads(pickled)


class _SlotPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, memory: mmap.mmap, start: int):
        super().__init__(buffer)
        self._memory, self._start, self._end = memory, start, start + SLOT_BYTES

    def persistent_id(self, obj: Any) -> Any:
        is_large = isinstance(obj, np.ndarray) and obj.nbytes >= MIN_BYTES and not obj.dtype.hasobject
        if not is_large or self._start + obj.nbytes > self._end:
            return None
        start, self._start = self._start, self._start + -(-obj.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _array(self._memory, start, obj.dtype, obj.shape)[...] = obj
        return start, obj.dtype.str, obj.shape


class _SlotUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, memory: mmap.mmap):
        super().__init__(buffer)
        self._memory = memory

    def persistent_load(self, pid: Any) -> np.ndarray:
        start, dtype, shape = pid
        # By torch, which copies without Python's lock.
        return torch.from_numpy(_array(self._memory, start, np.dtype(dtype), shape)).clone().numpy()


def _array(memory: mmap.mmap, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.ndarray(shape, dtype, memory, start)


def shared_slots(workers: int, slots: int) -> SharedSlots | None:
    """Return slots for workers; None where they are not forked, or where there is not enough address space."""
    if not workers or torch.multiprocessing.get_start_method() != "fork":
        return None
    try:
        return SharedSlots(workers, slots)
    except OSError:
        return None
