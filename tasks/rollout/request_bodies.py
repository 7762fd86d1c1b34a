"""Bodies of /generate and /top_log_probs that a run sends, with images, videos and audios.

A body has `images`, a list of {data, min_pixels, max_pixels}, `videos`, a list of {frames, fps, indices, total_frames},
of Omni models with sampled_fps, and `audios`, a list of {samples}; each request has the indices of its own: completions
of a prompt share one. A body to be scored is of one document, which has all of them. `data` and `frames` are files in
base64, `samples` float32.
"""

import base64
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...templates.json_types import JsonObject
from .engine import Request
from .request_audio import RequestAudio
from .request_image import RequestImage
from .request_video import RequestVideo

if TYPE_CHECKING:
    from PIL.Image import Image

MEDIA_BYTES = 128 * 2**20  # decoded, of a body, unless one request has more
CHANNELS = 3

type RequestMedium = RequestImage | RequestVideo | RequestAudio


def request_bodies(requests: Iterable[Request]) -> list[JsonObject]:
    """Divide requests, in order, into bodies, each with at most MEDIA_BYTES of media."""
    encoded: dict[RequestMedium, JsonObject] = {}
    bodies: list[JsonObject] = []
    numbers: dict[str, dict[RequestMedium, int]] = {}  # places of the media in the last body
    size = 0
    for request in requests:
        media = _media(request)
        used = list(dict.fromkeys(medium for listed in media.values() for medium in listed))
        for medium in used:
            if medium not in encoded:
                encoded[medium] = _encode(medium)
        added = sum(
            _decoded_bytes(medium) for medium in used if not any(medium in positions for positions in numbers.values())
        )
        if not bodies or (added and size and size + added > MEDIA_BYTES):
            bodies.append({"requests": []})
            numbers, size = {name: {} for name in media}, 0
            added = sum(map(_decoded_bytes, used))
        size += added
        item = {"tokens": request.tokens, "seed": request.seed, "max_new_tokens": request.max_new_tokens}
        for name, listed in media.items():
            if listed:  # servers of earlier versions do not know these fields
                positions = numbers[name]
                item[name] = [positions.setdefault(medium, len(positions)) for medium in listed]
                item["prompt_length"] = request.prompt_length
                bodies[-1][name] = [encoded[medium] for medium in positions]
        bodies[-1]["requests"].append(item)
    return bodies


def scoring_body(document: Request) -> JsonObject:
    """Return the part of a body of /top_log_probs that has the document."""
    body: JsonObject = {"tokens": document.tokens}
    for name, media in _media(document).items():
        if media:  # servers of earlier versions do not know these fields
            body |= {name: list(map(_encode, media)), "prompt_length": document.prompt_length}
    return body


def _media(request: Request) -> dict[str, list[RequestMedium]]:
    return {"images": [*request.images], "videos": [*request.videos], "audios": [*request.audios]}


def _decoded_bytes(medium: RequestMedium) -> int:
    if isinstance(medium, RequestVideo):
        return medium.sampled.frames.nbytes
    if isinstance(medium, RequestAudio):
        return medium.samples.nbytes
    return medium.pixels.width * medium.pixels.height * CHANNELS


def _encode(medium: RequestMedium) -> JsonObject:
    """Return an image, the frames of a video, or the samples of an audio, without loss."""
    if isinstance(medium, RequestAudio):
        if medium.plan.is_sound:
            raise ValueError("USE_AUDIO_IN_VIDEO true: a run does not send the sound of videos to servers. Remove it")
        return {"samples": base64.b64encode(medium.samples.astype("<f4").tobytes()).decode()}
    if isinstance(medium, RequestImage):
        return {"data": _png(medium.pixels), "min_pixels": medium.min_pixels, "max_pixels": medium.max_pixels}
    from PIL import Image

    frames, indices, info = medium.sampled
    pixels = frames.permute(0, 2, 3, 1).contiguous().numpy()
    files = [_png(Image.fromarray(frame)) for frame in pixels]
    body: JsonObject = {"frames": files, "fps": info.fps, "indices": indices, "total_frames": info.frames}
    if medium.vision.family.follows_time:  # servers of earlier versions do not know this field
        body["sampled_fps"] = medium.vision.sampled_fps(medium.plan)
    return body


def _png(image: "Image") -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
