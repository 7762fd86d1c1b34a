"""Images from any source: their size from the file's header, and their pixels as RGB.

Training and engines both read images here, so that they see the same pixels: turned as EXIF says, transparency on
white.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from ..formats.schemas import UnusableRow
from .sources import open_source

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 178_956_970  # twice PIL's own limit, above which it sees a decompression bomb
TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
TAIL = 64  # bytes at a file's end that show whether it is whole


def image_size(source: Any, *, allow_private: bool = False) -> tuple[int, int]:
    """Return (height, width) of an image, turned as EXIF says, from its header. Raises UnusableRow with the reason.

    A file that ends too early is refused too.
    """
    if _is_pil(source):
        return _turned_size(source)
    with _opened(source, allow_private) as (file, image):
        if not _is_whole(file, image.format or ""):
            _load(image)
        return _turned_size(image)


def open_image(source: Any, *, allow_private: bool = False) -> "Image":
    """Return an image in RGB, turned as EXIF says, on white where it is transparent. Raises UnusableRow."""
    if _is_pil(source):
        return _to_rgb(source)
    with _opened(source, allow_private) as (_, image):
        _load(image)
        return _to_rgb(image)


def _is_pil(source: Any) -> bool:
    from PIL.Image import Image

    return isinstance(source, Image)


@contextmanager
def _opened(source: Any, allow_private: bool) -> "Iterator[tuple[BinaryIO, Image]]":
    """Open an image that is not decoded yet. Its errors become UnusableRow."""
    from PIL import Image, UnidentifiedImageError

    with open_source(source, "image", allow_private=allow_private) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(file)
        except Image.DecompressionBombError as error:
            raise _too_large() from error
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, TypeError) as error:
            raise UnusableRow("an image is of no known format, or its header is broken") from error
        if image.width * image.height > MOST_PIXELS:
            raise _too_large()
        if not image.width or not image.height:
            raise UnusableRow("an image is empty")
        yield file, image


def _too_large() -> UnusableRow:
    return UnusableRow(f"an image has more than {MOST_PIXELS:,} pixels, as a decompression bomb")


def _load(image: "Image") -> None:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
    except Image.DecompressionBombError as error:
        raise _too_large() from error
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, IndexError, MemoryError) as error:
        raise UnusableRow("an image is damaged or truncated") from error


def _is_whole(file: BinaryIO, kind: str) -> bool:
    """Return whether the end of a file shows that it is whole. Other files must be decoded to know."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - TAIL, 0))
    tail = file.read(TAIL)
    match kind:
        case "JPEG" | "MPO":
            return tail.rstrip(b"\0\r\n").endswith(b"\xff\xd9")
        case "PNG":
            return b"IEND" in tail
        case "GIF":
            return tail.rstrip(b"\0").endswith(b";")
        case "WEBP":
            file.seek(4)
            return int.from_bytes(file.read(4), "little") + 8 <= size
    return False


def _orientation(image: "Image") -> int:
    """Return the EXIF orientation. PNG is read up to its pixels only: behind them it would have to be decoded.

    PIL itself turns TIFF.
    """
    names = "exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"
    if image.format == "TIFF" or not any(name in image.info for name in names):
        return 1
    try:
        return int(image.getexif().get(0x0112) or 1)
    except Exception:  # PIL's parser raises many types for broken tags
        return 1


def _turned_size(image: "Image") -> tuple[int, int]:
    width, height = image.size
    return (width, height) if _orientation(image) in TURNED else (height, width)


def _to_rgb(image: "Image") -> "Image":
    from PIL import Image

    orientation = _orientation(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, colours).convert("RGB")
    elif image.mode.startswith("I"):  # 16 bits of grey
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
    else:
        image = image.convert("RGB")
    transposed = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    return image.transpose(transposed[orientation]) if orientation in transposed else image
