"""Rewards as verl and siiRL call them: `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..system.plugins import plugin_function
from .by_source import SOURCE_COLUMNS, TRUTH_COLUMNS, source_of
from .registry import orms
from .reward_fn import BUILT_IN
from .rules.sample import RuleSample

PARAMETERS = ("data_source", "solution_str", "ground_truth")


class ScoreFunction:
    """Reward that calls a function of one completion for each.

    The function returns a number, or a dict with `score`.
    """

    required_alternatives = (SOURCE_COLUMNS, TRUTH_COLUMNS)

    def __init__(self, function: Callable):
        self._function = function
        self.__module__ = function.__module__  # it tells a plugin's rewards from built-in ones
        self._takes_info = "extra_info" in inspect.signature(function).parameters

    def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return the scores; None for rows without a source."""
        names = [name for name in columns if name not in BUILT_IN]
        rows = [{name: columns[name][i] for name in names} for i in range(len(completions))]
        return [self._score(text, row) for text, row in zip(completions, rows, strict=True)]

    def _score(self, text: str, row: dict[str, Any]) -> float | None:
        source = source_of(row)
        if source is None:
            return None
        info = {"extra_info": row.get("extra_info") or {}} if self._takes_info else {}
        truth = RuleSample(text, "", row).truth
        result = self._function(data_source=source, solution_str=text, ground_truth=truth, **info)
        return float(result["score"] if isinstance(result, dict) else result)


def register_score_functions(names: Sequence[str]) -> None:
    """Register those of the names that are such functions in loaded plugins, and no other rewards."""
    for name in names:
        function = plugin_function(name) if name not in orms else None
        if function and set(PARAMETERS) <= set(inspect.signature(function).parameters):
            orms[name] = ScoreFunction(function)
