"""Built-in rewards under ms-swift's names and signatures, for plugins that call them."""

from typing import Any

from .functions import Accuracy, has_format
from .registry import ORM


class MathAccuracy(ORM):
    """1 where the completion's answer equals the solution, else 0."""

    def __init__(self, args: Any = None, **settings: object):
        super().__init__(args, **settings)
        self._accuracy = Accuracy()

    def __call__(self, completions: list[str], solution: list[object], **_: object) -> list[float]:
        return [value or 0.0 for value in self._accuracy(completions, solution)]


class Format(ORM):
    """1 where a completion is exactly <think>...</think><answer>...</answer>, else 0."""

    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [float(has_format(text)) for text in completions]
