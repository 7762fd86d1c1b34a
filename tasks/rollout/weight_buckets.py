"""Weights on their way to a server: tensors side by side in buckets, in memory that processes of one host can share.

A bucket is flat bytes and a table of what lies where. Its bytes are in anonymous memory (memfd): other processes of the
same user open it through /proc, it needs no room in /dev/shm, and it is gone when the last process that has it is. It
has a name and a seal that no file on a disk can have: whoever names memory to a server names nothing else.
Over HTTP the table goes first: eight bytes of its length, the table in JSON, the bytes.
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

ALIGNMENT = 64  # bytes; what any dtype is content with
BUCKET_BYTES = 512 * 2**20
PROBE_BYTES = 16  # of a secret by which a client proves that memory is its own
MEMORY = "megaswift-weights"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # reading beyond memory that shrank would kill


class Entry(NamedTuple):
    """A tensor in a bucket: `dtype` as in torch's name for it, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class Place(NamedTuple):
    """Where another process of this host finds memory."""

    pid: int
    fd: int
    bytes: int


def aligned(count: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Memory:
    """Shared memory of so many bytes: `flat` is a uint8 tensor of it. Raises OSError where there is not enough."""

    def __init__(self, count: int):
        fd = os.memfd_create(MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, count)
            self._map = mmap.mmap(fd, count)
        except (OSError, ValueError):
            os.close(fd)
            raise
        with suppress(OSError):  # without seals nobody attaches it: its bytes go by HTTP
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        self._fd: int | None = fd
        self.place = Place(os.getpid(), fd, count)
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)

    def write(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    def close(self) -> None:
        """Let go of it, if that is yet to be done; it lives on where another process has it open, and as long as a
        tensor views it."""
        if self._fd is not None:
            del self.flat, self._map
            os.close(self._fd)
            self._fd = None


def attach(place: Place) -> Tensor:
    """The memory of another process as a uint8 tensor, for as long as the tensor lives; writing to it changes a copy.

    Raises OSError where it cannot be opened (another host, another container, another user), or is not a `Memory`.
    """
    fd = _open(place)
    try:
        read = mmap.PROT_READ | mmap.PROT_WRITE  # to the copy: torch takes no memory that is read-only
        return torch.frombuffer(mmap.mmap(fd, place.bytes, flags=mmap.MAP_PRIVATE, prot=read), dtype=torch.uint8)
    finally:
        os.close(fd)  # the map keeps it


def _open(place: Place) -> int:
    """A descriptor of memory that is a `Memory` of at least so many bytes. Raises OSError for anything else: opening a
    device, or a pipe, could do something."""
    if not all(type(number) is int and number >= least for number, least in zip(place, (1, 0, 1), strict=True)):
        raise OSError(f"{tuple(place)} names no memory")
    handle = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{handle}") != f"/memfd:{MEMORY} (deleted)":
            raise OSError(f"file {place.fd} of process {place.pid} is not shared memory of weights")
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size < place.bytes:
            raise OSError(f"file {place.fd} of process {place.pid} is not shared memory of {place.bytes} bytes")
    except OSError:
        os.close(fd)
        raise
    return fd


def is_local(pid: int, fd: int, secret: str) -> bool:
    """Whether a client's memory can be read here: it is the client's if its secret, PROBE_BYTES in hex, is in it."""
    try:
        content = attach(Place(pid, fd, PROBE_BYTES)).numpy().tobytes()
    except (OSError, ValueError):
        return False
    return hmac.compare_digest(content.hex(), secret)


def start_of_process(pid: int) -> str | None:
    """When a process of this host started, in the kernel's ticks; None where it has ended."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else numbers[18]


async def received(count: int, chunks: AsyncIterable[bytes]) -> Memory:
    """A request's body of so many bytes, as it comes, in memory that workers can open."""
    memory, at = Memory(count), 0
    try:
        async for chunk in chunks:
            if chunk:
                memory.write(at, chunk)
                at += len(chunk)
    except BaseException:  # the client has gone
        memory.close()
        raise
    return memory


def tensors_in(flat: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of `flat` (uint8, any device)."""
    for entry in entries:
        piece = flat[entry.offset : entry.offset + entry.bytes]
        yield entry.name, piece.view(getattr(torch, entry.dtype)).view(entry.shape)


class Bucket(NamedTuple):
    """A bucket that has come: where its tensors lie, in bytes that begin at `start` of `place`.

    Without a place its `bytes` are to come from the trainer's GPU.
    """

    entries: list[Entry]
    place: Place | None
    start: int = 0
    bytes: int = 0


@dataclass
class Packing:
    """A bucket that is being filled."""

    flat: Tensor  # uint8
    entries: list[Entry] = field(default_factory=list)
    used: int = 0  # bytes

    def fits(self, tensor: Tensor) -> bool:
        return self.used + tensor.nbytes <= len(self.flat)

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor in; it must fit."""
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.used)
        self.flat[self.used : self.used + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        self.entries.append(entry)
        self.used = aligned(self.used + tensor.nbytes)


def table(entries: Sequence[Entry]) -> bytes:
    """What goes before a bucket's bytes over HTTP; its length is a multiple of ALIGNMENT."""
    text = json.dumps(entries).encode()
    text += b" " * (aligned(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def read_table(data: Tensor) -> tuple[list[Entry], int]:
    """The entries at the beginning of a bucket that came over HTTP, and where its bytes begin. Raises ValueError."""
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    if not 0 < length <= len(data) - 8:
        raise ValueError(f"a bucket of {len(data)} bytes says that its table has {length}")
    items = json.loads(data[8 : 8 + length].numpy().tobytes())
    return [as_entry(item, len(data) - 8 - length) for item in items], 8 + length


def as_entry(item: Any, within: int | None = None) -> Entry:
    """An entry from JSON. Raises ValueError for what is none, or not `within` so many bytes."""
    try:
        name, dtype, shape, offset = item
        entry, is_dtype = Entry(name, dtype, tuple(shape), offset), isinstance(getattr(torch, dtype, None), torch.dtype)
        numbers = all(type(number) is int and number >= 0 for number in (*entry.shape, offset))
        right = isinstance(name, str) and is_dtype and numbers and offset % ALIGNMENT == 0
        right = right and (within is None or offset + entry.bytes <= within)
    except (TypeError, ValueError):
        right = False
    if not right:
        of = "" if within is None else f" of {within} bytes"
        raise ValueError(f"{repr(item)[:200]} is not a tensor in a bucket{of}")
    return entry
