"""Rules that compare a final answer: GSM8K's strict form, mathematics, multiple choice."""

import re
from collections.abc import Sequence

from ....templates.formats.recipes import GSM8K_ANSWER
from ..math_verify_pool import MathVerifyPool
from .sample import RuleSample

BOX = r"\boxed{"
MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[|####|<answer>|\n")  # marks of an answer within other text
PHRASE = re.compile(r"answer is", re.IGNORECASE)
# Scores of multiple choice by (is correct, is boxed).
CHOICE_SCORES = {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0}


def score_gsm8k(samples: Sequence[RuleSample]) -> list[float | None]:
    """Return 1 where the last `#### number` is the row's, digit by digit without commas, else 0.

    The row's number may stand behind `####` too, as in GSM8K's own column `answer`.
    """
    return [None if sample.truth is None else _score_gsm8k(sample) for sample in samples]


def _score_gsm8k(sample: RuleSample) -> float:
    answers, truths = GSM8K_ANSWER.findall(sample.completion), GSM8K_ANSWER.findall(str(sample.truth))
    truth = truths[-1] if truths else str(sample.truth).strip()
    return float(bool(answers) and answers[-1].replace(",", "") == truth.replace(",", ""))


class MathRule:
    """Rule of mathematics: 1 where math-verify finds the answer equal to the row's, else 0."""

    def __init__(self) -> None:
        self._pool = MathVerifyPool()

    def __call__(self, samples: Sequence[RuleSample]) -> list[float | None]:
        """Return the scores; None for a row without an answer, or with one that math-verify cannot read."""
        samples_with_truth = [sample for sample in samples if sample.truth is not None]
        verdicts = iter(self._pool([(_boxed(_first(sample.truth)), sample.answer) for sample in samples_with_truth]))
        results = [None if sample.truth is None else next(verdicts) for sample in samples]
        return [None if result is None else float(result) for result in results]


def _first(truth: object) -> str:
    """Return an answer as text: the first one of a list."""
    return str(truth[0]) if isinstance(truth, list) and truth else str(truth)


def _boxed(truth: str) -> str:
    r"""Return a bare answer in \boxed, since math-verify does not read `(1, 2)` or `3x^2` without a mark of LaTeX."""
    return truth if MARKED.search(truth) else rf"\boxed{{{truth}}}"


def score_choice(samples: Sequence[RuleSample]) -> list[float | None]:
    r"""Return 1 for the right letter in \boxed, and 0.5 for it elsewhere.

    A wrong one has -0.5 in \boxed, and -1 elsewhere. The letter is the first capital in the last \boxed, else behind
    the last `answer is`, else in the whole answer.
    Source: the soft reward of ROLL's rule for CrossThink-QA
    """
    return [None if not str(sample.truth or "").strip() else _score_choice(sample) for sample in samples]


def _score_choice(sample: RuleSample) -> float:
    box = last_flat_box(sample.answer)
    text = PHRASE.split(sample.answer)[-1] if box is None else box
    letter = next((character for character in text if character.isupper()), "")
    return CHOICE_SCORES[letter == str(sample.truth).strip()[0], box is not None]


def last_flat_box(text: str) -> str | None:
    r"""Return the content of the last \boxed that is not empty, up to its first closing brace; None without one.

    ROLL's rule ends there, too. One pass: a regular expression takes quadratic time for boxes that are not closed.
    """
    content, start = None, text.find(BOX)
    while start >= 0 and (end := text.find("}", start)) >= 0:
        first = start + len(BOX)
        content = text[first:end] or content
        start = text.find(BOX, end if end > first else first)
    return content
