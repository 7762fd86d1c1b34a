"""Safetensors folders: readers of tensor slices, and streaming writers of shards and their index.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header of dtype, shape and
offsets for each tensor, then the bytes. A read loads only the bytes of its slice. A write takes one tensor at a time,
so that no full shard is in memory.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128

from ..mapping.architecture import HfConfig
from .hub import INDEX, has_weights, no_weights_message

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHECKSUM = "xxh3_128"  # of https://xxhash.com, in hexadecimal
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
BLOCK = 8 * 2**20  # bytes per read or write
MIN_SLICE = 4096  # bytes: shorter slices of rows are read together with the bytes between them


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """Location, dtype and shape of a tensor in a file."""

    file: Path
    offset: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape)

    @property
    def bytes(self) -> int:
        return self.spec.bytes


class SafetensorsFolder:
    """Safetensors of a model folder by name.

    Raises ValueError, naming the file, if the folder has no safetensors, the index names a missing shard or tensor, two
    files without an index have a tensor of the same name, or a file is truncated or not safetensors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        index = self.folder / INDEX
        if index.is_file():
            self._read_index(index)
            return
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.folder} {no_weights_message(self.folder)}")
        for file in [self.folder / "model.safetensors"] if self.folder / "model.safetensors" in files else files:
            tensors = read_header(file)
            for name in sorted(tensors.keys() & self.tensors.keys()):
                raise ValueError(
                    f"{self.tensors[name].file} and {file.name} both have a tensor {name}, and no {INDEX} tells which "
                    "counts: remove the file that is not of this model"
                )
            self.tensors |= tensors

    def _read_index(self, index: Path) -> None:
        try:
            shard_by_tensor: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(shard_by_tensor.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from None
        if not all(isinstance(shard, str) for shard in shards):
            raise ValueError(f"{index} is not an index of safetensors files: its weight_map must hold file names")
        headers = {}
        for shard in shards:
            if shard.startswith(("/", "\\")) or ".." in shard.replace("\\", "/").split("/"):
                raise ValueError(f"{index} names {shard}, which is outside the folder. Download the model again")
            if not (self.folder / shard).is_file():
                raise ValueError(f"{self.folder / shard} is missing: {INDEX} names it. Download the model again")
            headers[shard] = read_header(self.folder / shard)
        for name, shard in shard_by_tensor.items():
            if name not in headers[shard]:
                raise ValueError(f"{self.folder / shard} has no tensor {name}, which {INDEX} places there")
            self.tensors[name] = headers[shard][name]

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read every `step`-th of positions start..stop of tensor `name` along `dim`, without loading the rest.

        expert_index: read this entry of the tensor's first dimension; `dim` then counts the remaining dimensions.
        Raises ValueError if the file ends too early.
        """
        file, offset, dtype, shape = self.tensors[name]
        if expert_index is not None:
            shape = shape[1:]
            offset += expert_index * math.prod(shape) * dtype.itemsize
        if not shape:
            return read_runs(file, dtype, (), [offset])
        inner = math.prod(shape[dim + 1 :]) * dtype.itemsize  # bytes of one position
        stride = shape[dim] * inner
        outer = math.prod(shape[:dim])
        runs: Sequence[int] = [offset + start * inner]
        if (start, stop) != (0, shape[dim]) and outer > 1:
            if (stop - start) * inner < MIN_SLICE:  # a disk would read the rest anyway
                return take_strided(
                    self.read(name, dim, 0, shape[dim], expert_index).narrow(dim, start, stop - start), dim, step
                )
            runs = range(offset + start * inner, offset + outer * stride, stride)
        return take_strided(read_runs(file, dtype, (*shape[:dim], stop - start, *shape[dim + 1 :]), runs), dim, step)

    def read_whole(self, name: str) -> Tensor:
        """Read tensor `name`. Raises ValueError if the file ends too early."""
        return self.read(name, 0, 0, next(iter(self.tensors[name].shape), 1))


def take_strided(tensor: Tensor, dim: int, step: int) -> Tensor:
    """Return every `step`-th position of `tensor` along `dim`, as a view."""
    return tensor[(slice(None),) * dim + (slice(None, None, step),)]


def read_runs(file: Path, dtype: torch.dtype, shape: tuple[int, ...], runs: Sequence[int]) -> Tensor:
    """Read a tensor whose bytes are runs of equal length in a file, at the offsets `runs`.

    In a process that uses a GPU the memory of a block is pinned. torch keeps it for the next block, where other memory
    would be mapped page by page again; and the GPU copies from it without another copy on the host.
    """
    size = TensorSpec(dtype, shape).bytes
    tensor = torch.empty(shape, dtype=dtype, pin_memory=0 < size <= BLOCK and torch.cuda.is_initialized())
    if not size:
        return tensor
    memory = tensor.flatten().view(torch.uint8).numpy().data
    length = len(memory) // len(runs)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for number, offset in enumerate(runs):
            end = (number + 1) * length
            position = end - length
            while position < end:
                count = os.preadv(descriptor, [memory[position:end]], offset + position - end + length)
                if not count:
                    raise ValueError(f"{file} has become shorter while it was read. Download it again")
                position += count
    finally:
        os.close(descriptor)
    return tensor


def unindexed_files(folder: Path) -> list[str]:
    """Return the safetensors files of a folder that its index does not name; none without an index."""
    index = folder / INDEX
    if not index.is_file():
        return []
    indexed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(file.name for file in folder.glob("*.safetensors") if file.name not in indexed)


def tensor_names(folder: str | Path) -> Collection[str]:
    """Return the tensor names of a model folder; without safetensors, the Hugging Face names in its conversion.json."""
    folder = Path(folder)
    if not has_weights(folder):
        report = folder / "conversion.json"
        try:
            return json.loads(report.read_text(encoding="utf-8"))["tensors"] if report.is_file() else ()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{report} cannot be read ({error!r}): copy it again, or remove it") from None
    return SafetensorsFolder(folder).tensors


def check_headers(folder: Path) -> None:
    """Raise ValueError if safetensors files of a model folder are missing or truncated. Reads headers only."""
    if has_weights(folder):
        SafetensorsFolder(folder)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file.

    Raises ValueError if the file is truncated, its header is longer than MAX_HEADER, nested or of wrong types, or its
    tensors are not contiguous.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"{file} is not a whole safetensors file ({size} bytes). Download it again")
        try:
            if length > MAX_HEADER:
                raise ValueError(f"it has {length} bytes, and the format allows {MAX_HEADER}")
            tensors = _parse_header(file, 8 + length, json.loads(stream.read(length)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is not a safetensors file: its header cannot be read ({error!r})") from None
    end = max((stored.offset + stored.bytes for stored in tensors.values()), default=8 + length)
    if end > size:
        raise ValueError(f"{file} is cut short: {size} bytes, {end} by its header. Download it again")
    return tensors


def _parse_header(file: Path, begin: int, header: HfConfig) -> dict[str, StoredTensor]:
    """Return the tensors in a header with offsets relative to `begin`. Raises ValueError, KeyError and TypeError."""
    header.pop("__metadata__", None)
    tensors, ranges = {}, []
    for name, entry in header.items():
        (start, stop), shape = entry["data_offsets"], entry["shape"]
        if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
            raise ValueError(f"{name} has shape {shape} at {start} to {stop}: whole numbers of at least 0 are needed")
        tensors[name] = stored = StoredTensor(file, begin + start, DTYPES[entry["dtype"]], tuple(shape))
        if stop - start != stored.bytes:
            raise ValueError(f"{name} has {stop - start} bytes, and {stored.bytes} by its shape")
        ranges.append((start, stop, name))
    previous_end = 0
    for start, stop, name in sorted(ranges):
        if start != previous_end:
            raise ValueError(f"{name} begins at {start}, and the tensor before it ends at {previous_end}")
        previous_end = stop
    return tensors


class WrittenFile(NamedTuple):
    """Checksums and size of a safetensors file on the disk."""

    checksums: dict[str, str]  # CHECKSUM of each tensor's bytes
    size: int  # bytes
    sha256: str  # of the whole file


def write_shard(file: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> WrittenFile:
    """Write one safetensors file from `tensors`, an iterator over the tensors of `specs` in the same order.

    A tensor may come in runs, in the order of its values, and is released once written. The file is on the disk when
    this returns.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset := offset + spec.bytes],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    source, checksums = iter(tensors), {}
    with file.open("wb") as raw, _Hashed(raw) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (dtype, shape) in specs.items():
            remaining, checksum = math.prod(shape), xxh3_128()
            while True:
                received, run = next(source)
                remaining -= run.numel()
                if received != name or remaining < 0:
                    raise RuntimeError(f"{file}: {name} {shape} was to come, not {tuple(run.shape)} of {received}")
                for data in _blocks(run.detach(), dtype):
                    checksum.update(data)
                    stream.write(data)
                del run
                if remaining == 0:
                    break
            checksums[name] = checksum.hexdigest()
        sync(raw)
        return WrittenFile(checksums, raw.tell(), stream.digest())


class _Hashed:
    """Stream that a thread hashes while blocks are written."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._hash = raw, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._last: Future | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._last is not None:
            self._last.result()  # at most one block waits
        self._last = self._pool.submit(self._hash.update, data)
        self._raw.write(data)

    def digest(self) -> str:
        if self._last is not None:
            self._last.result()
        return self._hash.hexdigest()

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield a tensor's bytes in `dtype`, one block at a time, without a full copy."""
    if not tensor.numel():  # its stride is 0 if it comes from NumPy 2.5, and then it cannot be viewed as bytes
        return
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    rows = max(1, BLOCK // max(1, tensor[:1].numel() * dtype.itemsize))
    for part in tensor.split(rows):
        data = part.to(device="cpu", dtype=dtype).contiguous()
        yield data.flatten().view(torch.uint8).numpy().data


def finish_shards(folder: Path, shards: Sequence[tuple[str, Mapping[str, TensorSpec]]]) -> dict[str, str]:
    """Rename written files to model.safetensors, or to model-00001-of-0000N.safetensors with an index.

    shards: current file names with their tensors, in the final order. Returns the file of each tensor.
    """
    weights, total = {}, 0
    for number, (file, specs) in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / file).rename(folder / name)
        weights |= dict.fromkeys(specs, name)
        total += sum(spec.bytes for spec in specs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        with (folder / INDEX).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(index, indent=2) + "\n")
            sync(stream)
    return weights


def sync(stream) -> None:
    """Flush an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())
