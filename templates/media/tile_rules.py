"""Rules of image processors that cut images into tiles of one size: of InternVL, Llama 4, Ovis2 and LLaVA-OneVision."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..formats.schemas import UnusableRow
from .image_rules import VIDEO_ROWS, Grid, ImageRules, Layout, Resize, check_no_smallest_size, check_ratio
from .limits import MediaLimits

if TYPE_CHECKING:
    from torch import Tensor


COVERED_SHARE = 0.9  # share of an image's pixels from which on Ovis2 takes no more tiles


class TiledImages(ImageRules):
    """Rules of a processor whose images are a rectangle of tiles, which a small image of it all follows.

    A grid has a tile as a patch of time. Limits of pixels are of the rectangle, in whole tiles.
    """

    _tile: int  # side in pixels

    @abstractmethod
    def _shape(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image of this size. Raises UnusableRow with the reason."""

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        rows, columns = self._shape(height, width, limits)
        return rows * self._tile, columns * self._tile

    def grid(self, height: int, width: int, limits: MediaLimits) -> Grid:
        tiles, side = math.prod(self._shape(height, width, limits)), self._tile // self.patch_size
        return tiles + (tiles > 1), side, side

    def _with_whole(self, canvas: "Tensor", pixels: "Tensor", resize: Resize) -> "Tensor":
        """Return the tiles of a rectangle, row by row, and the whole image behind them if there are several.

        canvas: uint8 [1, 3, height, width] of the rectangle. pixels: of the image -> uint8 [tiles, 3, tile, tile]
        """
        import torch

        tile = self._tile
        tiles = canvas[0].unfold(1, tile, tile).unfold(2, tile, tile).permute(1, 2, 0, 3, 4).flatten(0, 1)
        return tiles if len(tiles) == 1 else torch.cat((tiles, resize(pixels, tile, tile)))

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        side, patch, tile = self.merge_size, self.patch_size, self._tile
        squares = torch.cat([patches for _, patches in images])
        squares = squares.view(-1, tile // patch // side, tile // patch // side, side, side, 3, patch, patch)
        return {"pixel_values": squares.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, tile, tile)}


class InternImages(TiledImages):
    """Rules of InternVL's processor. An image is resized to a rectangle of tiles.

    tile: side in pixels. tokens: ids of the start of an image, of its visual tokens and of its end
    """

    def __init__(self, processor: Any, tile: int, patch_size: int, merge_size: int, tokens: tuple[int, int, int]):
        self.patch_size, self.merge_size = patch_size, merge_size
        self.least_pixels, self.most_pixels = (n * tile**2 for n in (processor.min_patches, processor.max_patches))
        self._tile, self._tokens = tile, tokens

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        height, width = self.resized(pixels.shape[2], pixels.shape[3], limits)
        return self._with_whole(resize(pixels, height, width), pixels, resize)

    def _shape(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        # Whose shape is nearest to the image's, as transformers chooses them.
        check_ratio(height, width, limits.max_ratio)
        area = self._tile**2
        least, most = self._bounds(limits.min_pixels, limits.max_pixels)
        shapes = [
            (rows, columns)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= rows * columns <= most
        ]
        nearest, chosen = math.inf, (1, 1)
        for rows, columns in sorted(shapes, key=math.prod):
            distance = abs(width / height - columns / rows)
            # Of shapes that are as near, a larger one is taken unless it has twice the area of the image.
            if distance < nearest or (distance == nearest and width * height > 0.5 * area * rows * columns):
                nearest, chosen = distance, (rows, columns)
        return chosen

    def _bounds(self, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Return the fewest and most tiles within limits of pixels."""
        return -(-min_pixels // self._tile**2), max(max_pixels // self._tile**2, 1)

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray | None:
        start, image, end = self._tokens
        return np.array([start, *[image] * (math.prod(grid) // self.merge_size**2), end], np.int32)

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        least, most = self._bounds(min_pixels, max_pixels)
        return {"min_patches": least, "max_patches": most}


class InternChatImages(InternImages):
    """The same rules, where images are served by the processor of InternVLChatModel."""

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        least, most = self._bounds(min_pixels, max_pixels)
        return {"min_dynamic_patch": least, "max_dynamic_patch": most}


class LlamaImages(TiledImages):
    """Rules of Llama 4's processor. An image is resized within a rectangle of tiles, whose rest on its right and below
    is black, and tokens separate its tiles.

    tile: side in pixels. tokens: of the names of LlamaTokens
    """

    def __init__(self, processor: Any, tile: int, patch_size: int, merge_size: int, tokens: "LlamaTokens"):
        self.patch_size, self.merge_size = patch_size, merge_size
        self.most_pixels = processor.max_patches * tile**2
        self.reserved_ids = (tokens.image,)
        self._tile, self._tokens = tile, tokens

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        import torch

        height, width = pixels.shape[2:]
        canvas = self.resized(height, width, limits)
        # An image grows to a whole tile at most.
        bound_height, bound_width = (
            min(max(side, self._tile), most) for side, most in zip((height, width), canvas, strict=True)
        )
        row_scale, column_scale = bound_height / height, bound_width / width
        if column_scale < row_scale:
            new_height, new_width = min(math.floor(height * column_scale), bound_height), bound_width
        else:
            new_height, new_width = bound_height, min(math.floor(width * row_scale), bound_width)
        new_height, new_width = max(new_height, 1), max(new_width, 1)
        image = resize(pixels, new_height, new_width)
        padded = torch.nn.functional.pad(image, (0, canvas[1] - new_width, 0, canvas[0] - new_height))
        return self._with_whole(padded, pixels, resize)

    def _shape(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        # Whose scale is nearest to 1, growth before reduction, and then the smallest: as transformers chooses them, in
        # fp32, which decides between scales that are nearly equal.
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        shapes = _rectangles(self._most_tiles(limits.max_pixels))
        sides = shapes.astype(np.float32) * np.float32(self._tile)
        scales = (sides / np.array([height, width], np.float32)).min(1)
        growths = scales[scales >= 1]
        chosen = shapes[scales == (growths.min() if len(growths) else scales.max())]
        rows, columns = chosen[chosen.prod(1).argmin()].tolist()
        return rows, columns

    def _most_tiles(self, max_pixels: int) -> int:
        return max(max_pixels // self._tile**2, 1)

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray | None:
        tokens, (rows, columns) = self._tokens, self._shape(*size, limits)
        tile = [tokens.patch] * ((self._tile // self.factor) ** 2)
        row = [*[*tile, tokens.tile_end] * (columns - 1), *tile, tokens.row_end]
        tiles = row * rows if grid[0] > 1 else []
        return np.array([tokens.start, *tiles, tokens.image, *tile, tokens.end], np.int32)

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"max_patches": self._most_tiles(max_pixels)}


class LlamaTokens(NamedTuple):
    """Ids of Llama 4's tokens of an image."""

    start: int
    patch: int  # a visual token
    tile_end: int  # between two tiles of a row
    row_end: int  # behind a row of tiles
    image: int  # before the whole image
    end: int


@cache
def _rectangles(most: int) -> np.ndarray:
    """Return the rows and columns of all rectangles of up to `most` tiles: int64 [rectangles, 2].

    In transformers' order, which decides between two of the same area: those of a shape together.
    """
    shapes: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                shapes.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return np.array([shape for group in shapes.values() for shape in group])


class OvisImages(TiledImages):
    """Rules of Ovis2's processor. An image is resized to a rectangle of tiles, which follow all of it in one tile.

    The tokens around and between tiles are visual tokens too.

    tile: side in pixels. tokens: of the names of OvisTokens
    """

    def __init__(self, processor: Any, tile: int, patch_size: int, merge_size: int, tokens: "OvisTokens"):
        self.patch_size, self.merge_size = patch_size, merge_size
        self.most_pixels = processor.max_patches * tile**2
        self.feature_ids = tokens[:-1]
        self._tile, self._tokens = tile, tokens

    def _shape(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        return _covering_rectangle(height, width, self._tile, self._most_tiles(limits.max_pixels))

    def _most_tiles(self, max_pixels: int) -> int:
        return max(max_pixels // self._tile**2, 1)

    def layout(self, size: tuple[int, int], limits: MediaLimits) -> Layout:
        (rows, columns), side = self._shape(*size, limits), self._tile // self.factor
        return rows, columns, rows * side, columns * side

    def tokens(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> int:
        return len(self.expansion(grid, size, limits))

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        tokens, (rows, columns) = self._tokens, self._shape(*size, limits)
        tile = [tokens.visual] * ((self._tile // self.factor) ** 2)
        row = [*[*tile, tokens.tile_end] * (columns - 1), *tile]
        tiles = [*[*row, tokens.row_end] * (rows - 1), *row] if grid[0] > 1 else []
        return np.array([tokens.start, *tile, tokens.whole_end, *tiles, tokens.end], np.int32)

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        height, width = self.resized(pixels.shape[2], pixels.shape[3], limits)
        return self._with_whole(resize(pixels, height, width), pixels, resize).roll(int(grid[0] > 1), 0)

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"max_patches": self._most_tiles(max_pixels)}


class OvisTokens(NamedTuple):
    """Ids of Ovis2's tokens of an image."""

    start: int
    whole_end: int  # behind the whole image
    tile_end: int  # between two tiles of a row
    row_end: int  # between two rows of tiles
    end: int
    visual: int


@lru_cache(10_000)
def _covering_rectangle(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tiles of Ovis2: the fewest that keep 90 % of an image's pixels, else that keep most.

    As transformers chooses them: it cuts an image into as many rows as the rectangle then has columns.
    """
    shapes = [(first, second) for first in range(1, most + 1) for second in range(1, most // first + 1)]
    shares = {shape: _kept_share(height, width, shape, tile) for shape in sorted(shapes, key=math.prod)}
    if enough := [shape for shape, share in shares.items() if share > COVERED_SHARE]:
        columns, rows = min(enough, key=lambda shape: (math.prod(shape), -shares[shape]))
    else:
        columns, rows = min(shares, key=lambda shape: (-shares[shape], math.prod(shape)))
    return rows, columns


def _kept_share(height: int, width: int, shape: tuple[int, int], tile: int) -> float:
    """Return the share of pixels that an image keeps if each of its parts shrinks to fit into a tile."""
    heights, widths = (
        [side // parts] * (parts - 1) + [side - side // parts * (parts - 1)]
        for side, parts in zip((height, width), shape, strict=True)
    )
    sides = [sorted(part) for part in product(heights, widths)]
    areas = [shorter * longer if longer <= tile else tile * (shorter / longer * tile) for shorter, longer in sides]
    return sum(areas) / (height * width)  # `sum` rounds as transformers' does, which decides between equal shares


class OneVisionImages(ImageRules):
    """Rules of LLaVA-OneVision's processor. All of an image, in one tile, is before the rectangle of its tiles.

    An image is in the middle of the rectangle, and the features of whole rows or columns of padding are left out; so
    are pixels at the ends of a tile that are not of a whole patch. A frame of a video is resized to a tile, and its
    features are reduced to half as many on each side; one is behind all frames.

    resolutions: heights and widths of the rectangles. tile: side in pixels. most_tiles: to whose features those of an
    image are reduced, as of bridge/layers/tile_features.py. video_problem: why videos cannot be used
    """

    merge_size = 1

    def __init__(
        self,
        resolutions: Sequence[tuple[int, int]],
        tile: int,
        patch_size: int,
        most_tiles: int,
        *,
        video_problem: str | None = None,
    ):
        self._video_problem = video_problem
        self.patch_size, self._resolutions = patch_size, resolutions
        self.most_pixels = max(map(math.prod, resolutions))
        self._tile, self._side, self._most_tiles = tile, tile // patch_size, most_tiles

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        if limits.max_pixels < self.most_pixels:
            raise UnusableRow("it limits pixels, and the model's image_grid_pinpoints decide those of its images")
        best, most, wasted = self._resolutions[0], 0, math.inf
        for rectangle in self._resolutions:
            scale = min(rectangle[1] / width, rectangle[0] / height)
            pixels = min(int(width * scale) * int(height * scale), height * width)
            rest = math.prod(rectangle) - pixels
            if pixels > most or (pixels == most and rest < wasted):
                best, most, wasted = rectangle, pixels, rest
        return best

    def grid(self, height: int, width: int, limits: MediaLimits) -> Grid:
        rectangle = self.resized(height, width, limits)
        return 1 + math.prod(rectangle) // self._tile**2, self._side, self._side

    def layout(self, size: tuple[int, int], limits: MediaLimits) -> Layout:
        rows, columns = (length // self._tile for length in self.resized(*size, limits))
        (height, width), side = size, self._side
        kept_height, kept_width = rows * side, columns * side
        if width / height > kept_width / kept_height:
            kept_height -= (kept_height - int(round(height * (kept_width / width), 7))) // 2 * 2
        else:
            kept_width -= (kept_width - int(round(width * (kept_height / height), 7))) // 2 * 2
        return rows, columns, kept_height, kept_width

    def tokens(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> int:
        _, _, height, width = self.layout(size, limits)
        ratio = math.sqrt(height * width / (self._most_tiles * self._side**2))
        if ratio > 1.1:
            height, width = int(height // ratio), int(width // ratio)
        return self._side**2 + height * (width + 1)

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        import torch

        (height, width), tile = pixels.shape[2:], self._tile
        canvas = self.resized(height, width, limits)
        row_scale, column_scale = canvas[0] / height, canvas[1] / width
        if column_scale < row_scale:
            new_height, new_width = min(math.ceil(height * column_scale), canvas[0]), canvas[1]
        else:
            new_height, new_width = canvas[0], min(math.ceil(width * row_scale), canvas[1])
        bottom, right = canvas[0] - new_height, canvas[1] - new_width
        padding = right // 2, right - right // 2, bottom // 2, bottom - bottom // 2
        image = torch.nn.functional.pad(resize(pixels, new_height, new_width), padding)
        tiles = image[0].unfold(1, tile, tile).unfold(2, tile, tile).permute(1, 2, 0, 3, 4).flatten(0, 1)
        side = self._side * self.patch_size
        return torch.cat((resize(pixels, tile, tile), tiles))[:, :, :side, :side]

    def frame_size(self, limits: MediaLimits) -> tuple[int, int]:
        if self._video_problem:
            raise UnusableRow(self._video_problem)
        if limits.video_max_pixels < self._tile**2:
            raise UnusableRow("it limits pixels, and the frames of the model's videos have one size")
        return self._side * self.patch_size, self._side * self.patch_size

    def video_frames(self, frames: "Tensor", grid: Grid, resize: Resize) -> "Tensor":
        side = self._side * self.patch_size
        return resize(frames, self._tile, self._tile)[:, :, :side, :side]

    def video_tokens(self, grid: Grid) -> int:
        return grid[0] * math.ceil(self._side / 2) ** 2 + 1

    def video_layout(self, grid: Grid) -> Layout:
        half = math.ceil(self._side / 2)
        return VIDEO_ROWS, half, half, 0

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        most, tile = max(grid[0] for grid, _ in images), self._tile
        values = torch.zeros(len(images), most, 3, tile, tile)
        for number, (grid, patches) in enumerate(images):
            values[number, : grid[0]] = self._tiles(grid, patches)
        return {"pixel_values": values}

    def _tiles(self, grid: Grid, patches: "Tensor") -> "Tensor":
        """Return the pixels of tiles or frames: fp32 [tiles, 3, height, width], 0 where they are of no patch."""
        patch, side = self.patch_size, self._side
        tiles = patches.view(grid[0], side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
        values = patches.new_zeros(grid[0], 3, self._tile, self._tile)
        values[:, :, : side * patch, : side * patch] = tiles.reshape(grid[0], 3, side * patch, side * patch)
        return values

    def video_inputs(self, videos: "Sequence[tuple[Grid, Tensor]]") -> dict[str, Any]:
        return {"pixel_values_videos": [self._tiles(grid, patches) for grid, patches in videos]}

    def size_inputs(self, sizes: "Sequence[tuple[int, int] | None]") -> "dict[str, Tensor]":
        import torch

        assert all(size is not None for size in sizes)
        return {"image_sizes": torch.tensor(sizes)}
