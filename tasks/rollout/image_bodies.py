"""Images in the bodies of /generate and /top_log_probs: encoded by a run, and read by the server.

A body has `images`, a list of {data, min_pixels, max_pixels}, and each request the indices of its own: completions of a
prompt share one. A body to be scored is of one document, which has all of them. `data` is a file in base64; in its
place other clients may give a `url`, or a `path` on the server.
"""

import base64
import binascii
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import Json, JsonObject
from ...templates.media.images import image_size, open_image
from ...templates.media.processor import VisionProcessor
from .engine import Request
from .fields import Fields, invalid_request
from .request_image import RequestImage

IMAGE_BYTES = 128 * 2**20  # decoded, of a body, unless one request has more
MAX_IMAGES = 65536  # per body
MAX_IMAGE_BYTES = 2 * 2**30  # decoded, per body
CHANNELS = 3
MAX_ADDRESS = 4096  # characters of a path or URL
LARGEST = 2**31  # pixels that a limit may allow; fewer fit into the model's positions


def request_bodies(requests: Iterable[Request]) -> list[JsonObject]:
    """Divide requests, in order, into bodies {requests, images} of at most IMAGE_BYTES of images each."""
    encoded: dict[RequestImage, JsonObject] = {}
    bodies: list[JsonObject] = []
    numbers: dict[RequestImage, int] = {}  # places of the images in the last body
    size = 0
    for request in requests:
        for image in request.images:
            encoded.setdefault(image, _encode(image))
        added = sum(_decoded_bytes(image) for image in dict.fromkeys(request.images) if image not in numbers)
        if not bodies or (added and size and size + added > IMAGE_BYTES):
            bodies.append({"requests": []})
            numbers, size = {}, 0
            added = sum(map(_decoded_bytes, dict.fromkeys(request.images)))
        size += added
        item = {"tokens": request.tokens, "seed": request.seed, "max_new_tokens": request.max_new_tokens}
        if request.images:  # servers of earlier versions do not know these fields
            item["images"] = [numbers.setdefault(image, len(numbers)) for image in request.images]
            item["prompt_length"] = request.prompt_length
            bodies[-1]["images"] = [encoded[image] for image in numbers]
        bodies[-1]["requests"].append(item)
    return bodies


def scoring_body(document: Request) -> JsonObject:
    """Return the part of a body of /top_log_probs that has the document."""
    body: JsonObject = {"tokens": document.tokens}
    if document.images:  # servers of earlier versions do not know these fields
        body |= {"images": list(map(_encode, document.images)), "prompt_length": document.prompt_length}
    return body


def _decoded_bytes(image: RequestImage) -> int:
    return image.pixels.width * image.pixels.height * CHANNELS


def _encode(image: RequestImage) -> JsonObject:
    """Return an image without loss."""
    file = io.BytesIO()
    image.pixels.save(file, "PNG", compress_level=1)
    data = base64.b64encode(file.getvalue()).decode()
    return {"data": data, "min_pixels": image.min_pixels, "max_pixels": image.max_pixels}


class SentImage(NamedTuple):
    """Image of a body, and the number of its tokens."""

    image: RequestImage
    tokens: int


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
            size += _decoded_bytes(images[-1].image)
            if size > MAX_IMAGE_BYTES:
                raise invalid_request(
                    f"the images have more than {MAX_IMAGE_BYTES:,} bytes together, decoded: send them in several "
                    "requests",
                    413,
                )
        return images

    def _read(self, item: Json, part: str) -> SentImage:
        fields = Fields(item, ("data", "url", "path", "min_pixels", "max_pixels"), part)
        defaults = self.vision.limits
        least = fields.integer("min_pixels", 1, LARGEST, defaults.min_pixels)
        most = fields.integer("max_pixels", 1, LARGEST, defaults.max_pixels)
        if least > most:
            raise fields.invalid_request(f"min_pixels {least} is above max_pixels {most}")
        source = self._source(fields, part)
        limits = defaults.of_row({"min_pixels": least, "max_pixels": most})
        try:
            height, width = self.vision.resized(*image_size(source), limits)
            grid = 1, height // self.vision.patch_size, width // self.vision.patch_size
            pixels = open_image(source)
        except UnusableRow as error:
            raise invalid_request(f"{part}: {error}") from None
        return SentImage(RequestImage(lambda: pixels, least, most), self.vision.tokens(grid))

    def _source(self, fields: Fields, part: str) -> bytes | str | Path:
        names = [name for name in ("data", "url", "path") if fields.raw(name, None) is not None]
        if len(names) != 1:
            raise fields.invalid_request("it needs one of data (base64), url and path")
        (name,) = names
        value = fields.raw(name)
        if not isinstance(value, str) or not value or (name != "data" and len(value) > MAX_ADDRESS):
            raise fields.invalid_request(f"{name} is no text, or too long a one")
        if name == "data":
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise fields.invalid_request("data is no base64") from None
        if name == "url":
            if not value.lower().startswith(("http://", "https://")):
                raise fields.invalid_request("url begins with neither http:// nor https://")
            return value
        return self._file(value, fields)

    def _file(self, value: str, fields: Fields) -> Path:
        if self._folder is None:
            raise fields.invalid_request(
                "path: this server reads no files. Start it with --allowed_local_media_path, or send data"
            )
        try:
            file = (self._folder / value).resolve()
        except (OSError, ValueError):
            raise fields.invalid_request("path is none") from None
        if not file.is_relative_to(self._folder):
            raise fields.invalid_request("path: it is outside of the server's --allowed_local_media_path")
        return file
