"""Rules of `by_source` that are rewards themselves, for data without a column that names the source."""

from collections.abc import Sequence

from .by_source import TRUTH_COLUMNS
from .registry import reward
from .rules.answers import score_gsm8k
from .rules.countdown import score_countdown
from .rules.sample import Rule, RuleSample


class SingleRule:
    """Base class of a reward that scores every row by one rule."""

    required_alternatives = (TRUTH_COLUMNS[:3],)
    rule: Rule

    def __call__(self, completions: Sequence[str], **columns: Sequence[object]) -> Sequence[float | None]:
        """Return the scores; None for rows without what the rule compares."""
        truths = {name: columns[name] for name in TRUTH_COLUMNS if name in columns}
        samples = [
            RuleSample(text, "", {name: values[i] for name, values in truths.items()})
            for i, text in enumerate(completions)
        ]
        return type(self).rule(samples)


@reward("countdown")
class Countdown(SingleRule):
    """Score of an equation of given numbers."""

    rule = score_countdown


@reward("gsm8k")
class Gsm8k(SingleRule):
    """Strict score of a number behind ####."""

    rule = score_gsm8k
