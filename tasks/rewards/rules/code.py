"""Rules for programs: the tests of a row run in processes with limits (sandbox.py)."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ....templates.formats.columns import parsed_json
from ....templates.json_types import Json
from ...options.rewards import RewardOptions
from .sample import RuleSample
from .sandbox import ProgramTest, Sandbox

FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py")
SHARE_OF_TIMEOUT = 0.8  # share of --reward_timeout for all programs of a call


class CodeRule:
    """Rule of programs: 1 where all tests of the row pass, else 0; None where no time was left.

    gives_shares: the share of passed tests instead, as verl scores the sources of contests
    """

    def __init__(self, args: RewardOptions, *, gives_shares: bool):
        self._seconds, self._gives_shares = args.reward_timeout * SHARE_OF_TIMEOUT, gives_shares
        self._sandbox = Sandbox()

    def __call__(self, samples: Sequence[RuleSample]) -> list[float | None]:
        """Return the scores; None for a row without tests. Raises ValueError for tests of an unknown form."""
        tests = [list(row_tests(sample)) for sample in samples]
        indices = [i for i, cases in enumerate(tests) if cases]
        verdicts = self._sandbox([(program_of(samples[i].answer), tests[i]) for i in indices], self._seconds)
        scores: list[float | None] = [None] * len(samples)
        for i, results in zip(indices, verdicts, strict=True):
            if results is not None:
                scores[i] = sum(results) / len(results) if self._gives_shares else float(all(results))
        return scores


def program_of(answer: str) -> str:
    """Return the last fenced block of Python, else the last of any language, else the whole answer."""
    blocks = FENCE.findall(answer)
    in_python = [block for language, block in blocks if language.strip().lower() in PYTHON]
    return (in_python or [block for _, block in blocks] or [answer])[-1]


def row_tests(sample: RuleSample) -> Iterator[ProgramTest]:
    """Yield the tests of a row; its columns may hold JSON.

    `test_cases` (ROLL): objects with `stdin` and `expected_stdout`, or with `assert_code`; with `test_case_function`
    the texts are arguments and results of that function. Ground truth (verl, APPS): an object with `inputs`, `outputs`
    and maybe the function `fn_name`, or with `assert_case`; or a list of test cases or of assertions.
    """
    truth: Any = parsed_json(sample.truth)
    cases: Any = parsed_json(sample.columns.get("test_cases"))
    if isinstance(truth, dict) and ("inputs" in truth or "assert_case" in truth):
        yield from _contest_tests(truth)
    elif cases or isinstance(truth, list):
        function = sample.columns.get("test_case_function")
        function = function if isinstance(function, str) and function not in ("", "None") else None
        for case in cases or truth:
            yield _case(case, function)
    elif sample.truth is not None:
        raise ValueError(f"its tests have an unknown form: {str(sample.truth)[:100]!r}")


def _contest_tests(table: dict[str, Any]) -> Iterator[ProgramTest]:
    for source in table.get("assert_case") or ():
        yield ProgramTest(assertions=source)
    inputs, outputs = table.get("inputs") or [], table.get("outputs") or []
    if len(inputs) != len(outputs):
        raise ValueError(f"its tests have {len(inputs)} inputs and {len(outputs)} outputs")
    for text, expected in zip(inputs, outputs, strict=True):
        yield _pair(text, expected, table.get("fn_name"))


def _case(case: Json, function: str | None) -> ProgramTest:
    if isinstance(case, str):
        return ProgramTest(assertions=case)
    if isinstance(case, dict) and case.get("assert_code"):
        return ProgramTest(assertions=case["assert_code"])
    if isinstance(case, dict) and "stdin" in case and ("expected_stdout" in case or "expected_output" in case):
        return _pair(case["stdin"], case.get("expected_stdout", case.get("expected_output")), function)
    raise ValueError(f"a test has an unknown form: {str(case)[:100]!r}")


def _pair(text: Json, expected: Json, function: str | None) -> ProgramTest:
    """Return the test of an input and an output: text of a script, or arguments and result of a function."""
    if not function:
        return ProgramTest(text=_join(text), expected=_join(expected))
    try:
        arguments = [json.loads(line) for line in text.split("\n") if line.strip()] if isinstance(text, str) else text
    except ValueError:
        arguments = None
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of {function} are neither a list nor JSON lines: {str(text)[:100]!r}")
    result = parsed_json(expected)
    return ProgramTest(
        function=function.rpartition(".")[2],
        arguments=tuple(arguments),
        expected=expected if result is None and expected != "null" else result,
    )


def _join(text: Json) -> str:
    """Return a script's text, which may be a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
