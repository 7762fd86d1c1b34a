"""Times of a video as text between the visual tokens of its patches of time."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ..tokenizer import Tokenizer
from .families import QWEN_VIDEO, Placeholder

Form = Literal["qwen3", "glm4v", "glm46v"]
GLM_FRAME = Placeholder("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")


class _Style(NamedTuple):
    block: Placeholder
    text: Callable[[float], str]
    is_before: bool  # the time is before the visual tokens; else behind them
    is_mean: bool  # the time of a patch is the mean of its first and last frames'; else the first frame's


STYLES: dict[Form, _Style] = {
    "qwen3": _Style(QWEN_VIDEO, lambda time: f"<{time:.1f} seconds>", is_before=True, is_mean=True),
    "glm4v": _Style(GLM_FRAME, lambda time: str(int(time)), is_before=False, is_mean=False),
    "glm46v": _Style(GLM_FRAME, lambda time: f"{time:.1f} seconds", is_before=False, is_mean=False),
}


class Timestamps:
    """Ids of videos with their times. visual_id: of a visual token. frames: those of a patch of time"""

    def __init__(self, tokenizer: Tokenizer, form: Form, visual_id: int, frames: int):
        self._tokenizer, self._style, self._visual_id, self._frames = tokenizer, STYLES[form], visual_id, frames
        self._ids: dict[str, list[int]] = {}

    def expansion(self, indices: Sequence[int], fps: float, tokens: int) -> np.ndarray:
        """Return the ids of a video: int32.

        indices: numbers of its sampled frames. fps: of all frames. tokens: visual tokens of a patch of time
        """
        size = self._frames
        indices = [*indices, *[indices[-1]] * (-len(indices) % size)]
        start, end = self._ends
        visual, ids = [*start, *[self._visual_id] * tokens, *end], []
        for first in range(0, len(indices), size):
            time = indices[first] / fps
            if self._style.is_mean:
                time = (time + indices[first + size - 1] / fps) / 2
            text = self._encoded(self._style.text(time))
            ids += [*text, *visual] if self._style.is_before else [*visual, *text]
        return np.array(ids, np.int32)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        block = self._style.block
        return self._encoded(block.start), self._encoded(block.end)

    def _encoded(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._ids[text]
