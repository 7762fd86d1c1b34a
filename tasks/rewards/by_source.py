"""Reward that chooses a rule by the source of a row: `--reward_funcs by_source`."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

from ...templates.json_types import JsonObject
from ..options.rewards import RewardOptions
from ..system.plugins import DaemonExecutor
from .registry import reward
from .reward_fn import BUILT_IN, RewardError
from .rules.answers import MathRule, score_choice, score_gsm8k
from .rules.code import CodeRule
from .rules.countdown import score_countdown
from .rules.ifeval import score_ifeval
from .rules.judge import JudgeRule, base_url, judge_prompt
from .rules.sample import Rule, RuleSample

SOURCE_COLUMNS = ("data_source", "tag")
TRUTH_COLUMNS = ("reward_model", "ground_truth", "solution", "test_cases", "instruction_id_list")


def leave_unscored(samples: Sequence[RuleSample]) -> list[None]:
    """Return no score, for sources that other rewards score."""
    return [None] * len(samples)


# Rules by name: each makes the function that scores, from the options.
RULES: dict[str, Callable[[RewardOptions], Rule]] = {
    "gsm8k": lambda args: score_gsm8k,
    "math": lambda args: MathRule(),
    "crossthinkqa": lambda args: score_choice,
    "countdown": lambda args: partial(score_countdown, format_score=args.countdown_format_score),
    "ifeval": lambda args: score_ifeval,
    "code": partial(CodeRule, gives_shares=False),
    "code_share": partial(CodeRule, gives_shares=True),
    "judge": JudgeRule,
    "none": lambda args: leave_unscored,
}
# Sources as the data of verl, siiRL and ROLL name them, by patterns, with their rules.
SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "agentica-org/DeepScaleR-Preview-Dataset": "math",
    "math": "math",
    "math_rule": "math",
    "math_dapo*": "math",
    "aime*": "math",
    "AIME*": "math",
    "numina_*": "math",
    "deepmath*": "math",
    "crossthinkqa": "crossthinkqa",
    "countdown": "countdown",
    "ifeval": "ifeval",
    "codecontests": "code_share",
    "apps": "code_share",
    "codeforces": "code_share",
    "taco": "code_share",
    "KodCode": "code",
    "livecodebench*": "code",
    "code_sandbox": "code",
    "RLVR": "judge",
    "llm_judge": "judge",
}


@reward("by_source")
class BySource:
    """Score by the rule for the row's `data_source`, or else its `tag`.

    Rows without a source or without what the rule compares get None. A source without a rule raises RewardError.
    """

    required_alternatives = (SOURCE_COLUMNS, TRUTH_COLUMNS)

    def __init__(self, args: RewardOptions):
        for source, rule in args.source_rules.items():
            if rule not in RULES:
                raise ValueError(f"--source_rules {source}: no such rule as {rule}. Use one of {', '.join(RULES)}")
        if args.judge_server:
            base_url(args.judge_server)
            judge_prompt(args)
        elif "judge" in args.source_rules.values():
            raise ValueError("--source_rules: the rule judge asks a server. Set --judge_server to its URL")
        self._args = args
        self._sources = {**args.source_rules, **{k: rule for k, rule in SOURCES.items() if k not in args.source_rules}}
        self._rules: dict[str, Rule] = {}  # those in use, by name
        self._executor = DaemonExecutor()

    def __call__(
        self, completions: Sequence[str], messages: Sequence[Sequence[JsonObject]], **columns: Sequence[object]
    ) -> list[float | None]:
        """Return the scores. The rules of a batch run at the same time."""
        names = [name for name in columns if name not in BUILT_IN]
        rows = [{name: columns[name][i] for name in names} for i in range(len(completions))]
        groups: dict[str, list[int]] = {}  # rule -> numbers of its completions
        for i, row in enumerate(rows):
            if (source := source_of(row)) is not None:
                groups.setdefault(self._rule_name(source), []).append(i)
        samples = [
            RuleSample(text, _question(conversation), row)
            for text, conversation, row in zip(completions, messages, rows, strict=True)
        ]
        calls = [
            (numbers, self._executor.submit(self._rule(name), [samples[i] for i in numbers]))
            for name, numbers in groups.items()
        ]
        scores: list[float | None] = [None] * len(completions)
        for numbers, call in calls:
            for i, score in zip(numbers, call.result(), strict=True):
                scores[i] = score
        return scores

    def _rule_name(self, source: str) -> str:
        """Return the rule of a source. Raises RewardError if there is none."""
        if rule := rule_of(source, self._sources):
            return rule
        raise RewardError(
            f"--reward_funcs by_source: no rule for the source {source!r}. Name one, as in "
            f"""--source_rules '{{"{source}": "math"}}' (rules: {", ".join(RULES)}). Sources with a rule: """
            f"{', '.join(self._sources)}"
        )

    def _rule(self, name: str) -> Rule:
        if name not in self._rules:
            try:
                self._rules[name] = RULES[name](self._args)
            except ValueError as error:  # a missing option
                raise RewardError(f"--reward_funcs by_source: {error}") from None
        return self._rules[name]


def source_of(row: Mapping[str, object]) -> str | None:
    """Return the source of a row, or None."""
    return next((str(row[name]) for name in SOURCE_COLUMNS if row.get(name) not in (None, "")), None)


def rule_of(source: str, sources: Mapping[str, str]) -> str | None:
    """Return the rule of a source: of its own name, else of the first pattern that matches it."""
    if source in sources:
        return sources[source]
    return next((rule for pattern, rule in sources.items() if fnmatchcase(source, pattern)), None)


def _question(conversation: Sequence[JsonObject]) -> str:
    """Return the last message of the user."""
    texts = [message.get("content") for message in conversation if message.get("role") == "user"]
    return str(texts[-1]) if texts else ""
