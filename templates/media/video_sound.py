"""Sound of videos, which Omni models hear between the frames: USE_AUDIO_IN_VIDEO, transformers' use_audio_in_video.

A prompt has the tokens of a video and of its sound in the order of their time, between the tokens that begin and end an
audio. Two media stand for them: the video, whose ids are all of these, and behind it its sound, which has none of its
own.
"""

import numpy as np

from ..formats.medium import Medium
from ..formats.schemas import UnusableRow
from .audio_processor import AudioProcessor
from .families import Placeholder, VisionFamily
from .media_plan import MediaPlan


class VideoSound:
    """Order and positions of a video's tokens and those of its sound.

    video_id, audio_id: of tokens with features. ends: tokens before and behind an audio
    chunk: positions of a chunk of time of Qwen2.5-Omni, which has first the video of each and then the sound
    """

    def __init__(
        self, family: VisionFamily, video_id: int, audio_id: int, ends: tuple[list[int], list[int]], chunk: int
    ):
        assert family.video is not None
        assert family.audio is not None
        start, repeated, end = family.video
        self.placeholder = Placeholder(start, repeated + family.audio.placeholder.repeated, end)
        self._video_id, self._audio_id, (self._start, self._end) = video_id, audio_id, ends
        self._has_chunks, self._chunk = family.audio.is_padded, chunk

    def frames(self, medium: Medium, audio: AudioProcessor) -> int:
        """Return the frames of the spectrogram of a video's sound. Raises UnusableRow with the reason."""
        if isinstance(medium.source, list | tuple):
            raise UnusableRow("a list of frames has no sound, for which USE_AUDIO_IN_VIDEO asks")
        try:
            return audio.frames(medium)
        except UnusableRow as error:
            raise UnusableRow(f"the sound of a video: {error}") from error

    def plans(self, video: MediaPlan, audio: MediaPlan, frame_tokens: int) -> tuple[MediaPlan, MediaPlan]:
        """Return the plans of a video and of its sound, from those of each alone. frame_tokens: of a patch of time"""
        times = np.repeat(np.arange(video.grid[0]) * video.time_step, frame_tokens)
        seen, heard = times, np.arange(audio.tokens)
        if self._has_chunks:
            seen, heard = _chunks(seen, self._chunk), _chunks(heard, self._chunk)
        # At the same time, or in the same chunk, the video is first.
        order = np.argsort(np.concatenate([seen, heard]), kind="stable")
        ids = np.where(order < len(seen), self._video_id, self._audio_id)
        ids = np.concatenate([self._start, ids, self._end]).astype(np.int32)
        places = np.flatnonzero(ids == self._audio_id) - len(ids)
        return video._replace(expansion=ids), audio._replace(expansion=places.astype(np.int32))

    def positions(self, plan: MediaPlan, side: int, position: int) -> tuple[np.ndarray, int]:
        """Return the positions of a video's ids in time, height and width, int64 [3, ids], and the next position.

        side: of a visual token in patches. position: behind the token before the video
        """
        assert plan.expansion is not None
        positions = np.empty((3, plan.length), np.int64)
        # Qwen2.5-Omni has the tokens before and behind both the video and the sound at one position.
        positions[:, 0] = position - self._has_chunks
        first = positions[0, 0] + 1
        is_seen = plan.expansion == self._video_id
        time, height, width = plan.grid[0], plan.grid[1] // side, plan.grid[2] // side
        axes = np.indices((time, height, width)).reshape(3, -1)
        axes[0] *= plan.time_step
        positions[:, is_seen] = first + axes
        places = np.flatnonzero(plan.expansion == self._audio_id)
        positions[:, places] = first + np.arange(len(places))
        # As in transformers, what follows is behind the last part of one kind, though another may be later.
        others = places if is_seen[-2] else np.flatnonzero(is_seen)
        end = int(positions[:, others[-1] + 1 : -1].max()) + 1
        positions[:, -1] = end
        return positions, end + (not self._has_chunks)


def _chunks(times: np.ndarray, size: int) -> np.ndarray:
    """Return the chunk of each time: the next one begins at the first time behind a multiple of the size."""
    chunks, current = np.empty(len(times), np.int64), 0
    for place, time in enumerate(times.tolist()):
        current += time >= (current + 1) * size
        chunks[place] = current
    return chunks
