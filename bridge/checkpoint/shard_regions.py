"""Sharded state as n-d regions of global tensors, which each rank saves and any other layout loads.

Tensor parallelism gives a rank some runs of the global tensor. ZeRO-1 may leave it only a flat range of elements in its
shard, which is a few boxes. A region is a box with its position in the global tensor without parallelism, so that a
rank finds the elements it needs without knowing the layout that saved them.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..lora.adapter_mapping import AdapterPlan
from ..mapping.architecture import HfConfig
from ..mapping.local_params import iter_views, shard_position
from ..mapping.param_mapping import TOWERS, VOCAB, ParamKey
from ..model.chunk_mapping import map_chunks
from .safetensors_io import MIN_SLICE, StoredTensor, read_header, read_runs
from .sharding import add_tied_output, find_replica_id, shard_pieces

THREADS = 8  # threads
MAX_READ = 64 * 2**20  # bytes per read

Region = tuple[range, ...]  # positions along each dimension


class ShardRegion(NamedTuple):
    """Box of a global tensor."""

    name: str  # of the global tensor
    region: Region  # position in the global tensor
    values: Tensor  # view with the region's shape
    first: bool  # whether this rank has the first copy, which is saved

    @property
    def label(self) -> str:
        """Name of the region in a file."""
        return f"{self.name}@{','.join(str(extent.start) for extent in self.region)}"


class TrainedParams:
    """Trained parameters of this rank's GPTModels, with the positions of their elements in the global tensors.

    plan: of the model's adapters and fully trained modules, if it has adapters.
    """

    def __init__(self, chunks: Sequence[GPTModel], hf_config: HfConfig, plan: AdapterPlan | None):
        _, self._architecture, self._entries = map_chunks(chunks, hf_config)
        if plan:
            self._entries = plan.all_entries
        self._names = add_tied_output({key: _name(key) for key in self._entries}, self._entries)
        self._parts = {
            id(parameter): (chunk, {key: tuple(view.shape) for key, view in iter_views(chunk, name, parameter)})
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }

    def regions(
        self, parameter: Tensor, start: int, runs: Mapping[str, Tensor], *, sharded: bool
    ) -> Iterator[ShardRegion]:
        """Yield the regions of `runs`, each [elements]: state of the parameter's elements from `start` on.

        A region's name is prefixed with that of its run. sharded: data-parallel ranks have different elements.
        """
        chunk, parts = self._parts[id(parameter)]
        local = range(start, start + min(map(len, runs.values())))
        part_start = 0  # first element of a part: of one expert, where experts are stacked
        for key, shape in parts.items():
            overlap = _overlap(local, range(part_start, part_start + math.prod(shape)))
            run_start = overlap.start - start
            pieces = self._pieces(key, shape) if overlap else ()
            for region in split_regions(shape, overlap.start - part_start, overlap.stop - part_start):
                extent = tuple(map(len, region))
                flat = slice(run_start, run_start := run_start + math.prod(extent))
                for slices, target in _intersect_pieces(region, self._entries[key].dim, pieces):
                    for prefix, run in runs.items():
                        values = run[flat].view(extent)[slices]
                        yield ShardRegion(
                            prefix + self._names[key], target, values, self._is_saved(chunk, key, sharded)
                        )
            part_start += math.prod(shape)

    def _is_saved(self, chunk: GPTModel, key: ParamKey, sharded: bool) -> bool:
        if key.name.startswith(TOWERS):  # every rank is in its data-parallel group
            return sharded or dist.get_rank() == 0
        copy, tensor_rank, data_rank = find_replica_id(chunk, key, self._entries[key])
        return not (copy or tensor_rank or (data_rank and not sharded))

    def _pieces(self, key: ParamKey, shape: Sequence[int]) -> list[tuple[range, int]]:
        """Return the runs of the global tensor that make up a shard, without the vocabulary's padding.

        Each has its positions in the shard, along the split dimension, and its start in the global tensor.
        """
        entry = self._entries[key]
        pieces = shard_pieces(entry, shape, *shard_position(key, entry), self._architecture)
        rows = self._architecture.vocab_size if entry.kind is VOCAB else math.inf
        return [(range(low, low + int(min(size, rows - to))), to) for low, to, size in pieces if to < rows]


def _name(key: ParamKey) -> str:
    name = key.name.format(layer=key.layer)
    return name if key.expert is None else f"{name}.{key.expert}"


def split_regions(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Split elements start..stop of a flattened tensor into boxes, in order.

    Full rows in the middle are one box; partial rows at both ends are split recursively.
    """
    inner = math.prod(shape[1:])
    cuts = {start, min(-(-start // inner) * inner, stop), max(stop // inner * inner, start), stop}
    for low, high in itertools.pairwise(sorted(cuts) if start < stop else ()):
        row, column = divmod(low, inner)
        if column == high % inner == 0:
            yield range(row, high // inner), *map(range, shape[1:])
        else:
            yield from ((range(row, row + 1), *tail) for tail in split_regions(shape[1:], column, column + high - low))


def _intersect_pieces(
    region: Region, dim: int, pieces: Iterable[tuple[range, int]]
) -> Iterator[tuple[tuple[slice, ...], Region]]:
    """Yield the parts of a shard's `region` in `pieces`: slices within the region, and the global region."""
    for piece, target in pieces:
        if common := _overlap(region[dim], piece):
            slices = (*(slice(None),) * dim, slice(common.start - region[dim].start, common.stop - region[dim].start))
            target_range = range(common.start - piece.start + target, common.stop - piece.start + target)
            yield slices, (*region[:dim], target_range, *region[dim + 1 :])


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def load_regions(regions: Iterable[ShardRegion], files: Iterable[Path]) -> None:
    """Fill `regions` from the regions in safetensors files, of any layout.

    Raises ValueError, before it reads anything, if elements are in none of the files.
    """
    regions = list(regions)
    stored_regions: dict[str, list[tuple[Region, StoredTensor]]] = {region.name: [] for region in regions}
    for file in files:
        for label, stored in read_header(file).items():
            name, _, offset = label.rpartition("@")
            if name in stored_regions:
                starts = map(int, offset.split(","))
                source = tuple(range(start, start + size) for start, size in zip(starts, stored.shape, strict=True))
                stored_regions[name].append((source, stored))
    copies = [copy for region in regions for copy in _copies(region, stored_regions[region.name])]
    with ThreadPoolExecutor(THREADS) as readers:
        for _ in readers.map(lambda copy: copy[0].copy_(_read(*copy[1:])), copies):
            pass


def _copies(
    target: ShardRegion, stored_regions: Iterable[tuple[Region, StoredTensor]]
) -> Iterator[tuple[Tensor, StoredTensor, Region]]:
    """Yield the reads that fill a region: part of its values, stored tensor, region of the stored tensor."""
    missing = target.values.numel()
    for stored_region, stored in stored_regions:
        common = tuple(map(_overlap, target.region, stored_region))
        size = math.prod(map(len, common))
        missing -= size
        rows = max(1, MAX_READ * len(common[0]) // max(1, size * stored.dtype.itemsize))
        for row in range(0, len(common[0]), rows) if size else ():
            rows_read = (common[0][row : row + rows], *common[1:])
            yield target.values[_slices(rows_read, target.region)], stored, _relative_to(rows_read, stored_region)
    if missing:
        raise ValueError(f"{missing} of {target.values.numel()} elements of {target.name} are in no file")


def _slices(region: Region, origin: Region) -> tuple[slice, ...]:
    return tuple(slice(extent.start, extent.stop) for extent in _relative_to(region, origin))


def _relative_to(region: Region, origin: Region) -> Region:
    """Return a region relative to the start of `origin`."""
    return tuple(range(a.start - b.start, a.stop - b.start) for a, b in zip(region, origin, strict=True))


def _read(stored: StoredTensor, region: Region) -> Tensor:
    """Read a region of a stored tensor: only its bytes or, for short runs, also the bytes between them."""
    extent = tuple(map(len, region))
    # The last dimension that is not full.
    last_cut = max((dim for dim, size in enumerate(stored.shape) if extent[dim] != size), default=0)
    if last_cut and math.prod(extent[last_cut:]) * stored.dtype.itemsize < MIN_SLICE:
        full_rows = _read(stored, (*region[:last_cut], range(stored.shape[last_cut]), *region[last_cut + 1 :]))
        return full_rows.narrow(last_cut, region[last_cut].start, extent[last_cut])
    strides = [math.prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(last_cut + 1)]
    starts = itertools.product(*region[:last_cut], region[last_cut][:1])
    runs = [stored.offset + sum(map(operator.mul, start, strides)) for start in starts]
    return read_runs(stored.file, stored.dtype, extent, runs)
