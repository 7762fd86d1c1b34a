"""Validation of the rollout server's request bodies.

An invalid body gets a response of status 400 to 499 that explains the problem. It never reaches the engine.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import Request as Http

from ...templates.dataset.transformers_inputs import KINDS
from ...templates.json_types import Json, JsonObject
from ..options.groups import TEMPERATURES
from .audio_bodies import AudioReader, SentAudio
from .engine import Request, Sampling
from .fields import Fields, RequestError, invalid_request, json_type
from .image_bodies import MAX_MEDIA, ImageReader, SentImage
from .video_bodies import SentVideo, VideoReader

MAX_JSON_BYTES = 256 * 2**20  # per body
JSON_SECONDS = 60.0  # to receive a body
MAX_REQUESTS = 65536  # per body
PENALTIES = 1e-2, 1e2  # bounds
MEDIA = "images", "videos", "audios"  # fields of media, in the order of SentMedia
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


class SentMedia(NamedTuple):
    """Images, videos and audios of a body, or of one of its requests."""

    images: Sequence[SentImage] = ()
    videos: Sequence[SentVideo] = ()
    audios: Sequence[SentAudio] = ()

    def length(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens of a prompt with those of its media."""
        return len(tokens) + sum(medium.plan.length - 1 for medium in (*self.images, *self.videos, *self.audios))


NO_MEDIA = SentMedia()


class Limits:
    """Limits of the model: token ids below `vocab_size`, at most `positions` tokens. None if unknown.

    images, videos, audios: readers of them; None: the model takes none
    """

    def __init__(
        self,
        vocab_size: int | None,
        positions: int | None,
        images: ImageReader | None = None,
        videos: VideoReader | None = None,
        audios: AudioReader | None = None,
    ):
        self.vocab_size, self.positions = vocab_size, positions
        self.images, self.videos, self.audios = images, videos, audios

    def tokens(self, fields: Fields, *, new_tokens: int, media: SentMedia = NO_MEDIA) -> list[int]:
        """Return the field `tokens`. It is not empty, and leaves space for `new_tokens` more, and for its media."""
        tokens = fields.integers("tokens", 0, None if self.vocab_size is None else self.vocab_size - 1)
        if not tokens:
            raise fields.invalid_request("tokens is empty")
        length = media.length(tokens)
        if self.positions is not None and length + new_tokens > self.positions:
            new_text = f" and {new_tokens} new one" if new_tokens else ""
            raise fields.invalid_request(
                f"{length} tokens{new_text} are too many: the model has {self.positions} positions"
            )
        return tokens

    def generation(self, body: JsonObject) -> tuple[list[Request], Sampling]:
        """Return requests and sampling settings of a /generate body. Completions end at the model's last position."""
        fields = Fields(body, ("requests", "sampling", "version", *MEDIA))
        sampling = self._sampling(fields.raw("sampling"))
        body_media = self._media(fields)
        requests = []
        for number, item in enumerate(fields.items("requests", MAX_REQUESTS)):
            names = "tokens", "seed", "max_new_tokens", "prompt_length", *MEDIA
            item_fields = Fields(item, names, f"request {number}")
            media = SentMedia(
                _chosen(item_fields, "images", body_media.images),
                _chosen(item_fields, "videos", body_media.videos),
                _chosen(item_fields, "audios", body_media.audios),
            )
            tokens = self.tokens(item_fields, new_tokens=1, media=media)
            self._check_places(item_fields, tokens, media)
            limit = item_fields.integer("max_new_tokens", 1, self.positions, None)
            if self.positions is not None:
                limit = min(limit or sampling.max_new_tokens, self.positions - media.length(tokens))
            requests.append(self._request(tokens, item_fields.integer("seed", *SEEDS), limit, media))
        return requests, sampling

    def document(self, fields: Fields) -> Request:
        """Return the tokens of a body to be scored, with its media. Its other fields are not read."""
        media = self._media(fields)
        tokens = self.tokens(fields, new_tokens=0, media=media)
        self._check_places(fields, tokens, media, has_drawn=True)
        return self._request(tokens, 0, None, media)

    def _request(self, tokens: list[int], seed: int, limit: int | None, media: SentMedia) -> Request:
        images = media.images
        if media.videos and self.images:
            images = [image.resized(self.images.vision) for image in images]
        return Request(
            tokens,
            seed,
            limit,
            [image for image, _ in images],
            media.length(tokens),
            [video for video, _ in media.videos],
            [audio for audio, _ in media.audios],
        )

    def _media(self, fields: Fields) -> SentMedia:
        if "images" in fields and self.images is None:
            raise invalid_request("images: this server's model takes none. Start one with a vision-language model")
        if "videos" in fields and (self.videos is None or self.videos.most == 0):
            raise invalid_request(
                "videos: this server takes none. Start it with a model that does, and with vLLM with "
                """--vllm_limit_mm_per_prompt '{"video": 1}'"""
            )
        if "audios" in fields and self.audios is None:
            raise invalid_request("audios: this server's model takes none. Start one with an audio-language model")
        return SentMedia(
            self.images.read(fields.items("images", MAX_MEDIA)) if self.images and "images" in fields else (),
            self.videos.read(fields.items("videos", MAX_MEDIA)) if self.videos and "videos" in fields else (),
            self.audios.read(fields.items("audios", MAX_MEDIA)) if self.audios and "audios" in fields else (),
        )

    def _check_places(self, fields: Fields, tokens: list[int], media: SentMedia, *, has_drawn: bool = False) -> None:
        """Raise RequestError if tokens have another number of placeholders than media, or another length.

        has_drawn: more placeholders are allowed, which a model has drawn
        """
        readers = self.images, self.videos, self.audios
        for name, kind, reader, sent in zip(MEDIA, KINDS, readers, media, strict=True):
            if not sent or not reader:
                continue
            places = tokens.count(reader.vision.placeholder_id(kind))
            if places < len(sent) or (places > len(sent) and not has_drawn):
                raise fields.invalid_request(f"it has {len(sent)} {name}, and tokens has {places} places for them")
        expected = fields.integer("prompt_length", 1, None, None)
        if expected not in (None, length := media.length(tokens)):
            raise fields.invalid_request(
                f"it has {length} tokens with those of its media here, and {expected} in training. Start "
                "the server with the same --model"
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


def _chosen[T](fields: Fields, name: str, media: Sequence[T]) -> list[T]:
    """Return the media of the body that a request names by their numbers."""
    indices = fields.integers(name, 0, max(len(media) - 1, 0), [])
    if indices and not media:
        raise fields.invalid_request(f"{name}: the body has none")
    return [media[index] for index in indices]
