"""Limits of the size of images and videos, from flags, the environment and the checkpoint. Imports no torch."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..formats.schemas import UnusableRow
from ..json_types import JsonObject
from ..options import MediaOptions
from .families import VisionFamily

# Variables of the environment, which are also keys of --model_kwargs, and the kind of their value.
VARIABLES: dict[str, type[int] | type[float]] = {
    "MAX_PIXELS": int, "MIN_PIXELS": int, "IMAGE_MAX_TOKEN_NUM": int, "IMAGE_MIN_TOKEN_NUM": int,
    "VIDEO_MAX_PIXELS": int, "VIDEO_MIN_PIXELS": int, "VIDEO_MAX_TOKEN_NUM": int, "VIDEO_MIN_TOKEN_NUM": int,
    "VIDEO_TOTAL_PIXELS": int, "FPS": float, "FPS_MIN_FRAMES": int, "FPS_MAX_FRAMES": int, "FRAME_FACTOR": int,
    "MAX_RATIO": float,
}  # fmt: skip
SOUND_OF_VIDEOS = "USE_AUDIO_IN_VIDEO"  # also a key of --model_kwargs
BBOX_FORMATS = ("legacy", "new")  # values of QWENVL_BBOX_FORMAT


@dataclass(frozen=True)
class MediaLimits:
    """Limits of images and videos after resizing, and the sampling of frames. Pixels are height x width.

    The limits of a video are those of a frame, or of all its frames together (`video_volume`).
    """

    min_pixels: int
    max_pixels: int
    video_min_pixels: int
    video_max_pixels: int
    # Further limits of a frame, where the others are of all frames together.
    frame_min_pixels: int | None
    frame_max_pixels: int | None
    video_total_pixels: int | None  # further limit of all frames, where the others are of a frame
    fps: float  # frames per second to sample
    min_frames: int
    max_frames: int
    frame_factor: int | None  # the number of frames is a multiple of it; None: any number
    max_ratio: float  # largest ratio of the sides
    video_volume: bool

    def of_row(self, limits: JsonObject) -> "MediaLimits":
        """Return the limits with those of a row's chat_template_kwargs."""
        if not limits:
            return self
        changed: dict[str, Any] = {}
        if (most := limits.get("max_pixels")) is not None:
            changed["max_pixels"] = int(most)
            changed["frame_max_pixels" if self.video_volume else "video_max_pixels"] = int(most)
        if (least := limits.get("min_pixels")) is not None:
            changed["min_pixels"] = int(least)
            changed["frame_min_pixels" if self.video_volume else "video_min_pixels"] = int(least)
        if (fps := limits.get("fps")) is not None:
            changed["fps"] = float(fps)
        bounded = replace(self, **changed)
        if bounded.min_pixels > bounded.max_pixels:
            raise UnusableRow("its chat_template_kwargs set a max_pixels below min_pixels")
        return bounded


def requested_values(options: MediaOptions) -> dict[str, Any]:
    """Return the values of VARIABLES that --model_kwargs or else the environment sets. Raises ValueError.

    Also those of QWENVL_BBOX_FORMAT.
    """
    kwargs = {name.upper(): (value, f"--model_kwargs: {name}") for name, value in options.model_kwargs.items()}
    names = {*VARIABLES, "QWENVL_BBOX_FORMAT"}
    kwargs.pop(SOUND_OF_VIDEOS, None)
    if unknown := sorted(kwargs.keys() - names):
        raise ValueError(f"--model_kwargs: unknown name {unknown[0].lower()}. Use {', '.join(sorted(names)).lower()}.")
    environment = {name: (os.environ[name], name) for name in names if os.environ.get(name)}
    values: dict[str, Any] = {}
    for name, (value, origin) in (environment | kwargs).items():
        if name == "QWENVL_BBOX_FORMAT":
            if value not in BBOX_FORMATS:
                raise ValueError(f"{origin} {value}: unknown. Use {' or '.join(BBOX_FORMATS)}.")
            values[name] = value
            continue
        try:
            values[name] = VARIABLES[name](float(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{origin} {value}: not a number. Set one above 0.") from error
        if not 0 < values[name] < math.inf:
            raise ValueError(f"{origin} {value}: not above 0. Set a number above 0.")
    return values


def asks_for_sound(options: MediaOptions, model_type: str, family: VisionFamily) -> bool:
    """Return whether the sound of videos is asked for. Raises ValueError for a model that does not hear it."""
    settings = {name.upper(): value for name, value in options.model_kwargs.items()}
    value = str(settings.get(SOUND_OF_VIDEOS, os.environ.get(SOUND_OF_VIDEOS) or "")).lower()
    if value in ("", "0", "false"):
        return False
    if value not in ("1", "true"):
        raise ValueError(f"{SOUND_OF_VIDEOS} {value}: unknown. Use true or false.")
    if family.audio is None or family.video is None:
        raise ValueError(f"{SOUND_OF_VIDEOS} {value}: {model_type} does not hear the sound of videos. Remove it.")
    return True


def resolve_limits(
    options: MediaOptions,
    image: tuple[int | None, int],
    video: Mapping[str, Any] | None,
    token_pixels: int,
    *,
    least_limit: int,
    video_volume: bool,
) -> MediaLimits:
    """Return the limits by --max_pixels, then --model_kwargs, then the environment, then the checkpoint.

    image: fewest and most pixels of an image by the checkpoint; None: they have no smallest size
    video: config of the checkpoint's video processor; None: it has none
    token_pixels: pixels of a visual token
    least_limit: least value of a limit of an image's pixels
    Raises ValueError, naming the flag or variable.
    """
    values, video = requested_values(options), video or {"size": dict.fromkeys(("shortest_edge", "longest_edge"), 1)}
    least, most = image
    if least is None and (names := sorted(values.keys() & {"MIN_PIXELS", "IMAGE_MIN_TOKEN_NUM"})):
        raise ValueError(f"{names[0]} {values[names[0]]}: images of this model have no smallest size. Remove it.")

    def pixels(prefix: str, tokens: str, default: int | None) -> int | None:
        if prefix in values:
            return values[prefix]
        return values[tokens] * token_pixels if tokens in values else default

    max_pixels = pixels("MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM", most) or 0
    if options.max_pixels is not None:
        max_pixels = min(max_pixels, options.max_pixels)
    total = values.get("VIDEO_TOTAL_PIXELS")
    frame = pixels("VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", None)
    frame_min = pixels("VIDEO_MIN_PIXELS", "VIDEO_MIN_TOKEN_NUM", None)
    video_min = video["size"]["shortest_edge"]
    is_capped = bool(video.get("cap_pixels_per_frame"))  # in checkpoints from transformers 5.17 on
    if video_volume:
        if frame is None and is_capped:
            frame = video["max_video_tokens"] * token_pixels
        video_max = total or video["size"]["longest_edge"]
        total = None
    else:
        video_max = frame or video["size"]["longest_edge"]
        video_min, frame, frame_min = frame_min or video_min, None, None
        if total is None and is_capped:
            total = int(video["max_video_tokens"] * token_pixels * 0.9)
    limits = MediaLimits(
        min_pixels=pixels("MIN_PIXELS", "IMAGE_MIN_TOKEN_NUM", least or 1) or 0,
        max_pixels=max_pixels,
        video_min_pixels=video_min,
        video_max_pixels=video_max,
        frame_min_pixels=frame_min,
        frame_max_pixels=frame,
        video_total_pixels=total,
        fps=values.get("FPS", video.get("fps") or 2),
        min_frames=values.get("FPS_MIN_FRAMES", video.get("min_frames") or 4),
        max_frames=values.get("FPS_MAX_FRAMES", video.get("max_frames") or 768),
        frame_factor=values.get("FRAME_FACTOR"),
        max_ratio=values.get("MAX_RATIO", 200),
        video_volume=video_volume,
    )
    if limits.max_pixels < (fewest := max(limits.min_pixels, least_limit)):
        flag = f"--max_pixels {options.max_pixels}" if options.max_pixels == max_pixels else "MAX_PIXELS"
        other = "" if least is None else ", or MIN_PIXELS"
        raise ValueError(f"{flag}: below the fewest pixels of an image, {fewest:,}. Set at least these{other}.")
    if limits.max_frames < limits.min_frames:
        raise ValueError(f"FPS_MAX_FRAMES {limits.max_frames}: below FPS_MIN_FRAMES {limits.min_frames}. Set more.")
    return limits
