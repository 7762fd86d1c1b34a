"""Safetensors folders: read slices of tensors, write shards as a stream, put an index over them.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header of dtype, shape and
offsets for each tensor, then the bytes. Reading takes only the bytes of the slice that is asked for, so memory stays
with the slice at hand; writing takes tensors one after another, so no shard is ever whole in memory.
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

from ..mapping.param_mapping import HfConfig
from .hub import INDEX, has_weights, no_weights

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
BLOCK = 8 * 2**20  # bytes that are read or written at a time
SHORTEST = 4096  # bytes of a row's slice: shorter ones are read with all that lies between them


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
    """The tensors of a model folder by name: `tensors`, and `read` for slices of them.

    Raises ValueError, naming the file, where the folder has no safetensors, an index names a shard or a tensor that is
    not there, two files without an index have a tensor of one name, or a file is cut short or is not safetensors.
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
            raise ValueError(f"{self.folder} {no_weights(self.folder)}")
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
            placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(placed.values()))
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
        for name, shard in placed.items():
            if name not in headers[shard]:
                raise ValueError(f"{self.folder / shard} has no tensor {name}, which {INDEX} places there")
            self.tensors[name] = headers[shard][name]

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read every `step`-th of positions start..stop of tensor `name` along `dim`, and only those bytes.

        expert_index: read that part of the tensor along its first dimension; `dim` counts the part's dimensions.
        Raises ValueError where the file ends too early.
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
            if (stop - start) * inner < SHORTEST:  # a disk would read the rest anyway
                return take_every(
                    self.read(name, dim, 0, shape[dim], expert_index).narrow(dim, start, stop - start), dim, step
                )
            runs = range(offset + start * inner, offset + outer * stride, stride)
        return take_every(read_runs(file, dtype, (*shape[:dim], stop - start, *shape[dim + 1 :]), runs), dim, step)


def take_every(tensor: Tensor, dim: int, step: int) -> Tensor:
    """Return every `step`-th position of `tensor` along `dim`, as a view."""
    return tensor[(slice(None),) * dim + (slice(None, None, step),)]


def read_runs(file: Path, dtype: torch.dtype, shape: tuple[int, ...], runs: Sequence[int]) -> Tensor:
    """Return a tensor whose bytes lie in a file in runs of equal length, which start at these offsets."""
    tensor = torch.empty(shape, dtype=dtype)
    if not tensor.numel():
        return tensor
    memory = tensor.flatten().view(torch.uint8).numpy().data
    length = len(memory) // len(runs)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for number, offset in enumerate(runs):
            end = (number + 1) * length
            at = end - length
            while at < end:
                count = os.preadv(descriptor, [memory[at:end]], offset + at - end + length)
                if not count:
                    raise ValueError(f"{file} has become shorter while it was read. Download it again")
                at += count
    finally:
        os.close(descriptor)
    return tensor


def unindexed_files(folder: Path) -> list[str]:
    """Return the safetensors files of a folder that its index does not name; none where it has no index."""
    index = folder / INDEX
    if not index.is_file():
        return []
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(file.name for file in folder.glob("*.safetensors") if file.name not in named)


def tensor_names(folder: str | Path) -> Collection[str]:
    """Return the names of a model folder's tensors: those before its conversion, where it has no safetensors."""
    folder = Path(folder)
    if not has_weights(folder):
        proof = folder / "conversion.json"
        try:
            return json.loads(proof.read_text(encoding="utf-8"))["tensors"] if proof.is_file() else ()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{proof} cannot be read ({error!r}): copy it again, or remove it") from None
    return SafetensorsFolder(folder).tensors


def check_headers(folder: Path) -> None:
    """Raise ValueError where safetensors files of a model's folder are missing, cut short, or none. Reads headers."""
    if has_weights(folder):
        SafetensorsFolder(folder)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file, by the format's own rules.

    Raises ValueError where it is cut short or is not one: its header is over MAX_HEADER, nested, or has other types
    than it should, or its tensors do not fill the rest of the file one after the other.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"{file} is not a whole safetensors file ({size} bytes). Download it again")
        try:
            if length > MAX_HEADER:
                raise ValueError(f"it has {length} bytes, and the format allows {MAX_HEADER}")
            tensors = _tensors_of(file, 8 + length, json.loads(stream.read(length)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is not a safetensors file: its header cannot be read ({error!r})") from None
    end = max((stored.offset + stored.bytes for stored in tensors.values()), default=8 + length)
    if end > size:
        raise ValueError(f"{file} is cut short: {size} bytes, {end} by its header. Download it again")
    return tensors


def _tensors_of(file: Path, begin: int, header: HfConfig) -> dict[str, StoredTensor]:
    """Return the tensors of a header, whose offsets count from `begin`. Raises ValueError, KeyError and TypeError."""
    header.pop("__metadata__", None)
    tensors, places = {}, []
    for name, about in header.items():
        (start, stop), shape = about["data_offsets"], about["shape"]
        if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
            raise ValueError(f"{name} has shape {shape} at {start} to {stop}: whole numbers of at least 0 are needed")
        tensors[name] = stored = StoredTensor(file, begin + start, DTYPES[about["dtype"]], tuple(shape))
        if stop - start != stored.bytes:
            raise ValueError(f"{name} has {stop - start} bytes, and {stored.bytes} by its shape")
        places.append((start, stop, name))
    before = 0
    for start, stop, name in sorted(places):
        if start != before:
            raise ValueError(f"{name} begins at {start}, and the tensor before it ends at {before}")
        before = stop
    return tensors


class WrittenFile(NamedTuple):
    """A safetensors file that is on the disk."""

    checksums: dict[str, str]  # the CHECKSUM of each tensor's bytes
    size: int  # bytes
    sha256: str  # of the whole file


def write_shard(file: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> WrittenFile:
    """Write one safetensors file: `tensors` gives those of `specs`, in its order, and each is let go once written.

    One may come in runs, in the order of its values. The file is on the disk when this returns.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at := at + spec.bytes],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    source, checksums = iter(tensors), {}
    with file.open("wb") as raw, _Hashed(raw) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (dtype, shape) in specs.items():
            left, checksum = math.prod(shape), xxh3_128()
            while True:
                came, run = next(source)
                left -= run.numel()
                if came != name or left < 0:
                    raise RuntimeError(f"{file}: {name} {shape} was to come, not {tuple(run.shape)} of {came}")
                for data in _blocks(run.detach(), dtype):
                    checksum.update(data)
                    stream.write(data)
                del run
                if left == 0:
                    break
            checksums[name] = checksum.hexdigest()
        sync(raw)
        return WrittenFile(checksums, raw.tell(), stream.digest())


class _Hashed:
    """A stream whose blocks are hashed by a thread while they are written."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._hash = raw, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._last: Future | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._last is not None:
            self._last.result()  # so that one block at most waits
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
    """Yield a tensor's bytes in `dtype`, a block at a time: so no copy of the whole of it is made."""
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    rows = max(1, BLOCK // max(1, tensor[:1].numel() * dtype.itemsize))
    for part in tensor.split(rows):
        data = part.to(device="cpu", dtype=dtype).contiguous()
        yield data.flatten().view(torch.uint8).numpy().data


def finish_shards(folder: Path, shards: Sequence[tuple[str, Mapping[str, TensorSpec]]]) -> dict[str, str]:
    """Give written files their names: model.safetensors, or model-00001-of-0000N.safetensors and an index.

    `shards` are the files' present names, each with its tensors, in the order that they are to have. Returns the file
    of each tensor.
    """
    weights, total = {}, 0
    for number, (written, specs) in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / written).rename(folder / name)
        weights |= dict.fromkeys(specs, name)
        total += sum(spec.bytes for spec in specs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        with (folder / INDEX).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(index, indent=2) + "\n")
            sync(stream)
    return weights


def sync(stream) -> None:
    """Bring an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())
