"""Recipes of `swift prepare`: rows of public datasets in the columns of verl's and siiRL's data.

A row becomes `data_source`, `prompt` (a list of messages), `ability`, `reward_model` (`style`, `ground_truth`) and
`extra_info`. Prompts and columns are those of verl's scripts for GSM8K and MATH, and of siiRL's for DeepScaleR, so that
results can be compared.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..json_types import JsonObject

GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<short>[^{\s$]))")


@dataclass(frozen=True)
class Problem:
    """Parts of a row that a recipe takes.

    extra_info: further columns of the result's `extra_info`
    """

    question: str
    ground_truth: str
    extra_info: JsonObject


@dataclass(frozen=True)
class Recipe:
    """Conversion of a public dataset into rows for training with rewards.

    dataset: hub id on Hugging Face, which is also the result's `data_source`
    subset: the hub's subset; "": the dataset has none
    instruction: text behind each question
    """

    dataset: str
    instruction: str
    problem: Callable[[JsonObject], Problem]
    subset: str = ""
    test_share: float | None = None  # share of rows for the test split; None: the dataset has both splits
    seed: int = 0

    def __call__(self, row: JsonObject, split: str, index: int) -> JsonObject:
        """Return a row in verl's columns. Raises ValueError or KeyError for a row of another form."""
        problem = self.problem(row)
        return {
            "data_source": self.dataset,
            "prompt": [{"role": "user", "content": f"{problem.question} {self.instruction}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
            "extra_info": {"split": split, "index": index, **problem.extra_info},
        }


def gsm8k_problem(row: JsonObject) -> Problem:
    """Return the problem of a row whose answer ends in `#### 1,234`; the ground truth has no commas."""
    answers = GSM8K_ANSWER.findall(row["answer"])
    if not answers:
        raise ValueError("its answer has no number behind ####")
    extra_info = {"answer": row["answer"], "question": row["question"]}
    return Problem(row["question"], answers[0].replace(",", ""), extra_info)


def math_problem(row: JsonObject) -> Problem:
    r"""Return the problem of a row whose solution has its result in the last \boxed."""
    return Problem(row["problem"], last_boxed(row["solution"]), {})


def deepscaler_problem(row: JsonObject) -> Problem:
    extra_info = {"answer": row["solution"], "question": row["problem"]}
    return Problem(row["problem"], str(row["answer"]), extra_info)


def last_boxed(text: str) -> str:
    r"""Return the content of the last \boxed{...} or \fbox{...}, braces within it included.

    Raises ValueError where there is none, or where it is not closed.
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        raise ValueError(r"its solution has no \boxed")
    box = boxes[-1]
    if box["short"]:
        return box["short"]
    depth = 1
    for end in range(box.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[box.end() : end]
    raise ValueError(r"its last \boxed is not closed")


RECIPES = {
    "gsm8k": Recipe(
        "openai/gsm8k",
        'Let\'s think step by step and output the final answer after "####".',
        gsm8k_problem,
        subset="main",
    ),
    "math": Recipe(
        "DigitalLearningGmbH/MATH-lighteval",
        r"Let's think step by step and output the final answer within \boxed{}.",
        math_problem,
    ),
    "deepscaler": Recipe(
        "agentica-org/DeepScaleR-Preview-Dataset",
        r"Let's think step by step and output the final within \boxed{}.",
        deepscaler_problem,
        test_share=0.1,
        seed=15,
    ),
}
