"""Weight sync from the trainer into an engine, verified by checksums."""

import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint.direct_weights import DirectWeights
from ...bridge.checkpoint.strided_copy import LayoutWriter
from ..distributed.collectives import all_gather_objects
from .engine import Engine, WritableEngine
from .server_connection import WeightsLost

NUMBER = re.compile(r"\d+")
WORDS = 8 * 2**20  # per piece of a digest
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd 64-bit numbers as int64: digits of the golden ratio, and
MIXER = 0xBF58476D1CE4E5B9 - 2**64  # SplitMix64's first factor (https://doi.org/10.1145/2714064.2660195)


@dataclass(frozen=True)
class SyncStats:
    """Statistics of one weight sync on this rank."""

    seconds: float
    bytes: int  # loaded by the engine
    compared: int  # tensors verified in the engine
    held: dict[str, float] = field(default_factory=dict)  # GiB in use by memory state (ModelRollout)

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / 1e9 / self.seconds


def checksum(tensor: Tensor) -> str:
    """Return dtype, shape and `digest` (hexadecimal) of a tensor, as in `bfloat16 [3, 5] 0f...`."""
    return _format_checksum(tensor.dtype, tensor.shape, digest(tensor))


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bytes as int64 [], computed on its device without synchronisation.

    It is the sum of the 64-bit words, each times an odd number that depends on its position, modulo 2^64. A changed
    word or a changed order gives another sum, except with a probability of about 2^-64.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if odd := -len(flat) % 8:
        flat = torch.nn.functional.pad(flat, (0, odd))
    flat = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), WORDS):
        words = flat[start : start + WORDS]
        factors = torch.arange(start + 1, start + 1 + len(words), device=flat.device)
        factors *= GOLDEN
        factors ^= factors >> 29
        factors *= MIXER
        factors |= 1
        factors *= words
        total += factors.sum()
    return total


def _format_checksum(dtype: torch.dtype, shape: Sequence[int], value: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} {value.item() % 2**64:016x}"


@torch.no_grad()
def sync(
    engine: Engine | None,
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    compare: int = 1,
    seed: int = 0,
) -> SyncStats:
    """Send weights to this rank's engine, if it has one.

    Every rank calls this, and reads `weights` to their end. `compare` tensors of each kind (`ChecksumSample`), chosen
    by `seed`, are compared with the engine's by checksums; `dtype` is the engine's. Raises RuntimeError on every rank,
    naming the failed rank, where an engine fails or has other tensors than were sent; WeightsLost where a server was
    restarted and can be retried.
    """
    started, failure = time.perf_counter(), None
    sample = ChecksumSample(weights, compare, seed, dtype)
    compared = 0
    try:
        if engine is not None:
            engine.update(sample)
            compared = sample.compare(engine)
    except Exception as error:  # any kind, since the other ranks wait for this one
        failure = isinstance(error, WeightsLost), f"{type(error).__name__}: {error}"
    for _ in sample:  # drain: every rank takes part in the stream to its end
        pass
    runtime.synchronize()
    _raise_failures(failure)
    return SyncStats(time.perf_counter() - started, sample.bytes if engine is not None else 0, compared)


@torch.no_grad()
def sync_direct(engine: WritableEngine, weights: DirectWeights, *, compare: int = 1, seed: int = 0) -> SyncStats:
    """Copy weights into the tensors of this rank's engine. Arguments and errors are those of `sync`.

    Of the engine's tensors whose names differ only in numbers, `compare` are compared with their sources by digests.
    """
    started, failure, digests = time.perf_counter(), None, list[tuple[str, Tensor, Tensor]]()
    sources = weights.sources()
    try:
        layout = engine.layout
        assert layout is not None
        chosen = _choose(weights.targets, compare, random.Random(seed))
        with engine.writing():
            writer = LayoutWriter(layout)
            for source, copies in sources:
                for name, copy in copies:
                    block, target = writer.copy(source, name, copy)
                    if name in chosen:
                        digests.append((name, digest(block.to(target.dtype)), digest(target)))
        _compare_digests(digests)
    except Exception as error:  # any kind, since the other ranks wait for this one
        failure = False, f"{type(error).__name__}: {error}"
    for _ in sources:
        pass
    runtime.synchronize()
    _raise_failures(failure)
    return SyncStats(time.perf_counter() - started, weights.bytes, len({name for name, *_ in digests}))


def _choose(names: Iterable[str], size: int, generator: random.Random) -> set[str]:
    """Choose `size` of the names that differ only in numbers, for each kind of name."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(NUMBER.sub("#", name), []).append(name)
    return {name for kind in kinds.values() for name in generator.sample(kind, min(size, len(kind)))}


def _compare_digests(digests: list[tuple[str, Tensor, Tensor]]) -> None:
    """Raise RuntimeError where the digests of a source and of the engine's tensor differ. Waits for the device once."""
    names, sent, stored = zip(*digests, strict=True)
    for name, differs in zip(names, (torch.stack(sent) != torch.stack(stored)).tolist(), strict=True):
        if differs:
            raise RuntimeError(f"{name} is not what was sent. It would generate by another model")


def _raise_failures(failure: tuple[bool, str] | None) -> None:
    """Raise the failures of all ranks on every rank. failure: of this rank, and whether a server has lost weights."""
    for rank, failed in enumerate(all_gather_objects(failure)):
        if failed is not None:
            is_lost, problem = failed
            error_class = WeightsLost if is_lost else RuntimeError
            raise error_class(f"the rollout engine of rank {rank} did not load the weights: {problem}")


def scaled(adapter: Iterable[tuple[str, Tensor]], scaling: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors in `dtype`, with `scaling` folded into the B matrices and rounded once."""
    for name, tensor in adapter:
        yield name, (tensor.float() * scaling if ".lora_B." in name else tensor).to(dtype)


class BaseWeightsCheck:
    """Engine adapter that only compares the streamed weights with the engine's, without loading them."""

    def __init__(self, engine: Engine):
        self.checksums = engine.checksums

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass


class ChecksumSample:
    """Stream of tensors that keeps digests of a random sample, without synchronising the device.

    Of the tensors whose names differ only in numbers (layer, expert), `size` are drawn by `seed`, each equally likely.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], size: int, seed: int, dtype: torch.dtype):
        self.bytes = 0
        self._weights, self._size, self._dtype = iter(weights), size, dtype
        self._random = random.Random(seed)
        self._kinds: dict[str, _TensorKind] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.bytes += tensor.nbytes
            self._draw(name, tensor)
            yield name, tensor

    def _draw(self, name: str, tensor: Tensor) -> None:
        """Apply reservoir sampling (Vitter's algorithm R, https://doi.org/10.1145/3147.3165)."""
        kind = self._kinds.setdefault(NUMBER.sub("#", name), _TensorKind())
        kind.seen += 1
        slot = len(kind.kept) if len(kind.kept) < self._size else self._random.randrange(kind.seen)
        if slot < self._size:
            versions = (tensor,) if tensor.dtype == self._dtype else (tensor, tensor.to(self._dtype))
            kind.kept[slot : slot + 1] = [
                (name, tensor.shape, [(version.dtype, digest(version)) for version in versions])
            ]

    def compare(self, engine: Engine) -> int:
        """Return the number of compared tensors. Raises RuntimeError where one differs from what was sent."""
        entries = [entry for kind in self._kinds.values() for entry in kind.kept]
        checksums = engine.checksums([name for name, *_ in entries])
        for name, shape, digests in entries:
            sent = [_format_checksum(dtype, shape, number) for dtype, number in digests]
            if name in checksums and checksums[name] not in sent:
                problem = f"{name} is not what was sent: {checksums[name]} instead of {' or '.join(sorted(sent))}. "
                if checksums[name].split()[0] not in {text.split()[0] for text in sent}:
                    raise RuntimeError(f"{problem}Set the same --torch_dtype for `swift rollout` and the run")
                raise RuntimeError(f"{problem}It would generate by another model")
        return len(checksums)


@dataclass
class _TensorKind:
    """Tensors whose names differ only in numbers: their count, and name, shape, dtypes and digests of those drawn."""

    seen: int = 0
    kept: list[tuple[str, torch.Size, list[tuple[torch.dtype, Tensor]]]] = field(default_factory=list)
