r"""Rows of `swift prepare` beside what verl's and siiRL's scripts write, and the last \boxed by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.templates.formats.recipes import RECIPES, last_boxed
from megaswift.templates.formats.schemas import to_prompt


def test_gsm8k():
    answer = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
    assert RECIPES["gsm8k"]({"question": "How many?", "answer": answer}, "train", 5) == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How many? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1072"},
        "extra_info": {"split": "train", "index": 5, "answer": answer, "question": "How many?"},
    }


def test_math():
    solution = r"First $\boxed{1}$, then $\boxed{\frac{1}{2}}$."
    row = {"problem": "What is it?", "level": "Level 5", "type": "Algebra", "solution": solution}
    assert RECIPES["math"](row, "test", 0) == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": "What is it? Let's think step by step and output the final answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
        "extra_info": {"split": "test", "index": 0},
    }


def test_deepscaler():
    row = {"problem": "What is it?", "answer": "-2", "solution": "It is -2."}
    assert RECIPES["deepscaler"](row, "train", 1) == {
        "data_source": "agentica-org/DeepScaleR-Preview-Dataset",
        "prompt": [
            {"role": "user", "content": "What is it? Let's think step by step and output the final within \\boxed{}."}
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "-2"},
        "extra_info": {"split": "train", "index": 1, "answer": "It is -2.", "question": "What is it?"},
    }


def test_prompts_are_conversations():
    row = RECIPES["math"]({"problem": "What?", "solution": r"\boxed{1}"}, "train", 0)
    assert to_prompt(row).messages == row["prompt"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed 3$ is", "3"),
        (r"\boxed3", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{a} and \boxed{b}.", "b"),
        (r"\boxed{\text{if } x \in \{1, 2\}}", r"\text{if } x \in \{1, 2\}"),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


balanced = st.recursive(
    st.text(st.sampled_from("x1 +^"), max_size=4),
    lambda inner: st.tuples(inner, inner, inner).map(lambda parts: f"{parts[0]}{{{parts[1]}}}{parts[2]}"),
    max_leaves=6,
)


@given(balanced, balanced)
def test_braces_within_a_box(content, tail):
    assert last_boxed(rf"so \boxed{{0}} then \boxed{{{content}}} {tail}") == content


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("math", {"problem": "p", "solution": "3"}, r"no \\boxed"),
        ("math", {"problem": "p", "solution": r"\boxed{3"}, "not closed"),
        ("gsm8k", {"question": "q", "answer": "72"}, "no number behind ####"),
    ],
)
def test_rows_of_another_form(name, row, problem):
    with pytest.raises(ValueError, match=problem):
        RECIPES[name](row, "train", 0)
    with pytest.raises(KeyError):
        RECIPES[name]({}, "train", 0)
