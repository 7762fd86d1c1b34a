"""Requests with the media of their documents, as engines take them."""

from collections.abc import Sequence
from dataclasses import replace

from ...templates.dataset.placed_media import PlacedMedium, collapse
from ...templates.formats.medium import MediaKind
from ...templates.media.processor import VisionProcessor
from .engine import Request
from .request_audio import training_audio
from .request_image import resized_image, training_image
from .request_video import training_video


def with_media(
    requests: Sequence[Request], media: Sequence[Sequence[PlacedMedium]], vision: VisionProcessor
) -> list[Request]:
    """Return requests with their media, which several of them may share, and one placeholder for each.

    media: of each request, whose tokens have all tokens of them
    """
    images = {
        id(image.medium): (resized_image if _of_kind(placed, "video") else training_image)(image, vision)
        for placed in media
        for image in _of_kind(placed, "image")
    }
    videos = {
        id(video.medium): training_video(video, vision) for placed in media for video in _of_kind(placed, "video")
    }
    audios = {
        id(audio.medium): training_audio(audio, vision) for placed in media for audio in _of_kind(placed, "audio")
    }
    return [
        replace(
            request,
            tokens=collapse(request.tokens, placed, vision.placeholders),
            images=[images[id(image.medium)] for image in _of_kind(placed, "image")],
            prompt_length=len(request.tokens),
            videos=[videos[id(video.medium)] for video in _of_kind(placed, "video")],
            audios=[audios[id(audio.medium)] for audio in _of_kind(placed, "audio")],
        )
        for request, placed in zip(requests, media, strict=True)
    ]


def _of_kind(media: Sequence[PlacedMedium], kind: MediaKind) -> list[PlacedMedium]:
    return [placed for placed in media if placed.plan.kind == kind]
