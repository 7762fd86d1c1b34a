"""The rewards that are built in."""

import math
import re
from collections.abc import Sequence
from typing import Any

from ..options.rewards import RewardOptions
from .math_verify_pool import Checkers
from .registry import reward

SEAM = re.compile(r"</think>\s*<answer>")


@reward("accuracy")
class Accuracy:
    """1 where the completion's answer equals the column `solution`, 0 where not (math-verify); None where there is no
    solution, or none that can be read."""

    def __init__(self):
        self._checkers = Checkers()

    def __call__(self, completions: list[str], solution: Sequence[Any]) -> list[float | None]:
        known = [i for i, text in enumerate(solution) if text is not None]
        found = self._checkers([(str(solution[i]), completions[i]) for i in known])
        rewards: list[float | None] = [None] * len(completions)
        for i, right in zip(known, found, strict=True):
            rewards[i] = None if right is None else float(right)
        return rewards


@reward("format")
def thinks_then_answers(completions: list[str]) -> list[float]:
    """1 where a completion is <think>...</think><answer>...</answer> and nothing else, 0 where not."""
    return [float(_is_formed(text)) for text in completions]


def _is_formed(text: str) -> bool:
    """Equal to a full match of <think>.*</think>\\s*<answer>.*</answer>, but linear in the length of any text."""
    begins, ends = "<think>", "</answer>"
    seam = SEAM.search(text, len(begins), max(len(text) - len(ends), 0))
    return text.startswith(begins) and text.endswith(ends) and seam is not None


@reward("cosine")
class Cosine:
    """Accuracy that depends on length: from the value at no length to that at `cosine_max_len` by half a cosine.

    https://arxiv.org/abs/2502.03373, appendix C.1; longer ones have the value at `cosine_max_len`.
    """

    def __init__(self, args: RewardOptions):
        if args.cosine_max_len is None or args.cosine_max_len < 1:
            raise ValueError("--cosine_max_len: give a number of tokens, at least 1")
        self._length = args.cosine_max_len
        self._ends = {  # right -> the values at no length and at the greatest
            True: (args.cosine_min_len_value_correct, args.cosine_max_len_value_correct),
            False: (args.cosine_min_len_value_wrong, args.cosine_max_len_value_wrong),
        }
        self._accuracy = Accuracy()

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], solution: Sequence[Any]
    ) -> list[float | None]:
        right = self._accuracy(completions, solution)
        return [
            None if x is None else self._value(x == 1, len(ids)) for x, ids in zip(right, completion_ids, strict=True)
        ]

    def _value(self, right: bool, length: int) -> float:
        short, long = self._ends[right]
        share = min(length / self._length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


@reward("repetition")
class Repetition:
    """`repetition_max_penalty` times the share of n-grams that were there before, of tokens (so in any language).

    https://arxiv.org/abs/2502.03373, appendix C.2
    """

    def __init__(self, args: RewardOptions):
        self._n, self._penalty = args.repetition_n_grams, args.repetition_max_penalty
        if self._n < 1:
            raise ValueError(f"--repetition_n_grams {self._n}: at least 1 is needed")
        if self._penalty > 0:
            raise ValueError(f"--repetition_max_penalty {self._penalty}: give a negative number, which is a penalty")

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        return [self._value(ids) for ids in completion_ids]

    def _value(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self._n]) for i in range(len(ids) - self._n + 1)]
        return self._penalty * (1 - len(set(grams)) / len(grams)) + 0.0 if grams else 0.0


@reward("soft_overlong")
class SoftOverlong:
    """0, from `soft_max_length` - `soft_cache_length` tokens on falling to -1 at `soft_max_length`.

    DAPO, https://arxiv.org/abs/2503.14476, equation 13
    """

    def __init__(self, args: RewardOptions):
        longest, cache = args.soft_max_length, args.soft_cache_length
        if longest is None or cache is None or not 0 < cache < longest:
            raise ValueError(
                f"--reward_funcs soft_overlong: --soft_cache_length {cache} is to be above 0 and below "
                f"--soft_max_length {longest}, both in tokens"
            )
        self._start, self._cache = longest - cache, cache

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        return [min(max((self._start - len(ids)) / self._cache, -1.0), 0.0) for ids in completion_ids]
