"""Merged copies beside torch's own, of random blocks."""

import random

import pytest
import torch
from megaswift.bridge.checkpoint.strided_copy import StridedCopy, merge_copies


def copied(copies: list[StridedCopy], source: torch.Tensor, size: int) -> torch.Tensor:
    target = torch.zeros(size, dtype=source.dtype)
    for copy in copies:
        copy.target_view(target).copy_(copy.source_view(source))
    return target


def between(source: torch.Tensor, target: torch.Tensor) -> StridedCopy:
    return StridedCopy(
        tuple(source.shape), source.storage_offset(), source.stride(), target.storage_offset(), target.stride()
    )


def test_query_groups_are_three_copies() -> None:
    """4 groups of 3 query heads, a key and a value head, to all queries, all keys, all values."""
    rows, width = 8, 5
    source, target = torch.arange(4 * 5 * rows * width), torch.empty(4 * 5 * rows * width)
    groups, fused = source.view(4, 5, rows, width), target.view(20, rows, width)
    copies = []
    for group in range(4):
        copies += [between(groups[group, head], fused[3 * group + head]) for head in range(3)]
        copies += [between(groups[group, 3], fused[12 + group]), between(groups[group, 4], fused[16 + group])]
    merged = merge_copies(copies)
    assert len(merged) <= 3
    assert torch.equal(copied(merged, source, len(target)), copied(copies, source, len(target)))


def test_experts_with_one_layout_are_one_copy() -> None:
    source, target = torch.arange(6 * 2 * 7 * 3), torch.empty(6 * 2 * 7 * 3)
    copies = [
        between(source.view(6, 2, 7, 3)[expert, part], target.view(6, 2, 7, 3)[expert, part])
        for expert in range(6)
        for part in range(2)
    ]
    assert merge_copies(copies) == [StridedCopy((252,), 0, (1,), 0, (1,))]


def test_columns_of_experts_are_one_copy() -> None:
    """A shard of the inputs, as of `w2` under tensor parallelism."""
    source, target = torch.arange(6 * 7 * 8), torch.empty(6 * 7 * 4)
    copies = [between(source.view(6, 7, 8)[e, :, 4:], target.view(6, 7, 4)[e]) for e in range(6)]
    (merged,) = merge_copies(copies)
    assert torch.equal(copied([merged], source, len(target)), copied(copies, source, len(target)))


@pytest.mark.parametrize("seed", range(20))
def test_random_blocks(seed: int) -> None:
    """Blocks of a matrix in any order and form, each to a place of its own."""
    generator = random.Random(seed)
    source, size = torch.arange(1, 24 * 24 + 1), 24 * 24
    matrix, copies, offset = source.view(24, 24), [], 0
    for _ in range(generator.randrange(1, 40)):
        height, width = generator.choice([1, 1, 2, 3]), generator.choice([1, 2, 4])
        row, column = generator.randrange(24 - height), generator.randrange(24 - width)
        block = matrix[row : row + height, column : column + width]
        block = block.t() if generator.random() < 0.3 else block
        if offset + block.numel() > size:
            break
        offset += generator.choice([0, 0, 1]) if offset + block.numel() < size else 0
        copies.append(between(block, torch.empty(size)[offset : offset + block.numel()].view(block.shape)))
        offset += block.numel()
    generator.shuffle(copies)
    merged = merge_copies(copies)
    assert len(merged) <= len(copies)
    assert torch.equal(copied(merged, source, size), copied(copies, source, size))
