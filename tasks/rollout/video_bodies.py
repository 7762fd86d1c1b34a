"""Videos in the bodies of /generate and /top_log_probs, as the server reads them: frames that clients have sampled.

The server decodes no files of videos: FFmpeg reads formats that name other files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import Json
from ...templates.media.images import image_size, open_image
from ...templates.media.processor import MediaPlan, SampledVideo, VisionProcessor
from ...templates.media.videos import VideoInfo
from .fields import Fields, invalid_request
from .image_bodies import MAX_MEDIA, check_bytes, decoded
from .request_bodies import CHANNELS
from .request_video import RequestVideo

RATES = 1e-6, 1e6  # bounds of frames per second
MOST_FRAMES = 2**31  # frames of a whole video


class SentVideo(NamedTuple):
    """Video of a body, and its size for the model."""

    video: RequestVideo
    plan: MediaPlan


class VideoReader:
    """Reader of the videos of bodies, for a model that takes videos. Its methods raise RequestError.

    most: videos of a prompt; None: any number
    """

    def __init__(self, vision: VisionProcessor, most: int | None = None):
        self.vision, self.most = vision, most

    def read(self, items: Sequence[Json]) -> list[SentVideo]:
        """Return decoded videos."""
        videos: list[SentVideo] = []
        size = 0
        for number, item in enumerate(items):
            part = f"video {number}"
            fields = Fields(item, ("frames", "indices", "total_frames", "fps", "sampled_fps"), part)
            try:
                sampled, size = self._read(fields, size)
                rate = fields.number("sampled_fps", *RATES, self.vision.limits.fps)
                info = sampled.info
                plan = self.vision.plan_frames(info.height, info.width, sampled.indices, info, rate)
            except UnusableRow as error:
                raise invalid_request(f"{part}: {error}") from None
            videos.append(SentVideo(RequestVideo(plan, self.vision, lambda sampled=sampled: sampled), plan))
        return videos

    def _read(self, fields: Fields, size: int) -> tuple[SampledVideo, int]:
        """Return a video, and the decoded bytes with it. size: those before it"""
        files = [decoded(value, fields, "an item of frames") for value in fields.items("frames", MAX_MEDIA)]
        total = fields.integer("total_frames", 1, MOST_FRAMES, len(files))
        indices = fields.integers("indices", 0, total - 1, list(range(len(files))))
        if len(indices) != len(files) or indices != sorted(indices):
            raise fields.invalid_request(f"indices must have a number for each of {len(files)} frames, in their order")
        rate = fields.number("fps", *RATES, self.vision.limits.fps)
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
        pixels = np.stack([np.array(open_image(file)) for file in files])
        frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        return SampledVideo(frames, indices, VideoInfo(total, rate, height, width, is_list=False)), size
