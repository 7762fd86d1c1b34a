"""Regions of images in texts: the tags `<ref-object>` and `<bbox>`, filled from a row's `objects`.

`objects` has `ref`, names; `bbox`, boxes of 4 numbers or points of 2; `bbox_type`, real (pixels of the image, the
default) or norm1 (0 to 1); and `image_id`, the number of each box's image (0 by default).
"""

import re
from typing import Any

from ..formats.medium import Medium
from ..formats.schemas import Conversation, UnusableRow
from ..json_types import JsonObject
from .images import image_size
from .processor import VisionProcessor

REF, BBOX = "<ref-object>", "<bbox>"
BBOX_TYPES = ("real", "norm1")


def name_objects(conversation: Conversation, objects: JsonObject, vision: VisionProcessor) -> None:
    """Replace the tags in a conversation's messages in order. Raises UnusableRow if their numbers do not fit."""
    is_legacy = vision.bbox_format == "legacy"
    names = [str(ref) for ref in objects.get("ref") or []]
    boxes = _boxes(objects, [medium for medium in conversation.media if medium.kind == "image"], vision)
    texts = {
        REF: [f"<|object_ref_start|>{name}<|object_ref_end|>" if is_legacy else name for name in names],
        BBOX: [f"<|box_start|>{_points(box)}<|box_end|>" if is_legacy else str(box) for box in boxes],
    }
    for tag, values in texts.items():
        number = sum(message["content"].count(tag) for message in conversation.messages)
        if number != len(values):
            column = "ref" if tag == REF else "bbox"
            raise UnusableRow(f"its messages have more or fewer {tag} tags than its objects have values of {column}")
        remaining = iter(values)
        for message in conversation.messages:
            message["content"] = re.sub(re.escape(tag), lambda _, values=remaining: next(values), message["content"])


def _boxes(objects: JsonObject, images: list[Medium], vision: VisionProcessor) -> list[list[int]]:
    """Return the boxes in whole numbers, in the form that the model learned."""
    boxes, kind = objects.get("bbox") or [], objects.get("bbox_type") or "real"
    if kind not in BBOX_TYPES:
        raise UnusableRow(f"its objects have the bbox_type {str(kind)[:20]}; known: {', '.join(BBOX_TYPES)}")
    numbers = list(objects.get("image_id") or [])
    numbers += [0] * (len(boxes) - len(numbers))
    scaled = []
    sizes: dict[int, tuple[int, int]] = {}
    for box, number in zip(boxes, numbers, strict=False):
        if not _is_box(box):
            raise UnusableRow("its objects have a bbox that is neither 4 numbers nor 2")
        if not isinstance(number, int) or not 0 <= number < len(images):
            raise UnusableRow("its objects name an image_id that the row does not have")
        needs_size = kind == "real" or vision.norm_bbox == "none"
        if needs_size and number not in sizes:
            sizes[number] = image_size(images[number].source, allow_private=vision.allow_private)
        height, width = (1, 1) if kind == "norm1" else sizes[number]
        new_height, new_width = 1000, 1000
        if vision.norm_bbox == "none":
            new_height, new_width = vision.resized(*sizes[number], vision.limits.of_row(images[number].limits))
        sides = ((width, new_width), (height, new_height)) * (len(box) // 2)
        scaled.append([round(value / side * new) for value, (side, new) in zip(box, sides, strict=True)])
    return scaled


def _is_box(box: Any) -> bool:
    is_list = isinstance(box, list | tuple) and len(box) in (2, 4)
    return is_list and all(isinstance(value, int | float) and not isinstance(value, bool) for value in box)


def _points(box: list[int]) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(box[::2], box[1::2], strict=True))
