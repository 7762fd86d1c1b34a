"""Loss weights of the parts of an answer: `--loss_scale`, with the presets of ms-swift.

A value is one of STRATEGIES (which messages are trained on), presets (which parts of their answers count more or less),
or both, joined by `+`: `last_round+hermes+ignore_empty_think`. Presets are applied one after another, each to the parts
that the previous one made, and a part's weights are multiplied.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

STRATEGIES = ("default", "last_round", "all")


class Part(NamedTuple):
    """Part of an answer, with its loss weight."""

    text: str
    weight: float


@dataclass(frozen=True)
class WeightPreset:
    """Rules that divide an answer into parts and weigh them. Text to which no rule applies has the weight 1.

    patterns: regular expression -> weight of what it matches
    markers: word -> weight of the word, and of the text that follows it up to the next word
    queries: words of the question that set the weight of the whole answer
    """

    patterns: Mapping[str, float] = field(default_factory=dict)
    markers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    queries: Mapping[str, float] = field(default_factory=dict)

    def parts(self, text: str, query: str) -> list[Part]:
        for words, weight in self.queries.items():
            if words in query:
                return [Part(text, weight)]
        return self._by_markers(text) if self.markers else self._by_patterns(text)

    def _by_patterns(self, text: str) -> list[Part]:
        parts, position, weights = [], 0, list(self.patterns.values())
        for match in re.finditer("|".join(f"({pattern})" for pattern in self.patterns), text, re.DOTALL):
            parts += [
                Part(text[position : match.start()], 1.0),
                Part(match.group(), weights[(match.lastindex or 1) - 1]),
            ]
            position = match.end()
        return [part for part in (*parts, Part(text[position:], 1.0)) if part.text]

    def _by_markers(self, text: str) -> list[Part]:
        first, *pairs = re.split(f"({'|'.join(map(re.escape, self.markers))})", text)
        parts = [Part(first, 1.0)]
        for marker, content in zip(pairs[::2], pairs[1::2], strict=True):
            parts += [Part(marker, self.markers[marker][0]), Part(content, self.markers[marker][1])]
        return [part for part in parts if part.text]


def _markers(heavy: Sequence[str], light: Sequence[str], weight: float) -> dict[str, tuple[float, float]]:
    return dict.fromkeys(heavy, (weight, weight)) | dict.fromkeys(light, (1.0, 1.0))


_THOUGHTS = ("Thought:", "Final Answer:")
_NO_BUDGET = "The current thinking budget is 0, so I will directly start answering the question."  # of Seed-OSS
_ARGUMENTS = (
    "Name:", "Action:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:", "Action Input:",
)  # fmt: skip
_QUESTIONS = (
    "What is the tool you want to use", "What are the required parameter names", "What is the value of",
)  # fmt: skip

PRESETS = {
    # The second and third patterns are for generation prompts that open the thought themselves.
    "ignore_empty_think": WeightPreset(
        patterns={
            r"^\s*<think>\s*</think>\s*": 0.0,
            r"^\s*</think>\s*": 0.0,
            r"^\s*</mm:think>\s*": 0.0,
            r"^<\|channel>thought\n<channel\|>": 0.0,
            f"^<seed:think><seed:cot_budget_reflect>{re.escape(_NO_BUDGET)}</seed:cot_budget_reflect>"
            r"\n</seed:think>\s*": 0.0,
        }
    ),
    "ignore_think_prefix": WeightPreset(patterns={r"^<think>\n?": 0.0}),
    "hermes": WeightPreset(patterns={"<tool_call>.+?</tool_call>": 2.0}),
    "react": WeightPreset(
        markers=_markers(("Action:", "Action Input:"), _THOUGHTS, 2.0) | {"Observation:": (2.0, 0.0)}
    ),
    "alpha_umi": WeightPreset(
        markers=_markers(("Action:", "Action Input:", "Next:"), _THOUGHTS, 2.0) | {"Observation:": (2.0, 0.0)}
    ),
    "qwen": WeightPreset(
        markers={
            "✿FUNCTION✿:": (2.0, 2.0),
            "✿ARGS✿:": (2.0, 2.0),
            "✿RETURN✿:": (1.0, 1.0),
            "✿RESULT✿:": (2.0, 0.0),
        }
    ),
    "agentflan": WeightPreset(
        markers=dict.fromkeys(_ARGUMENTS, (1.0, 3.0))
        | dict.fromkeys(_THOUGHTS, (1.0, 1.0))
        | {"Observation:": (2.0, 0.0)},
        queries=dict.fromkeys(_QUESTIONS, 3.0),
    ),
}


@dataclass(frozen=True)
class LossScale:
    """A value of `--loss_scale`."""

    strategy: str
    presets: tuple[WeightPreset, ...]

    @classmethod
    def parse(cls, value: str) -> "LossScale":
        """Parse a value. Raises ValueError with the flag and what may be written."""
        names = value.split("+")
        strategy = names.pop(0) if names[0] in STRATEGIES else "default"
        if unknown := [name for name in names if name not in PRESETS]:
            raise ValueError(
                f"--loss_scale {value}: {unknown[0]!r} is unknown. Set one of {', '.join(STRATEGIES)}, presets "
                f"({', '.join(PRESETS)}), or both, as in last_round+hermes."
            )
        return cls(strategy, tuple(PRESETS[name] for name in names))

    def parts(self, answer: str, query: str) -> list[Part]:
        """Return an answer in parts with their weights. The parts together are the answer."""
        parts = [Part(answer, 1.0)]
        for preset in self.presets:
            parts = [
                Part(smaller.text, smaller.weight * part.weight)
                for part in parts
                for smaller in preset.parts(part.text, query)
            ]
        return parts
