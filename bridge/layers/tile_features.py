"""Features of images that are cut into tiles, put together with learned ones.

An image of LLaVA-OneVision (https://arxiv.org/abs/2408.03326) has the features of all of it in one tile, and then those
of its tiles side by side, row by row. Those of padding are left out, a learned feature is behind each row, and large
images are reduced by bilinear interpolation. In Ovis2 (https://arxiv.org/abs/2405.20797) learned features are around an
image, and between the tiles that follow all of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..mapping.architecture import INDICATORS, Vision
from .packed_seqs import to_device

START, WHOLE_END, TILE_END, ROW_END, END = range(INDICATORS)  # Ovis2's learned features
LARGEST_RATIO = 1.1  # ratio of the side of an image's features to that of the most tiles, before they are reduced


@dataclass(frozen=True)
class TileFeatures:
    """Weighted sums that make the features of images from those of tiles, and from learned ones behind them."""

    taps: Tensor  # [features, 1 or 4] int64
    weights: Tensor | None  # [features, 4] fp32; None: all are 1

    def apply(self, features: Tensor, learned: Tensor) -> Tensor:
        """features [features of tiles, size], learned [1 or 5, size] -> [features, size]"""
        table = torch.cat((features, learned))
        if self.weights is None:
            return table[self.taps.squeeze(1)]
        return F.embedding_bag(self.taps, table, mode="sum", per_sample_weights=self.weights.to(table.dtype))


def plan_features(
    grids: Tensor, layouts: Tensor, counts: Tensor, vision: Vision, device: torch.device
) -> TileFeatures | None:
    """Return the plan of some images, as of plan_tile_features; None: they have the features of their tiles alone."""
    if vision.most_tiles:
        return plan_tile_features(grids, layouts, counts, vision.most_tiles, device)
    return plan_indicators(grids, layouts, counts, vision.merge_size, device) if vision.visual_words else None


def plan_indicators(
    grids: Tensor, layouts: Tensor, counts: Tensor, merge_size: int, device: torch.device
) -> TileFeatures:
    """Return the plan of some images of Ovis2. Arguments as of plan_tile_features"""
    learned, start = int(grids.prod(1).sum()) // merge_size**2, 0
    parts: list[np.ndarray] = [np.empty(0, np.int64)]
    for (tiles, height, width), (_, columns, *_), count in zip(
        grids.tolist(), layouts.tolist(), counts.tolist(), strict=True
    ):
        rows = start + np.arange(tiles * height * width // merge_size**2)
        start += len(rows)
        if not columns:
            parts.append(rows[np.arange(count) % len(rows)])
            continue
        thumbnail, *tile_rows = rows.reshape(tiles, -1)
        image = [[learned + START], thumbnail, [learned + WHOLE_END]]
        for number, tile in enumerate(tile_rows, 1):
            image += [tile, [learned + (TILE_END if number % columns else ROW_END)]]
        parts.append(np.concatenate((*(image[:-1] if tile_rows else image), [learned + END])))
        assert len(parts[-1]) == count
    return TileFeatures(to_device(torch.from_numpy(np.concatenate(parts)).unsqueeze(1), device), None)


def plan_tile_features(
    grids: Tensor, layouts: Tensor, counts: Tensor, most_tiles: int, device: torch.device
) -> TileFeatures:
    """Return the plan of some images and videos.

    grids [images, 3] int64: tiles, and the side of a tile's features twice. layouts [images, 4] int64: rows and columns
    of tiles, and height and width of the features without padding; zeros: unknown, of an image that is broken. Of a
    video: -1, and height and width of the features of a frame, to which these are reduced.
    counts [images] int64: features of each image. All on the CPU
    """
    newline, start = int(grids.prod(1).sum()), 0
    parts: list[tuple[np.ndarray, np.ndarray | None]] = []
    for (tiles, side, _), layout, count in zip(grids.tolist(), layouts.tolist(), counts.tolist(), strict=True):
        rows = start + np.arange(tiles * side**2)
        start += len(rows)
        if not layout[0]:
            parts.append((rows[np.arange(count) % len(rows)][:, None], None))
            continue
        if layout[0] < 0:  # a video
            parts.append(_pooled(rows.reshape(tiles, side, side), layout[1:3]))
            parts.append((np.array([[newline]]), None))
            assert sum(len(taps) for taps, _ in parts[-2:]) == count
            continue
        parts.append((rows[: side**2, None], None))
        parts.append(_put_together(rows[side**2 :], side, layout, newline, most_tiles))
        assert sum(len(taps) for taps, _ in parts[-2:]) == count
    if all(weights is None for _, weights in parts):
        taps = np.concatenate([np.empty((0, 1), np.int64), *(taps for taps, _ in parts)])
        return TileFeatures(to_device(torch.from_numpy(taps), device), None)
    taps = np.concatenate([np.broadcast_to(taps, (len(taps), 4)) for taps, _ in parts])
    first = np.array([1, 0, 0, 0], np.float32)
    weights = np.concatenate([np.broadcast_to(first if w is None else w, (len(t), 4)) for t, w in parts])
    return TileFeatures(to_device(torch.from_numpy(taps), device), to_device(torch.from_numpy(weights), device))


def _put_together(
    features: np.ndarray, side: int, layout: Sequence[int], newline: int, most_tiles: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return taps and weights of an image's tiles. features: places of those of its tiles, one tile after the other"""
    rows, columns, height, width = layout
    places = features.reshape(rows, columns, side, side).transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    top, left = (rows * side - height) // 2, (columns * side - width) // 2
    places = places[top : top + height, left : left + width]
    new_height, new_width = reduced(height, width, side, most_tiles)
    if (new_height, new_width) == (height, width):
        ends = np.full((height, 1), newline)
        return np.concatenate((places, ends), axis=1).reshape(-1, 1), None
    row_taps, row_weights = _interpolate(height, new_height)
    column_taps, column_weights = _interpolate(width, new_width)
    taps = np.full((new_height, new_width + 1, 4), newline)
    weights = np.zeros((new_height, new_width + 1, 4), np.float32)
    weights[:, -1, 0] = 1
    taps[:, :-1] = places[row_taps[:, None, :, None], column_taps[None, :, None, :]].reshape(new_height, new_width, 4)
    products = row_weights[:, None, :, None] * column_weights[None, :, None, :]
    weights[:, :-1] = products.reshape(new_height, new_width, 4)
    return taps.reshape(-1, 4), weights.reshape(-1, 4)


def _pooled(features: np.ndarray, size: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return taps and weights of a video's frames. features: places of theirs [frames, side, side]"""
    side = features.shape[1]
    (row_taps, row_weights), (column_taps, column_weights) = (_interpolate(side, new_side) for new_side in size)
    taps = features[:, row_taps[:, None, :, None], column_taps[None, :, None, :]].reshape(-1, 4)
    weights = (row_weights[:, None, :, None] * column_weights[None, :, None, :]).reshape(-1, 4)
    return taps, np.tile(weights, (len(features), 1))


def reduced(height: int, width: int, side: int, most_tiles: int) -> tuple[int, int]:
    """Return the height and width of an image's features once they are reduced."""
    ratio = math.sqrt(height * width / (most_tiles * side**2))
    return (int(height // ratio), int(width // ratio)) if ratio > LARGEST_RATIO else (height, width)


def _interpolate(size: int, new_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return taps and weights of torch's bilinear interpolation in fp32: [new_size, 2] each."""
    scale = np.float32(size) / np.float32(new_size)
    place = np.maximum((np.arange(new_size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    first = place.astype(np.int64)
    share = place - first.astype(np.float32)
    return np.stack((first, np.minimum(first + 1, size - 1)), 1), np.stack((1 - share, share), 1)
