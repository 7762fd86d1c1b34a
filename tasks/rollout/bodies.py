"""Validation of the rollout server's request bodies.

An invalid body gets a response of status 400 to 499 that explains the problem. It never reaches the engine.
"""

import asyncio
import json
from collections.abc import Sequence

from fastapi import Request as Http

from ...templates.json_types import Json, JsonObject
from ..options.groups import TEMPERATURES
from .engine import Request, Sampling
from .fields import Fields, RequestError, invalid_request, json_type
from .image_bodies import MAX_IMAGES, ImageReader, SentImage

MAX_JSON_BYTES = 256 * 2**20  # per body
JSON_SECONDS = 60.0  # to receive a body
MAX_REQUESTS = 65536  # per body
PENALTIES = 1e-2, 1e2  # bounds
SEEDS = -(2**63), 2**64 - 1  # bounds that torch accepts


def client_gone() -> RequestError:
    return RequestError(499, "gone", "the client has disconnected")


async def json_body(http: Http) -> JsonObject:
    """Return the JSON object of a request. Raises RequestError."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid_request(
            f"content-type {content_type or '(none)'}: send JSON, with content-type: application/json", 415
        )
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_JSON_BYTES:
        raise _body_too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(JSON_SECONDS):
            async for chunk in http.stream():
                data += chunk
                if len(data) > MAX_JSON_BYTES:
                    raise _body_too_long()
    except TimeoutError:
        raise invalid_request(f"the body did not arrive within {JSON_SECONDS:g} s", 408) from None
    try:
        body = json.loads(data, parse_constant=_reject_constant)
    except RecursionError:
        raise invalid_request("the body is nested too deeply", 400) from None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise invalid_request(f"the body is not JSON: {error}", 400) from None
    if not isinstance(body, dict):
        raise invalid_request(f"the body is a JSON {json_type(body)}: send an object")
    return body


def _body_too_long() -> RequestError:
    return invalid_request(f"the body has more than {MAX_JSON_BYTES} bytes: send it in several requests", 413)


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


def printable(text: str) -> str:
    """Return a client's text with `?` for characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Limits:
    """Limits of the model: token ids below `vocab_size`, at most `positions` tokens. None if unknown.

    images: reader of images; None: the model takes none
    """

    def __init__(self, vocab_size: int | None, positions: int | None, images: ImageReader | None = None):
        self.vocab_size, self.positions, self.images = vocab_size, positions, images

    def tokens(self, fields: Fields, *, new_tokens: int, images: Sequence[SentImage] = ()) -> list[int]:
        """Return the field `tokens`. It is not empty, and leaves space for `new_tokens` more, and for its images."""
        tokens = fields.integers("tokens", 0, None if self.vocab_size is None else self.vocab_size - 1)
        if not tokens:
            raise fields.invalid_request("tokens is empty")
        length = prompt_length(tokens, images)
        if self.positions is not None and length + new_tokens > self.positions:
            new_text = f" and {new_tokens} new one" if new_tokens else ""
            raise fields.invalid_request(
                f"{length} tokens{new_text} are too many: the model has {self.positions} positions"
            )
        return tokens

    def generation(self, body: JsonObject) -> tuple[list[Request], Sampling]:
        """Return requests and sampling settings of a /generate body. Completions end at the model's last position."""
        fields = Fields(body, ("requests", "sampling", "version", "images"))
        sampling = self._sampling(fields.raw("sampling"))
        all_images = self._images(fields) if "images" in body else []
        requests = []
        for number, item in enumerate(fields.items("requests", MAX_REQUESTS)):
            names = "tokens", "seed", "max_new_tokens", "images", "prompt_length"
            item_fields = Fields(item, names, f"request {number}")
            indices = item_fields.integers("images", 0, max(len(all_images) - 1, 0), [])
            images = [all_images[index] for index in indices] if all_images else []
            if len(images) != len(indices):
                raise item_fields.invalid_request("images: the body has none")
            tokens = self.tokens(item_fields, new_tokens=1, images=images)
            self._check_places(item_fields, tokens, images)
            limit = item_fields.integer("max_new_tokens", 1, self.positions, None)
            length = prompt_length(tokens, images)
            if self.positions is not None:
                limit = min(limit or sampling.max_new_tokens, self.positions - length)
            seed = item_fields.integer("seed", *SEEDS)
            requests.append(Request(tokens, seed, limit, [image for image, _ in images], length))
        return requests, sampling

    def document(self, fields: Fields) -> Request:
        """Return the tokens of a body to be scored, with its images. Its other fields are not read."""
        images = self._images(fields) if "images" in fields else []
        tokens = self.tokens(fields, new_tokens=0, images=images)
        self._check_places(fields, tokens, images, has_drawn=True)
        return Request(tokens, 0, None, [image for image, _ in images], prompt_length(tokens, images))

    def _images(self, fields: Fields) -> list[SentImage]:
        if self.images is None:
            raise invalid_request("images: this server's model takes none. Start one with a vision-language model")
        return self.images.read(fields.items("images", MAX_IMAGES))

    def _check_places(
        self, fields: Fields, tokens: list[int], images: Sequence[SentImage], *, has_drawn: bool = False
    ) -> None:
        """Raise RequestError if tokens have another number of placeholders than images, or another length.

        has_drawn: more placeholders are allowed, which a model has drawn
        """
        if images and self.images:
            places = tokens.count(self.images.vision.image_token_id)
            if places < len(images) or (places > len(images) and not has_drawn):
                raise fields.invalid_request(f"it has {len(images)} images, and tokens has {places} places for them")
        expected = fields.integer("prompt_length", 1, None, None)
        if expected not in (None, length := prompt_length(tokens, images)):
            raise fields.invalid_request(
                f"it has {length} tokens with those of its images here, and {expected} in training. Start the server "
                "with the same --model"
            )

    def _sampling(self, item: Json) -> Sampling:
        default = Sampling()
        fields = Fields(item, tuple(Sampling.__dataclass_fields__), "sampling")
        # No upper bound: a tokenizer may have ids beyond the model's vocabulary.
        ends = fields.integers("ends", 0, None, None)
        return Sampling(
            temperature=fields.number("temperature", *TEMPERATURES, default.temperature, extra_values=(0,)),
            top_p=fields.number("top_p", 1e-6, 1.0, default.top_p),
            top_k=fields.integer("top_k", -1, None, default.top_k),
            repetition_penalty=fields.number("repetition_penalty", *PENALTIES, default.repetition_penalty),
            max_new_tokens=fields.integer("max_new_tokens", 1, self.positions, self._default_length(default)),
            stop=tuple(fields.texts("stop", [], 64)),
            experts=fields.boolean("experts", default.experts),
            ends=None if ends is None else tuple(ends),
            min_p=fields.number("min_p", 0.0, 1.0, default.min_p),
        )

    def _default_length(self, default: Sampling) -> int:
        return min(default.max_new_tokens, self.positions or default.max_new_tokens)


def prompt_length(tokens: Sequence[int], images: Sequence[SentImage]) -> int:
    """Return the number of a prompt's tokens with those of its images."""
    return len(tokens) + sum(image.tokens - 1 for image in images)
