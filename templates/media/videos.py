"""Videos: a list of frames, or a file that PyAV reads; which frames are taken, and their pixels."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats.schemas import UnusableRow, json_type
from .images import image_size, open_image
from .limits import MediaLimits
from .sources import data_or_file

if TYPE_CHECKING:
    import torch


# Of GLM-4.6V: patches of time per second of a video up to so many seconds, and of longer ones; the longest length that
# counts, and the most frames.
GLM_RATES, GLM_SLOWEST = {30: 3, 300: 1}, 0.5
GLM_LONGEST, GLM_MOST_FRAMES = 2400, 640


class VideoInfo(NamedTuple):
    """Facts from a video's header."""

    frames: int
    fps: float
    height: int
    width: int
    is_list: bool  # of frames that were taken before, `fps` each second


def video_info(source: Any, fps: float, *, allow_private: bool = False) -> VideoInfo:
    """Return the facts about a video. Raises UnusableRow with the reason, and ValueError without PyAV.

    fps: frames per second of a list of frames
    """
    if isinstance(source, list | tuple):
        sizes = {image_size(frame, allow_private=allow_private) for frame in source}
        if not sizes:
            raise UnusableRow("a video has no frame")
        if len(sizes) > 1:
            raise UnusableRow("the frames of a video differ in size")
        return VideoInfo(len(source), fps, *sizes.pop(), is_list=True)
    with _opened(source, allow_private) as (container, stream):
        rate, frames = float(stream.average_rate or 0), stream.frames
        if not frames:  # some containers do not say
            frames = sum(packet.pts is not None for packet in container.demux(stream))
        if not frames or not rate or not stream.width or not stream.height:
            raise UnusableRow("a video has no frame, or no rate of frames")
        return VideoInfo(frames, rate, stream.height, stream.width, is_list=False)


def sample_floor(info: VideoInfo, limits: MediaLimits, factor: int) -> list[int]:
    """Return the numbers of the frames to take, as transformers' Qwen2VLVideoProcessor: a multiple of `factor`."""
    import torch

    factor = limits.frame_factor or factor
    if info.is_list and info.frames <= limits.max_frames:
        return list(range(info.frames))
    most = min(limits.max_frames, info.frames) // factor * factor
    number = min(max(info.frames / info.fps * limits.fps, limits.min_frames), most, info.frames)
    number = math.floor(number / factor) * factor
    if not number:  # shorter than a patch of time, which repeats the last frame
        return list(range(info.frames))
    return torch.arange(0, info.frames, info.frames / number).int().tolist()


def sample_even(info: VideoInfo, limits: MediaLimits, factor: int) -> list[int]:
    """Return the numbers of the frames to take, as transformers' Qwen3VLVideoProcessor: first and last included."""
    import numpy as np

    if info.is_list and info.frames <= limits.max_frames:
        return list(range(info.frames))
    number = min(max(int(info.frames / info.fps * limits.fps), limits.min_frames), limits.max_frames, info.frames)
    if limits.frame_factor:
        number = max(number // limits.frame_factor, 1) * limits.frame_factor
        number = min(number, info.frames)
    return np.linspace(0, info.frames - 1, number).round().astype(int).tolist()


def sample_glm4v(info: VideoInfo, limits: MediaLimits, factor: int, *, longest: float) -> list[int]:
    """Return the numbers of the frames to take, as transformers' Glm4vVideoProcessor: an even number of them.

    longest: seconds, from which on frames are farther apart
    """
    if info.is_list:
        return list(range(info.frames))
    last, duration = info.frames - 1, info.frames / info.fps
    if duration <= longest:
        number = max(math.floor(duration * limits.fps), 1)
        places = [math.ceil(number * info.fps / limits.fps) for number in range(number)]
    elif (number := int(longest * limits.fps)) >= info.frames:
        places = [*range(info.frames)]
    else:
        places = [math.ceil(second * info.fps) for second in _evenly(0, duration, number)]
    return _even_number([min(place, last) for place in places])


def sample_glm46v(info: VideoInfo, limits: MediaLimits, factor: int) -> list[int]:
    """Return the numbers of the frames to take, as transformers' Glm46VVideoProcessor: an even number of them.

    The rate follows from the length, and FPS says nothing but when the frames of a list were taken.
    """
    if info.is_list:
        return list(range(info.frames))
    duration = info.frames / info.fps
    rate = next((rate for longest, rate in GLM_RATES.items() if duration <= longest), GLM_SLOWEST)
    number = min(int(min(duration, GLM_LONGEST) * rate * factor), GLM_MOST_FRAMES)
    if info.frames < number:
        places = _whole(_evenly(0, info.frames - 1, number))
    else:
        places, second = [], 0.0
        for frame in range(info.frames):
            if frame * (1 / info.fps) >= second:
                second += 1 / (factor * rate)
                places.append(frame)
                if second >= int(duration):
                    break
    if len(places) < number:
        places = _whole(_evenly(places[0], places[-1], number))
    elif len(places) > number:
        places = _whole(_evenly(0, info.frames - 1, number))
    return _even_number(places)


def _evenly(first: float, last: float, number: int) -> list[float]:
    import numpy as np

    return np.linspace(first, last, number).tolist()


def _whole(places: list[float]) -> list[int]:
    return [int(place) for place in places]


def _even_number(places: list[int]) -> list[int]:
    """Return each place once, and the last one twice where they would be odd."""
    places = list(dict.fromkeys(places))
    return [*places, *places[-1:]] if len(places) % 2 else places


def read_frames(source: Any, indices: list[int], *, allow_private: bool = False) -> "torch.Tensor":
    """Return the pixels of some frames: uint8 [frames, 3, height, width]. Raises UnusableRow."""
    import numpy as np
    import torch

    if isinstance(source, list | tuple):
        frames = [np.array(open_image(source[index], allow_private=allow_private)) for index in indices]
    else:
        with _opened(source, allow_private) as (container, stream):
            decoded, selected = {}, set(indices)
            for number, frame in enumerate(container.decode(stream)):
                if number in selected:
                    decoded[number] = frame.to_ndarray(format="rgb24")
                if number >= indices[-1]:
                    break
            frames = [decoded[index] for index in indices if index in decoded]
    if len(frames) != len(indices) or len({frame.shape for frame in frames}) > 1:
        raise UnusableRow("a video is damaged or truncated")
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


@contextmanager
def _opened(source: Any, allow_private: bool) -> Iterator[tuple[Any, Any]]:
    """Open a video file and its first stream of frames. PyAV's errors become UnusableRow."""
    try:
        import av  # pyright: ignore[reportMissingImports]
        import av.error  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            "a row has a video file, which needs PyAV. Run pip install 'megaswift[video]', or give a list of images."
        ) from error
    if isinstance(source, dict):
        source = source.get("path") if source.get("bytes") is None else source["bytes"]
    if isinstance(source, str):
        source = data_or_file(source, "video", allow_private=allow_private)
    if isinstance(source, bytes | bytearray | memoryview):
        source = io.BytesIO(source)
    elif not isinstance(source, Path):
        raise UnusableRow(f"a video is {json_type(source)}, where a path, a URL or a list of images is expected")
    try:
        with av.open(str(source) if isinstance(source, Path) else source) as container:
            if not container.streams.video:
                raise UnusableRow("a video has no stream of frames")
            yield container, container.streams.video[0]
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, UnusableRow):
            raise
        name = getattr(error, "strerror", None) or type(error).__name__
        raise UnusableRow(f"a video cannot be read ({str(name).lower()})") from error
