"""Copies between flat buffers, described by sizes, strides and offsets, and merged into as few as possible."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..mapping.param_mapping import MappingEntry, Span


class StridedCopy(NamedTuple):
    """Copy of a strided block, from a source to a target. Strides and offsets are in elements."""

    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def source_view(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.sizes, self.source_strides, tensor.storage_offset() + self.source_offset)

    def target_view(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.sizes, self.target_strides, tensor.storage_offset() + self.target_offset)


@dataclass
class WeightLayout:
    """Tensors of an engine, and the copies that fill them from the tensors of a checkpoint.

    targets: the engine's tensors by its names. shapes: of the checkpoint's tensors by their names. copies: by the
    checkpoint's names, (name of a target, copy from the contiguous tensor) each; empty where this rank needs nothing.
    padded: targets with elements that no copy fills; they are zero.
    """

    targets: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    copies: dict[str, list[tuple[str, StridedCopy]]]
    padded: set[str] = field(default_factory=set)


class LayoutWriter:
    """One update of the targets of a layout."""

    def __init__(self, layout: WeightLayout):
        self._layout, self._unfilled = layout, set(layout.padded)

    def copy(self, source: Tensor, name: str, copy: StridedCopy) -> tuple[Tensor, Tensor]:
        """Copy from a source to the target `name`. Return the views of both."""
        target = self._layout.targets[name]
        if name in self._unfilled:  # its memory may be new
            self._unfilled.remove(name)
            target.zero_()
        block, written = copy.source_view(source), copy.target_view(target)
        written.copy_(block)
        return block, written

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy a checkpoint's contiguous tensors. Return those that the layout does not have."""
        missing = []
        for name, tensor in weights:
            if name not in self._layout.copies:
                missing.append((name, tensor))
            for target, copy in self._layout.copies.get(name, ()):
                self.copy(tensor, target, copy)
        return missing


def merge_copies(copies: Iterable[StridedCopy]) -> list[StridedCopy]:
    """Return copies of the same elements, fewer where blocks follow each other at equal distances."""
    merged = [_join_dims(copy) for copy in copies]
    while True:
        groups: dict[tuple, list[StridedCopy]] = {}
        for copy in merged:
            groups.setdefault((copy.sizes, copy.source_strides, copy.target_strides), []).append(copy)
        fewer = [_join_dims(copy) for group in groups.values() for copy in _join_runs(group)]
        if len(fewer) == len(merged):
            return sorted(fewer, key=lambda copy: copy.target_offset)
        merged = fewer


def _join_runs(copies: list[StridedCopy]) -> list[StridedCopy]:
    """Join copies of equal sizes and strides that follow each other at equal distances."""
    copies = sorted(copies, key=lambda copy: copy.target_offset)
    runs: list[list[StridedCopy]] = []
    for copy in copies:
        distance = _distance(runs[-1][-1], copy) if runs else (0, 0)
        # torch has no negative strides.
        if distance[0] > 0 and (len(runs[-1]) == 1 or _distance(*runs[-1][:2]) == distance):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    joined = []
    for run in runs:
        first = run[0]
        if len(run) > 1:
            source, target = _distance(*run[:2])
            sizes = (len(run), *first.sizes)
            strides = (source, *first.source_strides), (target, *first.target_strides)
            first = StridedCopy(sizes, first.source_offset, strides[0], first.target_offset, strides[1])
        joined.append(first)
    return joined


def _distance(first: StridedCopy, second: StridedCopy) -> tuple[int, int]:
    return second.source_offset - first.source_offset, second.target_offset - first.target_offset


def _join_dims(copy: StridedCopy) -> StridedCopy:
    """Drop dimensions of one element, and join neighbours that both sides store without a gap."""
    dims: list[tuple[int, int, int]] = []
    for size, source, target in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * source, size * target):
            dims[-1] = dims[-1][0] * size, source, target
        else:
            dims.append((size, source, target))
    sizes, sources, targets = zip(*dims, strict=True) if dims else ((1,), (1,), (1,))
    return copy._replace(sizes=sizes, source_strides=sources, target_strides=targets)


class StoredShard(NamedTuple):
    """Shard of a megatron-core tensor in a flat buffer."""

    entry: MappingEntry
    spans: Sequence[tuple[int, Span]]  # this shard's, from `clip_spans`
    shape: tuple[int, ...]
    offset: int  # in the buffer, in elements


def compose(shard: StoredShard, part: int, hf_shape: tuple[int, ...], copy: StridedCopy) -> list[StridedCopy]:
    """Return the copies from a shard's buffer that make its part of `copy`, which is from a checkpoint's tensor.

    part: index of the checkpoint's tensor in the shard's mapping. hf_shape: its shape. Raises ValueError where `copy`
    does not take a box of the tensor.
    """
    entry = shard.entry
    strides = _contiguous_strides(shard.shape)
    if entry.kind.is_scalar:
        return [copy._replace(source_offset=shard.offset)]
    box = _box(hf_shape, copy)
    target_offset = copy.target_offset
    if entry.expert_index is not None:
        start, size, stride = box.pop(0)
        if not start <= entry.expert_index < start + size:
            return []
        target_offset += (entry.expert_index - start) * stride
    if len(box) != len(shard.shape):
        raise ValueError(f"a tensor of shape {list(hf_shape)} is not of the dimensions of {list(shard.shape)}")
    copies = []
    for offset, span in shard.spans:
        if span.part != part:
            continue
        source, target, dims = shard.offset, target_offset, []
        for dim, (start, size, stride) in enumerate(box):
            local = len(box) - 1 - dim if entry.transposed else dim
            position, step = start, 1
            if dim == entry.hf_dim:
                step = span.step
                low = max(0, -(-(start - span.start) // step))
                high = min(span.length, (start + size - 1 - span.start) // step + 1)
                position, size = offset + low, high - low
                target += (span.start + step * low - start) * stride
            source += position * strides[local]
            dims.append((size, strides[local], stride * step))
        if all(size > 0 for size, _, _ in dims):
            sizes, sources, targets = zip(*dims, strict=True)
            copies.append(StridedCopy(sizes, source, sources, target, targets))
    return copies


def _box(shape: tuple[int, ...], copy: StridedCopy) -> list[tuple[int, int, int]]:
    """Return first position, size and target's stride along each dimension of the contiguous source of `copy`."""
    remainder, box = copy.source_offset, list[tuple[int, int, int]]()
    strides = _contiguous_strides(shape)
    dims = {
        stride: (size, target)
        for size, stride, target in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True)
        if size > 1
    }
    for length, stride in zip(shape, strides, strict=True):
        start, remainder = divmod(remainder, stride) if length > 1 else (0, remainder)
        size, target = dims.pop(stride, (1, 0)) if length > 1 else (1, 0)
        if start + size > length:
            raise ValueError(f"{copy} is not from a box of a tensor of shape {list(shape)}")
        box.append((start, size, target))
    if dims or remainder or math.prod(size for _, size, _ in box) != copy.numel:
        raise ValueError(f"{copy} is not from a box of a tensor of shape {list(shape)}")
    return box


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
