"""Plan of a vision tower's patches: positions, blocks that attend, and interpolated position embeddings."""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mapping.architecture import Vision
from .packed_seqs import to_device
from .tile_features import TileFeatures

# The squares of patches are padded to a multiple on a GPU. cuBLAS and Transformer Engine search for a kernel for each
# new shape, and the search takes longer than the kernel.
SQUARES_STEP = 128
CUBIC_SLOPE = -0.75  # slope at distance 1 of the kernel of torch's bicubic interpolation


@dataclass(frozen=True)
class Blocks:
    """Blocks of consecutive patches that attend to each other: an image, a frame of a video, or a window."""

    lengths: list[int]
    cu_seqlens: Tensor  # [blocks + 1] int32, on the device


@dataclass(frozen=True)
class PatchPlan:
    """Description of the patches of some media, made on the CPU once for all layers.

    Patches are in the order of the processor: merged squares after each other. Within the tower, with windows, they are
    in the order of the windows.
    """

    cos: Tensor  # [rows of the tower, 1, head_dim / 2] fp32
    sin: Tensor
    full: Blocks
    windows: Blocks | None
    patch_order: Tensor | None  # [patches] int64: from the processor's order to the tower's
    feature_order: Tensor | None  # [features] int64: from the tower's order back to the processor's
    # Learned position embeddings that are added to each patch: their rows, and their weights in an interpolation.
    taps: Tensor | None  # [patches, 2, 4 or 16] int64
    tap_weights: Tensor | None  # [patches, 2, 4 or 16] fp32
    # With a class token in front of each frame: positions of the tower's rows among class tokens and patches, and
    # positions of the patches among the tower's rows.
    row_order: Tensor | None = None  # [frames + patches] int64
    patch_rows: Tensor | None = None  # [patches] int64
    tile_features: TileFeatures | None = None  # how the features of tiles are put together
    padding: int = 0  # patches at the end that are of no medium, and a block by themselves


def plan_patches(grids: Tensor, vision: Vision, device: torch.device, squares_step: int | None = None) -> PatchPlan:
    """Return the plan of media. grids [media, 3] int64, CPU: time, height and width in patches.

    squares_step: the patches are padded to a multiple of it; None: to one of SQUARES_STEP on a GPU

    Its tensors are computed on the device, to which the host sends a row for each frame. On the host they took 6 to
    20 ms for 16,000 patches, and the tower's forward kernels 45 ms (Qwen3-VL-30B-A3B, NVIDIA H200, 16 cores).
    """
    frames = [(height, width) for time, height, width in grids.tolist() for _ in range(time)]
    side, step = vision.merge_size, squares_step or (SQUARES_STEP if device.type == "cuda" else 1)
    padding = -sum(height * width for height, width in frames) % (step * side**2)
    if padding:
        frames.append((side, padding // side))
    lengths = [height * width for height, width in frames]
    starts = [0, *accumulate(lengths)]
    total = starts[-1]
    rows = torch.tensor([[*frame, start] for frame, start in zip(frames, starts, strict=False)], dtype=torch.int64)
    full = _blocks(lengths, device)
    patches = torch.arange(total, device=device)
    frame_of = torch.searchsorted(full.cu_seqlens[1:], patches, right=True)
    height, width, start = to_device(rows.view(-1, 3), device)[frame_of].unbind(1)
    square, within = (patches - start) // side**2, patches % side**2  # a frame is of full squares
    square_row, square_column = square // (width // side), square % (width // side)
    row, column = square_row * side + within // side, square_column * side + within % side

    windows = patch_order = feature_order = taps = tap_weights = None
    if vision.window:
        size = vision.window // side // vision.patch_size  # side of a window, in squares
        shapes = [_window_lengths(*frame, side, size) for frame in frames]
        firsts = torch.tensor([0, *accumulate(map(len, shapes))][:-1], dtype=torch.int64)
        window = square_row // size * -(-width // (side * size)) + square_column // size
        window += to_device(firsts, device)[frame_of]
        patch_order = window.argsort(stable=True)
        feature_order = (patch_order[:: side**2] // side**2).argsort()
        windows = _blocks([length for shape in shapes for length in shape], device)
    if vision.grid_side:
        interpolate = _interpolate_cubic if vision.interpolation == "bicubic" else _interpolate
        row_taps, row_weights = interpolate(row, height, vision.grid_side)
        column_taps, column_weights = interpolate(column, width, vision.grid_side)
        taps = (row_taps.unsqueeze(2) * vision.grid_side + column_taps.unsqueeze(1)).flatten(1)
        taps += int(vision.class_token)
        tap_weights = (row_weights.unsqueeze(2) * column_weights.unsqueeze(1)).flatten(1)

    if vision.axis_positions:
        # A row of padding can be longer than the table; a processor limits images.
        column_taps, row_taps = (axis.clamp(max=vision.axis_positions - 1) for axis in (column, row))
        if vision.alternates_axes:
            taps = torch.stack((2 * column_taps, 2 * row_taps + 1), dim=1)
        else:
            taps = torch.stack((column_taps, row_taps + vision.axis_positions), dim=1)
        tap_weights = torch.ones(taps.shape, device=device)

    positions = torch.stack((row, column), dim=1)  # for the rope: planes of height, then those of width
    if patch_order is not None:
        positions = positions[patch_order]
    row_order = patch_rows = None
    if vision.class_token:
        patch_rows = patches + frame_of + 1
        row_order = torch.empty(total + len(frames), dtype=torch.int64, device=device)
        row_order[full.cu_seqlens[:-1] + torch.arange(len(frames), device=device)] = torch.arange(
            len(frames), device=device
        )
        row_order[patch_rows] = patches + len(frames)
        full = _blocks([length + 1 for length in lengths], device)
        # Class tokens are a row and a column before the first patch: Llama 4 has them at 0, and the first patch at 1.
        positions = F.pad(positions, (0, 0, len(frames), 0), value=-1)[row_order]
    axis_dim = vision.hidden_size // vision.num_heads // 2 if vision.num_layers else 0
    frequencies = _frequencies(vision.rope_base, axis_dim, device, alternate=vision.rope_alternates)
    angles = (positions.unsqueeze(2).float() * frequencies).flatten(1).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    order = patch_order, feature_order, taps, tap_weights, row_order, patch_rows
    return PatchPlan(cos, sin, full, windows, *order, padding=padding)


def _frequencies(base: float | None, axis_dim: int, device: torch.device, *, alternate: bool) -> Tensor:
    """Return the frequencies of height and width: [1 or 2, axis_dim / 2] fp32, zeros without a rope.

    alternate: see Vision
    """
    if base is None:
        return torch.zeros(1, axis_dim // 2, device=device)
    if alternate:
        exponents = torch.arange(0, 2 * axis_dim, 2, dtype=torch.float32, device=device) / (2 * axis_dim)
        return (1.0 / base**exponents).view(-1, 2).t()
    exponents = torch.arange(0, axis_dim, 2, dtype=torch.float32, device=device) / axis_dim
    return (1.0 / base**exponents).unsqueeze(0)


def _blocks(lengths: list[int], device: torch.device) -> Blocks:
    return Blocks(lengths, to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device))


def _window_lengths(height: int, width: int, side: int, size: int) -> list[int]:
    """Return the patches of a frame's windows of size x size squares; those at its end are smaller."""
    rows, columns = (
        [min(size, squares - first) for first in range(0, squares, size)] for squares in (height // side, width // side)
    )
    return [row * column * side**2 for row in rows for column in columns]


def _interpolate(index: Tensor, size: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return taps and weights of linear interpolation: [patches, 2] each.

    index: of the patch on an axis of `size` patches, whose ends are the ends of the table's `side` rows
    """
    place = index.float() * (side - 1) / (size - 1).clamp(min=1)
    first = place.floor()
    taps = torch.stack((first, first + 1), dim=1).long().clamp(max=side - 1)
    second_weight = place - first
    return taps, torch.stack((1 - second_weight, second_weight), dim=1)


def _interpolate_cubic(index: Tensor, size: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return taps and weights of cubic convolution, as torch's grid_sample has them: [patches, 4] each.

    index: of the patch on an axis of `size` patches, whose area is that of the table's `side` rows. Beyond its ends the
    table repeats the last row.
    """
    place = (index.float() + 0.5) * side / size - 0.5
    first = place.floor()
    taps = torch.stack([first + offset for offset in range(-1, 3)], dim=1).long().clamp(0, side - 1)
    share = place - first
    far, near = CUBIC_SLOPE, CUBIC_SLOPE + 2
    weights = [
        ((far * x - 5 * far) * x + 8 * far) * x - 4 * far if is_far else (near * x - near - 1) * x * x + 1
        for is_far, x in ((True, share + 1), (False, share), (False, 1 - share), (True, 2 - share))
    ]
    return taps, torch.stack(weights, dim=1)
