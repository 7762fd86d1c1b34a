"""Completions as rules get them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ....templates.formats.columns import parsed_object
from ....templates.json_types import Json, JsonObject

THOUGHT_END = "</think>"


@dataclass(frozen=True)
class RuleSample:
    """Completion with what a rule may read: the question, and the columns of its row."""

    completion: str
    question: str  # the last message of the user
    columns: JsonObject

    @cached_property
    def answer(self) -> str:
        """The completion after its last thought."""
        return self.completion.rpartition(THOUGHT_END)[2].lstrip("\n")

    @cached_property
    def truth(self) -> Json:
        """The row's `reward_model.ground_truth`, `ground_truth` or `solution`; None if it has none."""
        reward_model = parsed_object(self.columns.get("reward_model"))
        values = (reward_model.get("ground_truth"), self.columns.get("ground_truth"), self.columns.get("solution"))
        return next((value for value in values if value is not None), None)


# Returns a score for each sample, or None for one that it cannot score.
Rule = Callable[[Sequence[RuleSample]], Sequence[float | None]]
