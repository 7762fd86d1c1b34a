"""Sharded state as n-d regions of global tensors: saved by each rank, loaded in any other layout.

A rank's shard of a tensor (by tensor parallelism) is made of runs of the whole tensor; of the shard a rank may hold a
flat run of elements alone (ZeRO-1), which is a few boxes. A box says where it lies in the whole tensor, as this is
without any parallelism, so that whoever needs an element finds it without asking who has had it.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..lora.adapter_mapping import AdapterPlan
from ..mapping.local_params import by_key, shard_position
from ..mapping.param_mapping import VOCAB, HfConfig, ParamKey
from ..model.chunk_mapping import map_chunks
from .safetensors_io import SHORTEST, StoredTensor, read_header, read_runs
from .sharding import pieces_of, replica_of, with_tied

READERS = 8  # threads
READ = 64 * 2**20  # bytes that each reads at a time

Region = tuple[range, ...]  # places along each dimension


class ShardRegion(NamedTuple):
    """A box of a whole tensor."""

    name: str  # the whole tensor's
    region: Region  # where it lies in it
    values: Tensor  # a view, with the region's shape
    first: bool  # whether this rank's is the first copy of it: the one to be written

    @property
    def label(self) -> str:
        """Its name in a file."""
        return f"{self.name}@{','.join(str(each.start) for each in self.region)}"


class TrainedParams:
    """The trained parameters of this rank's GPTModels, and where in whole tensors their elements lie.

    `plan`: of a model's adapters, and what is trained beside them.
    """

    def __init__(self, chunks: Sequence[GPTModel], hf_config: HfConfig, plan: AdapterPlan | None):
        _, self._architecture, self._entries = map_chunks(chunks, hf_config)
        if plan:
            self._entries = plan.all_entries
        self._names = with_tied({key: _name(key) for key in self._entries}, self._entries)
        self._held = {
            id(parameter): (chunk, {key: tuple(view.shape) for key, view in by_key(chunk, name, parameter)})
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }

    def regions(
        self, parameter: Tensor, start: int, runs: Mapping[str, Tensor], *, sharded: bool
    ) -> Iterator[ShardRegion]:
        """Yield the boxes of `runs`, each [elements]: what belongs to the parameter's elements from `start` on.

        A box's name has its run's in front. `sharded`: each data-parallel rank has elements of its own.
        """
        chunk, parts = self._held[id(parameter)]
        local = range(start, start + min(map(len, runs.values())))
        at = 0  # the first element of a part, which is one expert's where these are stacked
        for key, shape in parts.items():
            here = _common(local, range(at, at + math.prod(shape)))
            taken = here.start - start
            pieces = self._pieces(key, shape) if here else ()
            for region in regions_of_run(shape, here.start - at, here.stop - at):
                extent = tuple(map(len, region))
                flat = slice(taken, taken := taken + math.prod(extent))
                for inside, whole in _placed(region, self._entries[key].dim, pieces):
                    for prefix, run in runs.items():
                        values = run[flat].view(extent)[inside]
                        yield ShardRegion(prefix + self._names[key], whole, values, self._first(chunk, key, sharded))
            at += math.prod(shape)

    def _first(self, chunk: GPTModel, key: ParamKey, sharded: bool) -> bool:
        copied, split, data = replica_of(chunk, self._names[key], key, self._entries[key])
        return not (copied or split or (data and not sharded))

    def _pieces(self, key: ParamKey, shape: Sequence[int]) -> list[tuple[range, int]]:
        """Return the runs of the whole tensor that a shard is made of, without the vocabulary's padding.

        Each by its places in the shard, along the split dimension, and its first place in the whole tensor.
        """
        entry = self._entries[key]
        pieces = pieces_of(entry, shape, *shard_position(key, entry), self._architecture)
        rows = self._architecture.vocab_size if entry.kind is VOCAB else math.inf
        return [(range(at, at + int(min(length, rows - to))), to) for at, to, length in pieces if to < rows]


def _name(key: ParamKey) -> str:
    name = key.name.format(layer=key.layer)
    return name if key.expert is None else f"{name}.{key.expert}"


def regions_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that elements start..stop of a tensor make up, one after another.

    Whole rows in the middle; of a row at either end what is inside, in the same way.
    """
    inner = math.prod(shape[1:])
    cuts = {start, min(-(-start // inner) * inner, stop), max(stop // inner * inner, start), stop}
    for low, high in itertools.pairwise(sorted(cuts) if start < stop else ()):
        row, inside = divmod(low, inner)
        if inside == high % inner == 0:
            yield range(row, high // inner), *map(range, shape[1:])
        else:
            yield from ((range(row, row + 1), *rest) for rest in regions_of_run(shape[1:], inside, inside + high - low))


def _placed(
    region: Region, dim: int, pieces: Iterable[tuple[range, int]]
) -> Iterator[tuple[tuple[slice, ...], Region]]:
    """Yield the parts of a shard's `region` in `pieces`: slices relative to the region, and the global region."""
    for piece, target in pieces:
        if common := _common(region[dim], piece):
            inside = (*(slice(None),) * dim, slice(common.start - region[dim].start, common.stop - region[dim].start))
            target_range = range(common.start - piece.start + target, common.stop - piece.start + target)
            yield inside, (*region[:dim], target_range, *region[dim + 1 :])


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def load_regions(regions: Iterable[ShardRegion], files: Iterable[Path]) -> None:
    """Read the values of `boxes` from the boxes in safetensors files, however these lie.

    Raises ValueError, before anything is read, where elements are in none of the files.
    """
    regions = list(regions)
    stored_regions: dict[str, list[tuple[Region, StoredTensor]]] = {box.name: [] for box in regions}
    for file in files:
        for label, stored in read_header(file).items():
            name, _, offset = label.rpartition("@")
            if name in stored_regions:
                starts = map(int, offset.split(","))
                region = tuple(range(start, start + size) for start, size in zip(starts, stored.shape, strict=True))
                stored_regions[name].append((region, stored))
    copies = [copy for box in regions for copy in _copies(box, stored_regions[box.name])]
    with ThreadPoolExecutor(READERS) as readers:
        for _ in readers.map(lambda copy: copy[0].copy_(_read(*copy[1:])), copies):
            pass


def _copies(
    box: ShardRegion, stored_regions: Iterable[tuple[Region, StoredTensor]]
) -> Iterator[tuple[Tensor, StoredTensor, Region]]:
    """Yield the copies that fill a region: parts of its values, each with a region of a stored tensor."""
    left = box.values.numel()
    for region, stored in stored_regions:
        common = tuple(map(_common, box.region, region))
        size = math.prod(map(len, common))
        left -= size
        rows = max(1, READ * len(common[0]) // max(1, size * stored.dtype.itemsize))
        for row in range(0, len(common[0]), rows) if size else ():
            some = (common[0][row : row + rows], *common[1:])
            yield box.values[_slices(some, box.region)], stored, _from(some, region)
    if left:
        raise ValueError(f"{left} of {box.values.numel()} elements of {box.name} are in no file")


def _slices(region: Region, origin: Region) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in _from(region, origin))


def _from(region: Region, origin: Region) -> Region:
    """Return a region as it is counted from where another starts."""
    return tuple(range(a.start - b.start, a.stop - b.start) for a, b in zip(region, origin, strict=True))


def _read(stored: StoredTensor, region: Region) -> Tensor:
    """Read a region of a stored tensor: only its bytes, or, for short runs, also those between them."""
    extent = tuple(map(len, region))
    cut = max((dim for dim, size in enumerate(stored.shape) if extent[dim] != size), default=0)  # the last not whole
    if cut and math.prod(extent[cut:]) * stored.dtype.itemsize < SHORTEST:
        wide = _read(stored, (*region[:cut], range(stored.shape[cut]), *region[cut + 1 :]))
        return wide.narrow(cut, region[cut].start, extent[cut])
    strides = [math.prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(cut + 1)]
    places = itertools.product(*region[:cut], region[cut][:1])
    runs = [stored.offset + sum(map(operator.mul, place, strides)) for place in places]
    return read_runs(stored.file, stored.dtype, extent, runs)
