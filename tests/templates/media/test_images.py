"""Images from every source, and each kind that cannot be used."""

import base64
import io
import time
from pathlib import Path

import numpy as np
import pytest
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.images import image_size, open_image
from PIL import Image, ImageOps

from tests.tiny_vision import picture


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def png(tmp_path: Path) -> Path:
    (tmp_path / "a picture.png").write_bytes(encoded(picture(30, 20)))
    return tmp_path / "a picture.png"


def sources(png: Path) -> dict:
    data = png.read_bytes()
    text = base64.b64encode(data).decode()
    return {
        "path": str(png),
        "file URL": png.as_uri(),
        "data URI": f"data:image/png;base64,{text}",
        "base64": text,
        "base64 for URLs": base64.urlsafe_b64encode(data).decode(),
        "bytes": {"bytes": data, "path": None},
        "bytes with a name": {"bytes": data, "path": "missing.png"},
        "path in a dict": {"bytes": None, "path": str(png)},
        "PIL": Image.open(png),
    }


@pytest.mark.parametrize(
    "name",
    [
        "path",
        "file URL",
        "data URI",
        "base64",
        "base64 for URLs",
        "bytes",
        "bytes with a name",
        "path in a dict",
        "PIL",
    ],
)
def test_every_source_gives_the_same_picture(png: Path, name: str) -> None:
    source = sources(png)[name]
    assert image_size(source) == (20, 30)
    assert np.array_equal(np.array(open_image(source)), np.array(Image.open(png)))


def test_relative_paths(png: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(png.parent))
    assert image_size(png.name) == (20, 30)
    assert image_size({"path": png.name}) == (20, 30)
    assert image_size(str(png)) == (20, 30)
    monkeypatch.delenv("ROOT_IMAGE_DIR")
    with pytest.raises(UnusableRow, match="no such file"):
        image_size(png.name)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(30, 20), kind, exif=exif)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert image_size({"bytes": data}) == (turned.height, turned.width)
    assert np.array_equal(np.array(open_image({"bytes": data})), np.array(turned))


def test_transparency_is_white() -> None:
    clear = Image.new("RGBA", (4, 3), (10, 20, 30, 0))
    half = Image.new("RGBA", (4, 3), (0, 0, 0, 51))
    palette = Image.new("P", (4, 3))
    palette.putpalette([7, 8, 9])
    for image, colour in ((clear, 255), (half, 204)):
        assert np.array(open_image({"bytes": encoded(image)})).tolist() == [[[colour] * 3] * 4] * 3
    assert np.array(open_image({"bytes": encoded(palette, transparency=0)})).tolist() == [[[255] * 3] * 4] * 3
    assert np.array(open_image({"bytes": encoded(palette)})).tolist() == [[[7, 8, 9]] * 4] * 3
    grey = Image.fromarray(np.array([[0, 257, 65535]], np.uint16))
    assert np.array(open_image({"bytes": encoded(grey)}))[0, :, 0].tolist() == [0, 1, 255]


def bomb() -> bytes:
    """A PNG whose header says 20,000 x 20,000."""
    data = bytearray(encoded(Image.new("L", (1, 1))))
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def cut(kind: str) -> bytes:
    data = encoded(picture(300, 200), kind)
    return data[: len(data) * 2 // 3]


BAD = {
    "missing": ("/no/such/file.png", "cannot be read .no such file"),
    "folder": ("/tmp", "cannot be read .is a directory"),
    "empty path": ("", "path of an image is empty"),
    "no picture": ({"bytes": b"hello, this is no picture"}, "of no known format"),
    "nothing": ({"bytes": b""}, "of no known format"),
    "header cut": ({"bytes": encoded(picture(30, 20))[:20]}, "of no known format"),
    "JPEG cut": ({"bytes": cut("JPEG")}, "damaged or truncated"),
    "PNG cut": ({"bytes": cut("PNG")}, "damaged or truncated"),
    "WEBP cut": ({"bytes": cut("WEBP")}, "damaged or truncated|no known format"),
    "TIFF cut": ({"bytes": cut("TIFF")}, "damaged or truncated|no known format"),
    "BMP cut": ({"bytes": cut("BMP")}, "damaged or truncated"),
    "bomb": ({"bytes": bomb()}, "decompression bomb"),
    "number": (7, "an image is a number"),
    "null": (None, "an image is null"),
    "empty object": ({}, "neither bytes nor a path"),
    "list": (["a.png"], "an image is a list"),
    "data URI without base64": ("data:image/svg+xml,<svg/>", "data URI of its media is not in base64"),
    "broken base64": ("data:image/png;base64,A", "broken base64"),
    "other machine": ("file://elsewhere/a.png", "names another machine"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used(name: str) -> None:
    source, reason = BAD[name]
    for read in (image_size, open_image):
        with pytest.raises(UnusableRow, match=reason):
            read(source)


def test_a_jpeg_with_bytes_behind_its_end_is_whole() -> None:
    """Cameras append previews and videos. Such files are decoded to know."""
    assert image_size({"bytes": encoded(picture(30, 20), "JPEG") + b"more" * 50}) == (20, 30)


def test_sizes_are_read_from_headers(tmp_path: Path) -> None:
    """50,000 pictures would take some seconds: decoding this one takes 100 times as long."""
    path = tmp_path / "large.jpg"
    picture(3000, 2000).save(path)
    image_size(str(path))
    start = time.perf_counter()
    for _ in range(500):
        image_size(str(path))
    header = (time.perf_counter() - start) / 500
    start = time.perf_counter()
    open_image(str(path))
    print(f"{header * 1e6:.0f} us a header")
    assert header < (time.perf_counter() - start) / 20
