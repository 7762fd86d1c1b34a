"""Built-in rewards."""

import math
import re
from collections.abc import Sequence

from ...templates.json_types import JsonObject
from ..options.rewards import RewardOptions
from .math_verify_pool import MathVerifyPool
from .registry import reward

SEPARATOR = re.compile(r"</think>\s*<answer>")


@reward("accuracy")
class Accuracy:
    """1 where the completion's answer equals the column `solution` (by math-verify), else 0.

    None where the row has no solution, or one that math-verify cannot parse.
    """

    def __init__(self):
        self._checkers = MathVerifyPool()

    def __call__(self, completions: list[str], solution: Sequence[object]) -> list[float | None]:
        solved = [i for i, text in enumerate(solution) if text is not None]
        verdicts = self._checkers([(str(solution[i]), completions[i]) for i in solved])
        rewards: list[float | None] = [None] * len(completions)
        for i, is_correct in zip(solved, verdicts, strict=True):
            rewards[i] = None if is_correct is None else float(is_correct)
        return rewards


@reward("format")
def thinks_then_answers(completions: list[str]) -> list[float]:
    """Return 1 where a completion is exactly <think>...</think><answer>...</answer>, else 0."""
    return [float(has_format(text)) for text in completions]


def has_format(text: str) -> bool:
    """Return whether a text matches <think>.*</think>\\s*<answer>.*</answer>, in linear time."""
    prefix, suffix = "<think>", "</answer>"
    seam = SEPARATOR.search(text, len(prefix), max(len(text) - len(suffix), 0))
    return text.startswith(prefix) and text.endswith(suffix) and seam is not None


@reward("cosine")
class Cosine:
    """Accuracy reward scaled by length: a half cosine from the value at length 0 to the value at `cosine_max_len`.

    Longer completions get the value at `cosine_max_len`. Source: https://arxiv.org/abs/2502.03373, appendix C.1
    """

    def __init__(self, args: RewardOptions):
        if args.cosine_max_len is None or args.cosine_max_len < 1:
            raise ValueError("--cosine_max_len: set a number of tokens, at least 1")
        self._length = args.cosine_max_len
        self._ends = {  # is_correct -> the values at length 0 and at the maximum
            True: (args.cosine_min_len_value_correct, args.cosine_max_len_value_correct),
            False: (args.cosine_min_len_value_wrong, args.cosine_max_len_value_wrong),
        }
        self._accuracy = Accuracy()

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], solution: Sequence[object]
    ) -> list[float | None]:
        is_correct = self._accuracy(completions, solution)
        return [
            None if value is None else self._value(value == 1, len(ids))
            for value, ids in zip(is_correct, completion_ids, strict=True)
        ]

    def _value(self, is_correct: bool, length: int) -> float:
        short, long = self._ends[is_correct]
        share = min(length / self._length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


@reward("gym_reward")
def total_rewards_of_environments(rollout_infos: Sequence[JsonObject]) -> list[float]:
    """Return `total_reward` of the scheduler's information, which a gym environment's scheduler sums up."""
    if not all("total_reward" in info for info in rollout_infos):
        raise ValueError(
            "--use_gym_env true: an episode has no total_reward in its rollout_infos. Set --multi_turn_scheduler "
            "gym_scheduler, or one that returns it"
        )
    return [float(info["total_reward"]) for info in rollout_infos]


@reward("repetition")
class Repetition:
    """Penalty: `repetition_max_penalty` times the fraction of repeated n-grams of tokens.

    Source: https://arxiv.org/abs/2502.03373, appendix C.2
    """

    def __init__(self, args: RewardOptions):
        self._n, self._penalty = args.repetition_n_grams, args.repetition_max_penalty
        if self._n < 1:
            raise ValueError(f"--repetition_n_grams {self._n}: set at least 1")
        if self._penalty > 0:
            raise ValueError(f"--repetition_max_penalty {self._penalty}: not a penalty. Set a negative number")

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        return [self._value(ids) for ids in completion_ids]

    def _value(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[i : i + self._n]) for i in range(len(ids) - self._n + 1)]
        return self._penalty * (1 - len(set(grams)) / len(grams)) + 0.0 if grams else 0.0


@reward("soft_overlong")
class SoftOverlong:
    """Length penalty: 0 up to `soft_max_length` - `soft_cache_length` tokens, then linear to -1 at `soft_max_length`.

    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13
    """

    def __init__(self, args: RewardOptions):
        longest, cache = args.soft_max_length, args.soft_cache_length
        if longest is None or cache is None or not 0 < cache < longest:
            raise ValueError(
                f"--reward_funcs soft_overlong: --soft_cache_length {cache} is not above 0 and below "
                f"--soft_max_length {longest}. Fix them, both in tokens"
            )
        self._start, self._cache = longest - cache, cache

    def __call__(self, completion_ids: list[list[int]]) -> list[float]:
        return [min(max((self._start - len(ids)) / self._cache, -1.0), 0.0) for ids in completion_ids]
