"""Images in the bodies of /generate and /top_log_probs, as the server reads them.

Runs send `data`, a file in base64 (request_bodies.py). In its place other clients may give a `url`, or a `path` on the
server.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...templates.formats.medium import Medium
from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import Json
from ...templates.media.images import image_size, open_image
from ...templates.media.processor import MediaPlan, VisionProcessor
from .fields import Fields, invalid_request
from .request_bodies import CHANNELS
from .request_image import LARGEST, RequestImage

MAX_MEDIA = 65536  # per body
MAX_MEDIA_BYTES = 2 * 2**30  # decoded, per body
MAX_ADDRESS = 4096  # characters of a path or URL


class SentImage(NamedTuple):
    """Image of a body, and its size for the model."""

    image: RequestImage
    plan: MediaPlan

    def resized(self, vision: VisionProcessor) -> "SentImage":
        """Return the image in its size for the model: beside videos engines have no other limit."""
        from PIL import Image

        picture: Any = self.image.pixels
        (pixels,) = vision.resized_image(Medium("image", picture), self.plan.grid)
        resized = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        return self._replace(image=RequestImage(lambda: resized, 1, LARGEST))


class ImageReader:
    """Reader of the images of bodies, for a model that takes images. Its methods raise RequestError.

    allowed_folder: folder whose files clients may name; None: none
    """

    def __init__(self, vision: VisionProcessor, allowed_folder: Path | None):
        self.vision, self._folder = vision, allowed_folder and allowed_folder.resolve()

    def read(self, items: Sequence[Json]) -> list[SentImage]:
        """Return decoded images."""
        images: list[SentImage] = []
        size = 0
        for number, item in enumerate(items):
            images.append(self._read(item, f"image {number}"))
            pixels = images[-1].image.pixels
            size += pixels.width * pixels.height * CHANNELS
            check_bytes(size, "images")
        return images

    def _read(self, item: Json, part: str) -> SentImage:
        fields = Fields(item, ("data", "url", "path", "min_pixels", "max_pixels"), part)
        defaults = self.vision.limits
        least = fields.integer("min_pixels", 1, LARGEST, defaults.min_pixels)
        most = fields.integer("max_pixels", 1, LARGEST, defaults.max_pixels)
        if least > most:
            raise fields.invalid_request(f"min_pixels {least} is above max_pixels {most}")
        _, source = sent_source(fields, ("data", "url", "path"), self._folder)
        limits = defaults.of_row({"min_pixels": least, "max_pixels": most})
        try:
            plan = self.vision.plan_image(*image_size(source), limits)
            pixels = open_image(source)
        except UnusableRow as error:
            raise invalid_request(f"{part}: {error}") from None
        return SentImage(RequestImage.within(lambda: pixels, least, most, self.vision), plan)


def sent_source(fields: Fields, names: Sequence[str], folder: Path | None) -> tuple[str, bytes | str | Path]:
    """Return the one of these fields that is there, and its source: bytes of base64, a URL, or a path in `folder`.

    folder: whose files clients may name; None: none. Raises RequestError.
    """
    present = [name for name in names if fields.raw(name, None) is not None]
    if len(present) != 1:
        listed = ["data (base64)" if name == "data" else name for name in names]
        raise fields.invalid_request(f"it needs one of {', '.join(listed[:-1])} and {listed[-1]}")
    (name,) = present
    value = fields.raw(name)
    is_address = name in ("url", "path")
    if not isinstance(value, str) or not value or (is_address and len(value) > MAX_ADDRESS):
        raise fields.invalid_request(f"{name} is no text, or too long a one")
    if not is_address:
        return name, decoded(value, fields, name)
    if name == "path":
        return name, _allowed_file(value, fields, folder)
    if not value.lower().startswith(("http://", "https://")):
        raise fields.invalid_request("url begins with neither http:// nor https://")
    return name, value


def _allowed_file(value: str, fields: Fields, folder: Path | None) -> Path:
    if folder is None:
        raise fields.invalid_request(
            "path: this server reads no files. Start it with --allowed_local_media_path, or send data"
        )
    try:
        file = (folder / value).resolve()
    except (OSError, ValueError):
        raise fields.invalid_request("path is none") from None
    if not file.is_relative_to(folder):
        raise fields.invalid_request("path: it is outside of the server's --allowed_local_media_path")
    return file


def decoded(value: Any, fields: Fields, name: str) -> bytes:
    """Return the bytes of base64. name: of its field"""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise fields.invalid_request(f"{name} is no base64") from None


def check_bytes(size: int, name: str) -> None:
    """Raise RequestError for more than MAX_MEDIA_BYTES of decoded media."""
    if size > MAX_MEDIA_BYTES:
        raise invalid_request(
            f"the {name} have more than {MAX_MEDIA_BYTES:,} bytes together, decoded: send them in several requests", 413
        )
