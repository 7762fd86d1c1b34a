"""Rules of `by_source` that are rewards themselves, for data without a column that names the source."""

from collections.abc import Sequence

from ..options.rewards import RewardOptions
from .by_source import RULES, TRUTH_COLUMNS
from .registry import reward
from .rules.sample import RuleSample


class SingleRule:
    """Reward that scores every row by one rule."""

    required_alternatives = (TRUTH_COLUMNS[:3],)
    name: str  # key of RULES

    def __init__(self, args: RewardOptions):
        self._rule = RULES[self.name](args)

    def __call__(self, completions: Sequence[str], **columns: Sequence[object]) -> Sequence[float | None]:
        """Return the scores; None for rows without what the rule compares."""
        truths = {name: columns[name] for name in TRUTH_COLUMNS if name in columns}
        samples = [
            RuleSample(text, "", {name: values[i] for name, values in truths.items()})
            for i, text in enumerate(completions)
        ]
        return self._rule(samples)


@reward("countdown")
class Countdown(SingleRule):
    """Score of an equation of given numbers."""

    name = "countdown"


@reward("gsm8k")
class Gsm8k(SingleRule):
    """Strict score of a number behind ####."""

    name = "gsm8k"
