"""Rule of the Countdown task: an equation of given numbers that equals a target."""

import ast
import operator
import re
from collections.abc import Sequence

from ....templates.formats.columns import parsed_object
from .sample import RuleSample

ANSWER = re.compile(r"<answer>(.*?)</answer>")
ALLOWED = re.compile(r"[\d+\-*/().\s]+")
TOLERANCE = 1e-5
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def score_countdown(samples: Sequence[RuleSample], format_score: float) -> list[float | None]:
    """Return 1 for an equation that uses each number once and equals the target, 0 without an equation.

    The equation is in the last <answer> of the completion's last line. The row's truth is an object with `target` and
    `numbers`; without them there is no score.
    format_score: score of another equation
    Source: TinyZero, https://github.com/Jiayi-Pan/TinyZero verl/utils/reward_score/countdown.py
    """
    return [_score(sample, format_score) for sample in samples]


def _score(sample: RuleSample, format_score: float) -> float | None:
    task = parsed_object(sample.truth)
    if task.get("target") is None or task.get("numbers") is None:
        return None
    equations = ANSWER.findall(sample.completion.split("\n")[-1])
    if not equations:
        return 0.0
    numbers = sorted(int(number) for number in re.findall(r"\d{1,18}", equations[-1]))
    if numbers != sorted(int(number) for number in task["numbers"]):
        return format_score
    value = value_of(equations[-1].strip())
    is_right = value is not None and abs(value - float(task["target"])) < TOLERANCE
    return 1.0 if is_right else format_score


def value_of(equation: str) -> float | None:
    """Return the value of a sum of numbers with + - * / and brackets; None for anything else."""
    if not ALLOWED.fullmatch(equation):
        return None
    try:
        return _value(ast.parse(equation, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.UnaryOp() if type(node.op) in SIGNS:
            return SIGNS[type(node.op)](_value(node.operand))
    raise ValueError(ast.unparse(node))
