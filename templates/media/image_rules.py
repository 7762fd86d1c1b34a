"""Rules of transformers' image processors: sizes after resizing, tokens, and the inputs of its models."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.schemas import UnusableRow
from .limits import MediaLimits

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, int, int]  # time, height and width in patches
# Rows and columns of tiles, and height and width of their features together, without those of padding. Of a video whose
# features are reduced: VIDEO_ROWS, height and width of those of a frame, and 0.
Layout = tuple[int, int, int, int]
# (uint8 [frames, channels, height, width], new height, new width) -> the same resized
Resize = Callable[["Tensor", int, int], "Tensor"]

VIDEO_ROWS = -1
SOFT_TOKENS = 70, 140, 280, 560, 1120  # limits of an image's visual tokens that Gemma 4 knows
MOST_PATCHES = 512  # on one side of an image of Kimi-VL: beyond, its rope is undefined


@dataclass(frozen=True)
class KimiSettings:
    """Settings of Kimi-VL's processor, in preprocessor_config.json."""

    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    patch_size: int
    merge_size: int
    in_token_limit: int  # most patches of an image, counting whole ones
    resample: int = 3  # bicubic


class ImageRules(ABC):
    """Rules of one image processor.

    patch_size, merge_size, temporal_patch_size: sides of a patch in pixels, of a visual token in patches, and frames of
    a patch of time. least_pixels, most_pixels: limits of an image by the checkpoint; least_pixels None: it has none
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int = 1
    least_pixels: int | None = None
    most_pixels: int
    least_limit: int = 1  # least value of a limit of an image's pixels
    # Mean and standard deviation of pixels from 0 to 1, where the model subtracts these; None: those of the processor.
    normalization: tuple[Sequence[float], Sequence[float]] | None = None
    feature_ids: tuple[int, ...] = ()  # visual tokens beside the placeholder, which only images have
    reserved_ids: tuple[int, ...] = ()  # tokens that stand for images in texts of transformers or vLLM

    @property
    def factor(self) -> int:
        """Side of a visual token in pixels."""
        return self.patch_size * self.merge_size

    @abstractmethod
    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        """Return the size of an image after resizing. Raises UnusableRow with the reason."""

    def grid(self, height: int, width: int, limits: MediaLimits) -> Grid:
        """Return the grid of an image of this size. Raises UnusableRow with the reason."""
        height, width = self.resized(height, width, limits)
        return 1, height // self.patch_size, width // self.patch_size

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        """Return the pixels of a grid, from those of the image: uint8 [time, 3, height, width]."""
        return resize(pixels, grid[1] * self.patch_size, grid[2] * self.patch_size)

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray | None:
        """Return the ids in place of an image's placeholder: int32; None: a placeholder for each visual token.

        grid: of an image of this height and width
        """
        return None

    def tokens(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> int:
        """Return the number of visual tokens of an image of this height and width."""
        return math.prod(grid) // self.merge_size**2

    def layout(self, size: tuple[int, int], limits: MediaLimits) -> Layout | None:
        """Return how the features of an image's tiles are put together; None: they are not."""
        return None

    def frame_size(self, limits: MediaLimits) -> tuple[int, int] | None:
        """Return the height and width of a video's frames; None: they go by the frames. Raises UnusableRow."""
        return None

    def video_frames(self, frames: "Tensor", grid: Grid, resize: Resize) -> "Tensor":
        """Return the pixels of a video's grid, from those of its frames: uint8 [frames, 3, height, width]."""
        return resize(frames, grid[1] * self.patch_size, grid[2] * self.patch_size)

    def video_tokens(self, grid: Grid) -> int:
        """Return the number of visual tokens of a video."""
        return math.prod(grid) // self.merge_size**2

    def video_layout(self, grid: Grid) -> Layout | None:
        """Return how the features of a video are put together; None: they are not."""
        return None

    def joined(self, grid: Grid, patches: "Tensor") -> "Tensor":
        """Return the pixels of an image, from its patches: fp32 [channels, height, width]."""
        _, height, width = grid
        side, patch = self.merge_size, self.patch_size
        squares = patches.view(height // side, width // side, side, side, -1, patch, patch)
        return squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(-1, height * patch, width * patch)

    @abstractmethod
    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        """Return the arguments of transformers' processor for these limits of an image."""

    @abstractmethod
    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        """Return inputs of transformers' model. images: grid and normalized patches of each, fp32 [patches, values]"""

    def video_inputs(self, videos: "Sequence[tuple[Grid, Tensor]]") -> dict[str, Any]:
        """Return inputs of it for videos. videos: grid and normalized patches of each, fp32 [patches, values]"""
        import torch

        grids = torch.tensor([grid for grid, _ in videos])
        return {"pixel_values_videos": torch.cat([patches for _, patches in videos]), "video_grid_thw": grids}

    def size_inputs(self, sizes: "Sequence[tuple[int, int] | None]") -> "dict[str, Tensor]":
        """Return further inputs of it, given the height and width of each image before resizing; None: unknown."""
        return {}


class NoImages(ImageRules):
    """Rules of a model that takes no images."""

    patch_size = merge_size = least_pixels = most_pixels = 1

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        raise UnusableRow("the model takes no images")

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        return {}


class QwenImages(ImageRules):
    """Rules of Qwen2-VL's processor, or of GLM-4V's.

    counts_frames: the checkpoint's limits count each pixel once for each frame of a patch of time, and an image with a
    side below a visual token's grows first, as GLM-4V's
    """

    def __init__(self, processor: Any, *, counts_frames: bool):
        self.patch_size, self.merge_size = processor.patch_size, processor.merge_size
        self.temporal_patch_size = processor.temporal_patch_size
        self._counts_frames = counts_frames
        self._frames: int = self.temporal_patch_size if counts_frames else 1
        self.least_pixels = -(-processor.size["shortest_edge"] // self._frames)
        self.most_pixels = processor.size["longest_edge"] // self._frames

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        if self._counts_frames:
            height, width = grown(height, width, self.factor)
        return smart_resize(
            height, width, self.factor, limits.min_pixels, limits.max_pixels, max_ratio=limits.max_ratio
        )

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        least, most = min_pixels * self._frames, max_pixels * self._frames
        return {"size": {"shortest_edge": least, "longest_edge": most}}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        grids = torch.tensor([grid for grid, _ in images])
        return {"pixel_values": torch.cat([patches for _, patches in images]), "image_grid_thw": grids}


class PixtralImages(ImageRules):
    """Rules of Pixtral's processor. A token follows each row of an image's visual tokens, the last one another.

    The checkpoint limits the longer side. A limit of pixels is one of this side, to its root.
    row_tokens: ids of an image's token, of the end of a row and of the end of an image
    """

    def __init__(self, processor: Any, patch_size: int, merge_size: int, row_tokens: tuple[int, int, int]):
        self.patch_size, self.merge_size = patch_size, merge_size
        self.most_pixels = processor.size["longest_edge"] ** 2
        self._row_tokens = row_tokens

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        ratio = max(height, width) / math.isqrt(limits.max_pixels)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise UnusableRow("an image has no pixel left in its height or width within max_pixels")
        return tuple(-(-side // self.factor) * self.factor for side in (height, width))  # type: ignore[return-value]

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray | None:
        image, row_end, end = self._row_tokens
        rows = np.full((grid[1] // self.merge_size, grid[2] // self.merge_size + 1), image, np.int32)
        rows[:, -1] = row_end
        rows[-1, -1] = end
        return rows.flatten()

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"size": {"longest_edge": math.isqrt(max_pixels)}}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        pixels = [self.joined(grid, patches) for grid, patches in images]
        sizes = torch.tensor([image.shape[1:] for image in pixels])
        values = torch.zeros(len(pixels), len(pixels[0]), *sizes.amax(0).tolist())
        for number, image in enumerate(pixels):
            values[number, :, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": values, "image_sizes": sizes}


class PaddedImages(ImageRules):
    """Rules of Kimi-VL's processor. An image is padded on its right and below, with black, to whole visual tokens.

    The checkpoint limits the whole patches of an image, so that a limit of pixels is one of patches. transformers has
    no such processor: this one is remote code of the checkpoints.
    """

    def __init__(self, processor: KimiSettings):
        self.patch_size, self.merge_size = processor.patch_size, processor.merge_size
        self.most_pixels = processor.in_token_limit * processor.patch_size**2

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        sides = [-(-side // self.factor) * self.factor for side in self._reduced(height, width, limits)]
        return sides[0], sides[1]

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        import torch
        from PIL import Image

        height, width = pixels.shape[2:]
        sides = self._reduced(height, width, limits)
        if sides != (height, width):  # by Pillow, as the processor does: torchvision differs by grey levels
            image = Image.fromarray(pixels[0].permute(1, 2, 0).numpy())
            image = image.resize((sides[1], sides[0]), Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        return self._padded(pixels, grid)

    def _padded(self, pixels: "Tensor", grid: Grid) -> "Tensor":
        """Return the pixels of a grid, from those of the reduced image: uint8 [1, 3, height, width]."""
        from torch.nn.functional import pad

        bottom, right = (n * self.patch_size - side for n, side in zip(grid[1:], pixels.shape[2:], strict=True))
        return pad(pixels, (0, right, 0, bottom))

    def _reduced(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        """Return the size of an image before it is padded."""
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        patches = (height // self.patch_size) * (width // self.patch_size)
        most = self._most_patches(limits.max_pixels)
        if patches > most:
            scale = math.sqrt(most / patches)
            height, width = int(height * scale), int(width * scale)
        if not height or not width:
            raise UnusableRow("an image has no pixel left in its height or width within max_pixels")
        if -(-max(height, width) // self.factor) * self.merge_size >= MOST_PATCHES:
            raise UnusableRow(f"an image has {MOST_PATCHES} patches or more on one side")
        return height, width

    def _most_patches(self, max_pixels: int) -> int:
        return max(max_pixels // self.patch_size**2, 1)

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"in_token_limit": self._most_patches(max_pixels)}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        patches = [self._by_rows(grid, values) for grid, values in images]
        return {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor([grid[1:] for grid, _ in images])}

    def _by_rows(self, grid: Grid, patches: "Tensor") -> "Tensor":
        """Return the patches of an image row by row: fp32 [patches, channels, side, side]."""
        side, patch = self.merge_size, self.patch_size
        squares = patches.view(grid[1] // side, grid[2] // side, side, side, -1, patch, patch)
        return squares.transpose(1, 2).reshape(len(patches), -1, patch, patch)


class Kimi25Images(PaddedImages):
    """Rules of Kimi-K2.5's processor: Kimi-VL's, but for long images, which are reduced, and how images are resized."""

    def __init__(self, processor: Any):
        self.patch_size, self.merge_size = processor.patch_size, processor.merge_size
        self.most_pixels = processor.max_patches * processor.patch_size**2
        self._longest = processor.size["max_height"] * processor.patch_size

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        height, width = self._reduced(pixels.shape[2], pixels.shape[3], limits)
        return self._padded(resize(pixels, height, width), grid)

    def _reduced(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        patches = max(1, height // self.patch_size) * max(1, width // self.patch_size)
        scale = min(
            1.0,
            math.sqrt(self._most_patches(limits.max_pixels) / patches),
            self._longest / height,
            self._longest / width,
        )
        height, width = (min(max(1, int(side * scale)), self._longest) for side in (height, width))
        return height, width

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"max_patches": self._most_patches(max_pixels)}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        return {
            "pixel_values": super().inputs(images)["pixel_values"],
            "image_grid_thw": torch.tensor([grid for grid, _ in images]),
        }


class SquareImages(ImageRules):
    """Rules of Gemma 3's processor: every image is resized to one square, whatever its shape."""

    def __init__(self, side: int, patch_size: int, merge_size: int):
        self.patch_size, self.merge_size, self._side = patch_size, merge_size, side
        self.least_pixels = self.most_pixels = side**2

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        if not limits.min_pixels <= self._side**2 <= limits.max_pixels:
            raise UnusableRow(f"it limits pixels, and images of this model all have {self._side} x {self._side}")
        return self._side, self._side

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        import torch

        return {"pixel_values": torch.stack([self.joined(grid, patches) for grid, patches in images])}


class CroppedImages(SquareImages):
    """Rules of LLaVA's processor: the middle of an image whose shorter side is resized to that of a square."""

    def frames(self, pixels: "Tensor", grid: Grid, limits: MediaLimits, resize: Resize) -> "Tensor":
        height, width = pixels.shape[2:]
        side, shorter = self._side, min(height, width)
        height, width = (side if length == shorter else int(side * length / shorter) for length in (height, width))
        top, left = (height - side) // 2, (width - side) // 2
        return resize(pixels, height, width)[:, :, top : top + side, left : left + side]


class BudgetImages(ImageRules):
    """Rules of Gemma 4's processor: every image grows or shrinks to as many visual tokens as fit into a budget.

    Its shape is kept, but for whole visual tokens. A limit of pixels is one of the budget, to the next in SOFT_TOKENS.
    The model normalizes pixels, and not the processor.
    tokens: ids before an image's visual tokens, of one, and behind them
    reserved_ids: tokens of other media
    """

    normalization = (0.5,) * 3, (0.5,) * 3

    def __init__(self, processor: Any, tokens: tuple[int, int, int], reserved_ids: tuple[int, ...]):
        self.patch_size, self.merge_size = processor.patch_size, processor.pooling_kernel_size
        self.most_pixels = processor.max_soft_tokens * self.factor**2
        self.least_limit = min(SOFT_TOKENS) * self.factor**2
        self.reserved_ids = reserved_ids
        self._tokens = tokens

    def resized(self, height: int, width: int, limits: MediaLimits) -> tuple[int, int]:
        check_ratio(height, width, limits.max_ratio)
        check_no_smallest_size(limits)
        if limits.max_pixels < self.least_limit:
            raise UnusableRow(f"it sets max_pixels below {self.least_limit:,}, the fewest of this model's images")
        budget, factor = self._budget(limits.max_pixels), self.factor
        scale = math.sqrt(budget * factor**2 / (height * width))
        rows, columns = (math.floor(scale * side / factor) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, budget)
        elif not columns:
            rows, columns = min(height // width, budget), 1
        return rows * factor, columns * factor

    def _budget(self, max_pixels: int) -> int:
        return max(tokens for tokens in SOFT_TOKENS if tokens * self.factor**2 <= max_pixels)

    def expansion(self, grid: Grid, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        start, image, end = self._tokens
        return np.array([start, *[image] * self.tokens(grid, size, limits), end], np.int32)

    def processor_arguments(self, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        return {"max_soft_tokens": self._budget(max_pixels)}

    def inputs(self, images: "Sequence[tuple[Grid, Tensor]]") -> "dict[str, Tensor]":
        """Return the patches of each image row by row, from 0 to 1, and their columns and rows; -1 in padding."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        assert self.normalization is not None
        (mean, *_), (std, *_) = self.normalization
        pixels, positions, side = [], [], self.patch_size
        for grid, patches in images:
            squares = self.joined(grid, patches).unfold(1, side, side).unfold(2, side, side)
            values = squares.permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)
            pixels.append((255 * (values * std + mean)).round() * (1 / 255))
            positions.append(torch.cartesian_prod(torch.arange(grid[1]), torch.arange(grid[2])).flip(1))
        return {
            "pixel_values": pad_sequence(pixels, batch_first=True),
            "image_position_ids": pad_sequence(positions, batch_first=True, padding_value=-1),
        }


def check_no_smallest_size(limits: MediaLimits) -> None:
    if limits.min_pixels > 1:
        raise UnusableRow("it sets min_pixels, and images of this model have no smallest size")


def check_ratio(height: int, width: int, max_ratio: float) -> None:
    if max(height, width) / min(height, width) > max_ratio:
        raise UnusableRow(f"an image or video is more than {max_ratio:g} times as long as it is wide (or high)")


def grown(height: int, width: int, factor: int) -> tuple[int, int]:
    """Return the size at which no side is below that of a visual token, `factor`."""
    if min(height, width) >= factor:
        return height, width
    scale = max(factor / height, factor / width)
    return int(height * scale), int(width * scale)


def smart_resize(
    height: int,
    width: int,
    factor: int,
    least: int,
    most: int,
    *,
    max_ratio: float,
    frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """Return a size whose sides are multiples of `factor`, as transformers' `smart_resize` of Qwen2-VL or Qwen3-VL.

    least, most: pixels of all frames together. rounded_frames: `frames` as a multiple of those of a patch of time
    """
    check_ratio(height, width, max_ratio)
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if rounded_frames * new_height * new_width > most:
        shrink = math.sqrt(frames * height * width / most)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if rounded_frames * new_height * new_width < least:
        growth = math.sqrt(least / (frames * height * width))
        return tuple(math.ceil(side * growth / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


class WholeSquareImages(BudgetImages):
    """Rules of the processor of Gemma 4 12B: a patch is a whole visual token, whose pixels stay from 0 to 1."""

    normalization = (0.0,) * 3, (1.0,) * 3

    def __init__(self, processor: Any, tokens: tuple[int, int, int], reserved_ids: tuple[int, ...]):
        super().__init__(processor, tokens, reserved_ids)
        self.patch_size, self.merge_size = self.factor, 1
