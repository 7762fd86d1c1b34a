"""Metrics of answers against a dataset's own: `--metric`."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

# A Chinese, Japanese or Korean character is a word of its own.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+")  # fmt: skip  # noqa: E501
Pairs = Sequence[tuple[str, str]]  # (answer, label)


def accuracy(pairs: Pairs) -> dict[str, float]:
    """Return the share of answers that equal their label."""
    return {"acc": sum(answer == label for answer, label in pairs) / len(pairs)}


def rouge(pairs: Pairs) -> dict[str, float]:
    """Return the mean F1 in percent of common words, pairs of words and longest common subsequences.

    Source: Lin 2004, https://aclanthology.org/W04-1013
    """
    scores = [_rouge(WORD.findall(answer), WORD.findall(label)) for answer, label in pairs]
    means = [round(100 * sum(column) / len(scores), 6) for column in zip(*scores, strict=True)]
    return dict(zip(("rouge-1", "rouge-2", "rouge-l"), means, strict=True))


def _rouge(answer: list[str], label: list[str]) -> tuple[float, float, float]:
    scores = []
    for size in (1, 2):
        ngrams = [Counter(zip(*(words[i:] for i in range(size)), strict=False)) for words in (answer, label)]
        common = (ngrams[0] & ngrams[1]).total()
        scores.append(_f1(common, ngrams[0].total(), ngrams[1].total()))
    return scores[0], scores[1], _f1(_common_subsequence(answer, label), len(answer), len(label))


def _f1(common: int, answer: int, label: int) -> float:
    return 2 * common / (answer + label) if common else 0.0


def _common_subsequence(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        previous = 0
        for number, other_word in enumerate(other, start=1):
            longest = previous + 1 if word == other_word else max(lengths[number], lengths[number - 1])
            previous, lengths[number] = lengths[number], longest
    return lengths[-1]


METRICS: dict[str, Callable[[Pairs], dict[str, float]]] = {"acc": accuracy, "rouge": rouge}
