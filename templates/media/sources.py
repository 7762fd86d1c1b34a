"""Bytes of images, videos and audios from any source: a path, a URL, a data URI, base64 or bytes."""

import base64
import binascii
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ..formats.schemas import UnusableRow, json_type
from .download import cached_file, is_url

# First characters of common formats of images and audios in base64.
SIGNATURES = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A", "ZkxhQ", "T2dnUw", "SUQz")
SHORTEST_BASE64 = 512  # characters; shorter text without a signature is a path


def data_or_file(source: str, kind: str, *, allow_private: bool = False) -> bytes | Path:
    """Return the bytes of a data URI or of base64, else the file of a path or URL. Raises UnusableRow.

    A relative path is in ROOT_IMAGE_DIR, if that is set. kind: "image", "video" or "audio", for errors and the cache
    """
    if is_url(source):
        return cached_file(source, kind, allow_private=allow_private)
    if source[:5].lower() == "data:":
        head, comma, data = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise UnusableRow("a data URI of its media is not in base64")
        return _decode(data, kind)
    is_base64 = source.startswith(SIGNATURES) or len(source) >= SHORTEST_BASE64
    # Base64 has no dot, and most names of files have one.
    if is_base64 and "." not in source and not os.path.exists(source):
        return _decode(source, kind)
    if source[:7].lower() == "file://":
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise UnusableRow("a file:// URL of its media names another machine")
        source = unquote(parts.path)
    return Path(os.environ.get("ROOT_IMAGE_DIR") or "", source).expanduser()


def _decode(data: str, kind: str) -> bytes:
    try:
        return base64.b64decode(data.encode(), altchars=b"-_" if "-" in data or "_" in data else None)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise UnusableRow(f"{_a(kind)} is in broken base64") from error


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'ai' else 'a'} {kind}"


@contextmanager
def open_source(source: Any, kind: str, *, allow_private: bool = False) -> Iterator[BinaryIO]:
    """Open the bytes of any source, also {"bytes": ..., "path": ...}. Raises UnusableRow. kind: as of `data_or_file`"""
    noun = _a(kind)
    if isinstance(source, dict):
        data, path = source.get("bytes"), source.get("path")
        if data is None and not isinstance(path, str):
            raise UnusableRow(f"{noun} has neither bytes nor a path")
        source = path if data is None else data
    if isinstance(source, str):
        if not source or "\0" in source:
            raise UnusableRow(f"the path of {noun} is empty" if not source else f"the path of {noun} has a NUL")
        source = data_or_file(source, kind, allow_private=allow_private)
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
        return
    if not isinstance(source, Path):
        raise UnusableRow(f"{noun} is {json_type(source)}, where a path, a URL or its bytes are expected")
    try:
        file = source.open("rb")
    except OSError as error:
        raise UnusableRow(f"{noun} cannot be read ({(error.strerror or 'no such file').lower()})") from error
    with file:
        yield file
