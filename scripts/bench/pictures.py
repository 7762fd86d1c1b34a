"""Pictures of the rows with images: JPEG files of a fixed distribution of sizes, and the grids that processors cut."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COUNT = 400
SIDE = 32  # pixels of a visual token: 2 x 2 patches of 16
Size = tuple[int, int]


def sizes(tokens: tuple[int, int]) -> list[Size]:
    """Return widths and heights in pixels. tokens: least and most visual tokens of a picture.

    The logarithm of the tokens is uniform, and so is that of the aspect ratio, from 1:2 to 2:1.
    """
    rng, (low, high) = np.random.default_rng(0), tokens
    pixels = []
    for number, share in enumerate(rng.permutation(COUNT)):
        area = SIDE**2 * low * (high / low) ** ((share + 0.5) / COUNT)
        aspect = 2 ** (2 * ((number + 0.5) / COUNT) - 1)
        pixels.append((round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))))
    return pixels


def grid(size: Size) -> tuple[int, int, int]:
    """Return time, height and width in patches, as Qwen's processors do: sides are rounded to whole visual tokens."""
    width, height = size
    return 1, 2 * round(height / SIDE), 2 * round(width / SIDE)


def visual_tokens(size: Size) -> int:
    return math.prod(grid(size)) // 4


def write_pictures(folder: Path, tokens: tuple[int, int], workers: int) -> list[Path]:
    """Draw the pictures that do not exist, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}.jpg" for number in range(COUNT)]

    def write(number: int, size: Size) -> None:
        if not files[number].exists():
            draw(size, number).save(files[number], quality=90)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(write, range(COUNT), sizes(tokens)))
    return files


def draw(size: Size, seed: int) -> Image.Image:
    """Return a picture of shapes before a cloudy sky, with the noise of a camera."""
    rng = np.random.default_rng(seed)
    sky = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    canvas = ImageDraw.Draw(sky)
    for _ in range(30):
        x, y = rng.integers(0, size[0]), rng.integers(0, size[1])
        width, height = rng.integers(8, 200, 2)
        colour = tuple(rng.integers(0, 256, 3).tolist())
        shape = (canvas.ellipse, canvas.rectangle)[rng.integers(2)]
        shape((int(x), int(y), int(x + width), int(y + height)), fill=colour)
    noise = rng.normal(0, 6, (size[1], size[0], 1)).astype(np.float32)
    return Image.fromarray((np.asarray(sky) + noise).clip(0, 255).astype(np.uint8))
