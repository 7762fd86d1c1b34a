"""Weight buckets: several tensors in one buffer, which processes of one host can share.

A bucket is a buffer and a table of its tensors. The buffer is anonymous memory (memfd). Other processes of the same
user open it through /proc. It needs no space in /dev/shm, and is freed when the last process closes it. No file on a
disk can have its name and seals, so a client cannot make the server read another file.

Over HTTP a bucket is the table's length in eight bytes, the table in JSON, then the buffer.
"""

import fcntl
import hmac
import json
import math
import mmap
import os
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; enough for any dtype
BUCKET_BYTES = 512 * 2**20
PROBE_BYTES = 16  # of the secret by which a client proves that memory is its own
MEMORY = "megaswift-weights"
# Sealed against resizing: a read beyond the end of shrunk memory raises SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class TensorEntry(NamedTuple):
    """Tensor in a bucket. `dtype`: torch's name; `offset`: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class MemoryHandle(NamedTuple):
    """Address of shared memory for another process of this host."""

    pid: int
    fd: int
    bytes: int


def aligned(count: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """Shared memory, with `flat` as a uint8 tensor of it. Raises OSError where there is too little memory."""

    def __init__(self, count: int):
        fd = os.memfd_create(MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, count)
            self._map = mmap.mmap(fd, count)
        except (OSError, ValueError):
            os.close(fd)
            raise
        with suppress(OSError):  # without seals `attach` rejects the memory, and buckets are sent over HTTP
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        self._fd: int | None = fd
        self.handle = MemoryHandle(os.getpid(), fd, count)
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Release the memory. It is freed once no process has it open and no tensor views it."""
        if self._fd is not None:
            del self.flat, self._map
            os.close(self._fd)
            self._fd = None


def attach(handle: MemoryHandle) -> Tensor:
    """Return another process's memory as a uint8 tensor. Writes go to a private copy.

    Raises OSError where the memory cannot be opened (another host, container or user) or is not `SharedMemory`.
    """
    fd = _open(handle)
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE  # writes go to the private copy: torch requires writable memory
        return torch.frombuffer(mmap.mmap(fd, handle.bytes, flags=mmap.MAP_PRIVATE, prot=protection), dtype=torch.uint8)
    finally:
        os.close(fd)  # the mapping keeps the memory open


def _open(handle: MemoryHandle) -> int:
    """Return a descriptor of `SharedMemory` of at least the handle's size.

    Raises OSError for any other file without opening it: to open a device or a pipe can have side effects.
    """
    if not all(type(number) is int and number >= minimum for number, minimum in zip(handle, (1, 0, 1), strict=True)):
        raise OSError(f"{tuple(handle)} is no address of memory")
    path_fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{path_fd}") != f"/memfd:{MEMORY} (deleted)":
            raise OSError(f"file {handle.fd} of process {handle.pid} is not shared memory for weights")
        fd = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(path_fd)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < handle.bytes:
            raise OSError(f"file {handle.fd} of process {handle.pid} is not shared memory of {handle.bytes} bytes")
    except OSError:
        os.close(fd)
        raise
    return fd


def is_local(pid: int, fd: int, secret: str) -> bool:
    """Return whether this process can read a client's memory and finds its secret (PROBE_BYTES in hex) there."""
    try:
        content = attach(MemoryHandle(pid, fd, PROBE_BYTES)).numpy().tobytes()
    except (OSError, ValueError):
        return False
    return hmac.compare_digest(content.hex(), secret)


def process_start_time(pid: int) -> str | None:
    """Return the start time of a process of this host in kernel ticks; None if it has ended."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else numbers[18]


async def receive_body(count: int, chunks: AsyncIterable[bytes]) -> SharedMemory:
    """Read a request body of `count` bytes into shared memory that workers can open."""
    memory, offset = SharedMemory(count), 0
    try:
        async for chunk in chunks:
            if chunk:
                memory.write(offset, chunk)
                offset += len(chunk)
    except BaseException:  # the client has disconnected
        memory.close()
        raise
    return memory


def unpack_tensors(flat: Tensor, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket as views of `flat` (uint8, any device)."""
    for entry in entries:
        piece = flat[entry.offset : entry.offset + entry.bytes]
        yield entry.name, piece.view(getattr(torch, entry.dtype)).view(entry.shape)


class Bucket(NamedTuple):
    """Received bucket, in the memory of `handle` from offset `start`.

    Without a `handle`, the trainer's GPU broadcasts its `bytes`.
    """

    entries: list[TensorEntry]
    handle: MemoryHandle | None
    start: int = 0
    bytes: int = 0


@dataclass
class BucketWriter:
    """Bucket that is being filled."""

    flat: Tensor  # uint8
    entries: list[TensorEntry] = field(default_factory=list)
    used: int = 0  # bytes

    def fits(self, tensor: Tensor) -> bool:
        return self.used + tensor.nbytes <= len(self.flat)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor, which must fit, into the bucket."""
        entry = TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.used)
        self.flat[self.used : self.used + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        self.entries.append(entry)
        self.used = aligned(self.used + tensor.nbytes)


def encode_table(entries: Sequence[TensorEntry]) -> bytes:
    """Return the length and table that precede a bucket's buffer over HTTP, padded to a multiple of ALIGNMENT."""
    text = json.dumps(entries).encode()
    text += b" " * (aligned(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def decode_table(data: Tensor) -> tuple[list[TensorEntry], int]:
    """Return the entries of a bucket received over HTTP, and the offset of its buffer. Raises ValueError."""
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError(f"a bucket of {len(data)} bytes declares a table of {length}")
    items = json.loads(data[8 : 8 + length].numpy().tobytes())
    return [parse_entry(item, len(data) - 8 - length) for item in items], 8 + length


def parse_entry(item: Any, size: int | None = None) -> TensorEntry:
    """Return an entry from JSON. Raises ValueError if it is invalid or exceeds a buffer of `size` bytes."""
    try:
        name, dtype, shape, offset = item
        entry, is_dtype = (
            TensorEntry(name, dtype, tuple(shape), offset),
            isinstance(getattr(torch, dtype, None), torch.dtype),
        )
        are_counts = all(type(number) is int and number >= 0 for number in (*entry.shape, offset))
        is_valid = isinstance(name, str) and is_dtype and are_counts and offset % ALIGNMENT == 0
        is_valid = is_valid and (size is None or offset + entry.bytes <= size)
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        limit = "" if size is None else f" of {size} bytes"
        raise ValueError(f"{repr(item)[:200]} is not a tensor in a bucket{limit}")
    return entry
