"""Scores of final answers: facts of verl's and ROLL's rules, and GSM8K's form by brute force."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.tasks.rewards.rules.answers import MathRule, last_flat_box, score_choice, score_gsm8k
from megaswift.tasks.rewards.rules.sample import RuleSample


def sample(completion: str, truth: object = None, **columns: object) -> RuleSample:
    return RuleSample(completion, "question", {"ground_truth": truth, **columns})


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ("6 x 12 = 72\n#### 72", "72", 1),
        ("#### 72", 72, 1),
        ("#### 1,200", "1200", 1),
        ("#### 1200", "1,200", 1),
        ("#### -3", "-3", 1),
        ("#### 2.50", "2.50", 1),
        ("#### 5\nno, it is\n#### 72", "72", 1),  # the last one counts
        ("#### 72", "48 + 24 = 72 eggs\n#### 72", 1),  # GSM8K's own column `answer`
        ("<think>#### 1</think>#### 72", "72", 1),
        ("72", "72", 0),
        ("The answer is 72.", "72", 0),
        (r"\boxed{72}", "72", 0),
        ("####72", "72", 0),
        ("### 72", "72", 0),
        ("#### 72.", "72", 0),  # strict: not the same digits
        ("#### 72.0", "72", 0),
        ("#### $72", "72", 0),
        ("#### seventy-two", "72", 0),
        ("#### 72\n#### 5", "72", 0),
        ("", "72", 0),
        ("#### 72", None, None),
    ],
)
def test_gsm8k(completion, truth, score):
    assert score_gsm8k([sample(completion, truth)]) == [score]


@given(
    st.lists(st.text(st.sampled_from("#### 17,.-\n"), max_size=12), max_size=4).map("#### ".join),
    st.integers(-99, 9999),
)
def test_gsm8k_by_brute_force(text, truth):
    """Each place of `#### ` is looked at by hand; the last one with a number decides."""
    answer, position = None, 0
    while (position := text.find("#### ", position)) >= 0:
        end = start = position + 5
        end += text[end : end + 1] == "-"
        digits = end
        while end < len(text) and text[end] in "0123456789.,":
            end += 1
        if end > digits:
            answer, position = text[start:end], end
        else:
            position += 1
    assert score_gsm8k([sample(text, truth)]) == [float(answer is not None and answer.replace(",", "") == str(truth))]


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{(B) Paris}", "B", 1.0),
        (r"\boxed{A} or rather \boxed{B}", "B", 1.0),
        ("The answer is B", "B", 0.5),
        ("the Answer Is: (B)", "B. Paris", 0.5),
        ("A? No. So the answer is B.", "B", 0.5),
        ("B", "B", 0.5),
        (r"\boxed{A}", "B", -0.5),
        (r"The answer is B: \boxed{A}", "B", -0.5),
        (r"\boxed{b}", "B", -0.5),  # a small letter is none
        ("The answer is A", "B", -1.0),
        ("", "B", -1.0),
        (r"<think>\boxed{A}</think>\boxed{B}", "B", 1.0),
        (r"<think>\boxed{B}</think> I do not know", "B", -1.0),  # thoughts do not count: the first capital is I
        (r"\boxed{B}", None, None),
        (r"\boxed{B}", " ", None),
    ],
)
def test_multiple_choice(completion, truth, score):
    assert score_choice([sample(completion, truth)]) == [score]


@given(st.lists(st.sampled_from(["\\boxed{", "}", "A", "{", "x"]), max_size=12).map("".join))
def test_the_last_box_by_a_regular_expression(text):
    boxes = re.findall(r"\\boxed\{([^}]+)\}", text)
    assert last_flat_box(text) == (boxes[-1] if boxes else None)


def test_boxes_that_are_not_closed_take_linear_time():
    start = time.process_time()
    assert score_choice([sample("\\boxed{" * 100_000, "B")]) == [-1.0]
    assert time.process_time() - start < 5


def test_mathematics():
    cases = [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"<think>\boxed{7}</think>\boxed{8}", "8", 1.0),
        ("Answer: 34", "34", 1.0),
        (r"\boxed{34}", 34, 1.0),
        (r"\boxed{34}", ["34"], 1.0),
        (r"\boxed{35}", "34", 0.0),
        (r"<think>\boxed{8}</think>\boxed{7}", "8", 0.0),
        ("", "34", 0.0),
        (r"\boxed{34}", None, None),
        (r"\boxed{3x^2 - 5}", "3x^2-5", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{[0, 1)}", "[0,1)", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{\text{Briana}}", r"\text{Evelyn}", 0.0),
        (r"\boxed{32}", r"\$32", 1.0),
        (r"\boxed{72}", "so 72 eggs\n#### 72", 1.0),
        (r"\boxed{72}", r"so it is $\boxed{72}$", 1.0),
        (r"\boxed{72}", "", None),  # math-verify cannot read it
    ]
    samples = [sample(text, truth) for text, truth, _ in cases]
    assert MathRule()(samples) == [score for _, _, score in cases]


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": "1"}, "ground_truth": "2", "solution": "3"}, "1"),
        ({"reward_model": '{"ground_truth": "1"}', "solution": "3"}, "1"),  # CSV
        ({"reward_model": {"style": "rule", "ground_truth": None}, "ground_truth": "2"}, "2"),
        ({"reward_model": "rule", "solution": "3"}, "3"),
        ({"ground_truth": "2", "solution": "3"}, "2"),
        ({"ground_truth": 0}, 0),
        ({"answer": "4"}, None),
    ],
)
def test_where_the_truth_is(columns, truth):
    assert RuleSample("", "", columns).truth == truth


def test_the_answer_is_behind_the_last_thought():
    assert RuleSample("<think>a</think>b</think>\n\nc", "", {}).answer == "c"
    assert RuleSample("<think>endless", "", {}).answer == "<think>endless"
