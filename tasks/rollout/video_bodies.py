"""Videos in the bodies of /generate and /top_log_probs, as the server reads them.

Runs send the frames that training has sampled and resized (request_bodies.py). Other clients may give a file of a video
as `data`, `url` or `path`, of which the server samples frames by its own limits, or by `fps`, `min_pixels` and
`max_pixels`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...templates.formats.medium import Medium
from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import Json
from ...templates.media.images import image_size, open_image
from ...templates.media.processor import MediaPlan, SampledVideo, VisionProcessor
from ...templates.media.videos import VideoInfo, video_info
from .fields import Fields, invalid_request
from .image_bodies import MAX_MEDIA, SOURCES, MediaSources, check_bytes, decoded, row_limits
from .request_bodies import CHANNELS
from .request_video import RequestVideo

RATES = 1e-6, 1e6  # bounds of frames per second
MOST_FRAMES = 2**31  # of the whole video


class SentVideo(NamedTuple):
    """Video of a body, and its size for the model."""

    video: RequestVideo
    plan: MediaPlan


class VideoReader:
    """Reader of the videos of bodies, for a model that takes videos. Its methods raise RequestError.

    allowed_folder: folder whose files clients may name; None: none
    most: videos of a prompt; None: any number
    """

    def __init__(self, vision: VisionProcessor, allowed_folder: Path | None, most: int | None = None):
        self.vision, self.most, self._sources = vision, most, MediaSources(allowed_folder)

    def read(self, items: Sequence[Json]) -> list[SentVideo]:
        """Return decoded videos."""
        videos: list[SentVideo] = []
        size = 0
        for number, item in enumerate(items):
            part = f"video {number}"
            fields = Fields(
                item, ("frames", "indices", "total_frames", "fps", *SOURCES, "min_pixels", "max_pixels"), part
            )
            try:
                sampled, plan, size = (self._frames if "frames" in fields else self._file)(fields, size)
            except UnusableRow as error:
                raise invalid_request(f"{part}: {error}") from None
            videos.append(SentVideo(RequestVideo(plan, self.vision, lambda sampled=sampled: sampled), plan))
        return videos

    def _frames(self, fields: Fields, size: int) -> tuple[SampledVideo, MediaPlan, int]:
        """Return a video of sampled frames. size: decoded bytes so far, and in the result with this one"""
        files = [decoded(value, fields, "an item of frames") for value in fields.items("frames", MAX_MEDIA)]
        total = fields.integer("total_frames", 1, MOST_FRAMES, len(files))
        indices = fields.integers("indices", 0, total - 1, list(range(len(files))))
        if len(indices) != len(files) or indices != sorted(indices):
            raise fields.invalid_request(f"indices must have a number for each of {len(files)} frames, in their order")
        rate = fields.number("fps", *RATES, self.vision.limits.fps)
        if any(name in fields for name in (*SOURCES, "min_pixels", "max_pixels")):
            raise fields.invalid_request("frames have their size already: send no data, url, path or limits with them")
        sizes = {image_size(file) for file in files}
        if len(sizes) > 1:
            raise UnusableRow("the frames of a video differ in size")
        ((height, width),) = sizes
        if height % self.vision.factor or width % self.vision.factor:
            raise fields.invalid_request(
                f"frames of {width} x {height} pixels: both must be multiples of {self.vision.factor}"
            )
        if self.vision.family.has_timestamps and len(files) < self.vision.temporal_patch_size:
            raise UnusableRow(f"a video has fewer than {self.vision.temporal_patch_size} frames")
        size += len(files) * height * width * CHANNELS
        check_bytes(size, "videos")
        info = VideoInfo(total, rate, height, width, is_list=False)
        pixels = np.stack([np.array(open_image(file)) for file in files])
        frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        return SampledVideo(frames, indices, info), self.vision.plan_frames(height, width, indices, info), size

    def _file(self, fields: Fields, size: int) -> tuple[SampledVideo, MediaPlan, int]:
        """Return a video of a file, of which frames are sampled. size: as of `_frames`"""
        limits = row_limits(fields, self.vision)
        if "fps" in fields:
            limits["fps"] = fields.number("fps", *RATES)
        source = self._sources.read(fields)
        medium = Medium("video", {"bytes": source} if isinstance(source, bytes) else str(source), limits)
        plan = self.vision.plan(medium)
        info = video_info(medium.source, self.vision.limits.of_row(limits).fps)
        frames = plan.grid[0] * self.vision.temporal_patch_size
        size += frames * max(info.height * info.width, math.prod(plan.grid[1:]) * self.vision.patch_size**2) * CHANNELS
        check_bytes(size, "videos")
        return self.vision.sampled_frames(medium, plan.grid), plan, size
