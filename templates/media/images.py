"""Images from any source: their size from the file's header, and their pixels as RGB.

Training and engines both read images here, so that they see the same pixels: turned as EXIF says, transparency on
white.
"""

import base64
import binascii
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ..formats.schemas import UnusableRow, json_type
from .download import cached_file, is_url

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 178_956_970  # twice PIL's own limit, above which it sees a decompression bomb
TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
# Of images and audios in base64.
SIGNATURES = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A", "ZkxhQ", "T2dnUw", "SUQz")
SHORTEST_BASE64 = 512  # characters; shorter text without a signature is a path
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


def local_file(source: str, kind: str, *, allow_private: bool = False) -> Path:
    """Return the file of a path or URL. A relative path is in ROOT_IMAGE_DIR, if that is set."""
    if is_url(source):
        return cached_file(source, kind, allow_private=allow_private)
    if source[:7].lower() == "file://":
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise UnusableRow("a file:// URL of its media names another machine")
        source = unquote(parts.path)
    return Path(os.environ.get("ROOT_IMAGE_DIR") or "", source).expanduser()


def data_of(source: str) -> bytes | None:
    """Return the bytes of a data URI or of base64; None for another text."""
    if source[:5].lower() == "data:":
        head, comma, data = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise UnusableRow("a data URI of its media is not in base64")
        return _decode(data)
    is_base64 = source.startswith(SIGNATURES) or len(source) >= SHORTEST_BASE64
    # Base64 has no dot, and most names of files have one.
    return _decode(source) if is_base64 and "." not in source and not os.path.exists(source) else None


def _decode(data: str) -> bytes:
    try:
        return base64.b64decode(data.encode(), altchars=b"-_" if "-" in data or "_" in data else None)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise UnusableRow("an image is in broken base64") from error


def _is_pil(source: Any) -> bool:
    from PIL.Image import Image

    return isinstance(source, Image)


@contextmanager
def _opened(source: Any, allow_private: bool) -> "Iterator[tuple[BinaryIO, Image]]":
    """Open an image that is not decoded yet. Its errors become UnusableRow."""
    from PIL import Image, UnidentifiedImageError

    with _stream(source, allow_private) as file:
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


@contextmanager
def _stream(source: Any, allow_private: bool) -> Iterator[BinaryIO]:
    if isinstance(source, dict):
        data, path = source.get("bytes"), source.get("path")
        if data is None and not isinstance(path, str):
            raise UnusableRow("an image has neither bytes nor a path")
        source = path if data is None else data
    if isinstance(source, str):
        if not source or "\0" in source:
            raise UnusableRow("the path of an image is empty" if not source else "the path of an image has a NUL")
        if is_url(source):
            source = local_file(source, "image", allow_private=allow_private)
        else:
            source = data_of(source) or local_file(source, "image")
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
        return
    if not isinstance(source, Path):
        raise UnusableRow(f"an image is {json_type(source)}, where a path, a URL or its bytes are expected")
    try:
        file = source.open("rb")
    except OSError as error:
        raise UnusableRow(f"an image cannot be read ({(error.strerror or 'no such file').lower()})") from error
    with file:
        yield file


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
