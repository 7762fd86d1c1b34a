"""Weights from the trainer into an engine, and how it is told that they came as they were sent."""

import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint.stream import stream_adapter, stream_weights
from ...bridge.lora.attach import Lora
from .engine import Engine
from .server_connection import WeightsLost

NUMBER = re.compile(r"\d+")
WORDS = 8 * 2**20  # that a digest takes at once
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd numbers of 64 bits, as int64 has them: the golden ratio's digits, and
MIXER = 0xBF58476D1CE4E5B9 - 2**64  # SplitMix64's first factor (https://doi.org/10.1145/2714064.2660195)


@dataclass(frozen=True)
class SyncStats:
    """What a synchronisation took, on this rank."""

    seconds: float
    bytes: int  # that the engine took
    compared: int  # tensors of which the engine's own were the same
    held: dict[str, float] = field(default_factory=dict)  # GiB in use, by the state of the memory: see ModelRollout

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / 1e9 / self.seconds


def checksum(tensor: Tensor) -> str:
    """Of a tensor's bytes, dtype and shape, as `bfloat16 [3, 5] 0f...`: `digest`, in hexadecimal digits."""
    return _said(tensor.dtype, tensor.shape, digest(tensor))


def digest(tensor: Tensor) -> Tensor:
    """Of a tensor's bytes, int64 [], computed where it is, and for which nobody waits.

    The sum of the bytes' words of 64 bits, each times an odd number of its place, modulo 2^64: another value of any one
    word gives another sum, and so do words in other places, but for a chance of about 2^-64.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if odd := -len(flat) % 8:
        flat = torch.nn.functional.pad(flat, (0, odd))
    flat = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), WORDS):
        part = flat[start : start + WORDS]
        places = torch.arange(start + 1, start + 1 + len(part), device=flat.device)
        places *= GOLDEN
        places ^= places >> 29
        places *= MIXER
        places |= 1
        places *= part
        total += places.sum()
    return total


def _said(dtype: torch.dtype, shape: Sequence[int], found: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} {found.item() % 2**64:016x}"


@torch.no_grad()
def sync(
    engine: Engine | None,
    chunks: Sequence[Any],
    hf_config: dict[str, Any],
    source: str | Path,
    *,
    dtype: torch.dtype,
    merge: bool = False,
    adapter: Lora | None = None,
    compare: int = 1,
    seed: int = 0,
) -> SyncStats:
    """Send the model's weights to this rank's engine (None: it has none), as `stream_weights` has them; or its
    `adapter` alone, as `scaled` has it.

    To be called by every rank. `compare`: how many tensors of each kind (`Sample`), chosen by `seed`, are compared with
    the engine's own by checksums afterwards; `dtype` is the engine's. Where an engine fails on any rank, or its tensors
    are others than were sent, every rank raises RuntimeError, which names the rank (and the tensor): WeightsLost of a
    server that is back and can be asked again.
    """
    started, failure = time.perf_counter(), None
    if adapter is not None:
        stream = scaled(stream_adapter(chunks, hf_config, adapter), adapter.settings.scaling, dtype)
    else:
        stream = stream_weights(chunks, hf_config, source, dtype=dtype, merge=merge)
    sample = Sample(stream, compare, seed, dtype)
    compared = 0
    try:
        if engine is not None:
            engine.update(sample)
            compared = sample.compare(engine)
    except Exception as error:  # of any kind: the other ranks wait for this one
        failure = isinstance(error, WeightsLost), f"{type(error).__name__}: {error}"
    for _ in sample:  # what the engine did not read: every rank takes part to the end
        pass
    runtime.synchronize()
    failures: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, failed in enumerate(failures):
        if failed is not None:
            lost, what = failed
            kind = WeightsLost if lost else RuntimeError
            raise kind(f"the rollout engine of rank {rank} did not take the weights: {what}")
    return SyncStats(time.perf_counter() - started, sample.bytes if engine is not None else 0, compared)


def scaled(adapter: Iterable[tuple[str, Tensor]], scaling: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """An adapter's tensors in `dtype`, B matrices times `scaling`: rounded once, and nothing else is to be told."""
    for name, tensor in adapter:
        yield name, (tensor.float() * scaling if ".lora_B." in name else tensor).to(dtype)


class Beneath:
    """An engine whose weights are to be those of the model as they are: what comes is compared, and not kept."""

    def __init__(self, engine: Engine):
        self.checksums = engine.checksums

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass


class Sample:
    """Passes tensors on, and keeps digests of some that it draws: all alike by `seed`, whatever their number.

    Of tensors whose names differ in numbers alone (of a layer, of an expert) `size` are drawn. Nothing here waits for
    the device.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], size: int, seed: int, dtype: torch.dtype):
        self.bytes = 0
        self._weights, self._size, self._dtype = iter(weights), size, dtype
        self._random = random.Random(seed)
        self._kinds: dict[str, _Kind] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            self.bytes += tensor.nbytes
            self._draw(name, tensor)
            yield name, tensor

    def _draw(self, name: str, tensor: Tensor) -> None:
        """Reservoir sampling, by Vitter's algorithm R: https://doi.org/10.1145/3147.3165."""
        kind = self._kinds.setdefault(NUMBER.sub("#", name), _Kind())
        kind.seen += 1
        place = len(kind.kept) if len(kind.kept) < self._size else self._random.randrange(kind.seen)
        if place < self._size:
            as_sent = (tensor,) if tensor.dtype == self._dtype else (tensor, tensor.to(self._dtype))
            kind.kept[place : place + 1] = [(name, tensor.shape, [(each.dtype, digest(each)) for each in as_sent])]

    def compare(self, engine: Engine) -> int:
        """How many of the engine's tensors were compared. Raises RuntimeError where one differs from what was sent."""
        kept = [one for kind in self._kinds.values() for one in kind.kept]
        found = engine.checksums([name for name, *_ in kept])
        for name, shape, digests in kept:
            sent = [_said(dtype, shape, number) for dtype, number in digests]
            if name in found and found[name] not in sent:
                different = f"{name} is not what was sent: {found[name]} instead of {' or '.join(sorted(sent))}. "
                if found[name].split()[0] not in {each.split()[0] for each in sent}:
                    raise RuntimeError(f"{different}Give `swift rollout` and the run the same --torch_dtype")
                raise RuntimeError(f"{different}Its tokens would be another model's")
        return len(found)


@dataclass
class _Kind:
    """Tensors of a kind: how many have come, and of those that were drawn name, shape, and dtypes with digests."""

    seen: int = 0
    kept: list[tuple[str, torch.Size, list[tuple[torch.dtype, Tensor]]]] = field(default_factory=list)
