"""The rewards that are built in, beside TRL's, the papers' formulas, and values by hand."""

import random
import re
import time

import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.functions import Accuracy, Cosine, Repetition, SoftOverlong, thinks_then_answers
from megaswift.tasks.rewards.math_verify_pool import MathVerifyPool


@pytest.fixture(scope="module")
def accuracy() -> Accuracy:
    return Accuracy()


def as_trl(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


RIGHT = [
    ("22", "22"),
    ("22", r"\boxed{22}"),
    (22, "It is 22.0."),
    ("22", "7 + 15 = 22"),
    ("1,234", "I count 1234 of them"),
    ("-3.5", r"$-\frac{7}{2}$"),
    (r"\frac{1}{3}", r"\boxed{1/3}"),
    (r"$x^2+2x+1$", r"\boxed{(x+1)^2}"),
    ("#### 72", "<think>7 or 8, so 9</think><answer>72</answer>"),
    ("<answer>72</answer>", r"<answer>\boxed{72}</answer>"),
    ("5", "<answer>4</answer> no: <answer>5</answer>"),
]
WRONG = [
    ("22", "23"),
    ("22", ""),
    ("22", "twenty-two"),
    ("22", r"22 it is not, but \boxed{21}"),
    (r"\frac{1}{3}", "0.33"),
    ("72", "<think>72</think><answer>71</answer>"),
    ("22", r"\boxed{\frac{}{"),
]
UNREADABLE = [("Paris", "Paris"), ("", "1"), (None, "1")]


def test_accuracy(accuracy):
    cases = [*RIGHT, *WRONG, *UNREADABLE]
    wanted = [1.0] * len(RIGHT) + [0.0] * len(WRONG) + [None] * len(UNREADABLE)
    found = accuracy([text for _, text in cases], [solution for solution, _ in cases])
    assert dict(zip(map(str, cases), found, strict=True)) == dict(zip(map(str, cases), wanted, strict=True))


def test_accuracy_is_trls_where_answers_are_boxed(accuracy):
    """Others are wrong in TRL, save for LaTeX after words such as `the answer is`."""
    from trl.rewards import accuracy_reward

    draw = random.Random(1)
    texts, solutions = [], []
    for _ in range(60):
        a, b = draw.randint(-20, 20), draw.randint(1, 9)
        form = draw.choice([r"\boxed{%s}", r"so $3 \neq 5$ and thus \boxed{%s}, QED"])
        texts.append(
            form % draw.choice([rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"{a / b:.3f}", str(a), rf"\sqrt{{{b}}}"])
        )
        solutions.append(draw.choice([rf"$\frac{{{a}}}{{{b}}}$", f"{a}/{b}", str(a), "none"]))
    theirs = accuracy_reward(as_trl(texts), solutions)
    assert {0.0, 1.0, None} == set(theirs)
    assert accuracy(texts, solutions) == theirs


@pytest.mark.slow
def test_answers_that_cannot_be_computed_are_wrong_and_cost_seconds():
    """The first holds the lock of the Python that compares it, for good."""
    start = time.monotonic()
    pool = MathVerifyPool()
    assert pool([("22", r"\boxed{9^{9^{9^{9}}}}"), ("22", "22")]) == [False, True]
    assert pool([("22", "22")]) == [True]  # by the process that took the place of that one
    assert time.monotonic() - start < 120


def test_several_checkers_keep_the_order():
    pool = MathVerifyPool()
    pool._max_workers = 2
    pairs = [(str(i), str(i if i % 3 else i + 1)) for i in range(50)]
    assert pool(pairs) == [bool(i % 3) for i in range(50)]
    assert len(pool._idle) == 2


def test_checkers_end_with_their_run():
    import os
    import subprocess
    import sys

    code = """
from megaswift.tasks.rewards.math_verify_pool import MathVerifyPool
pool = MathVerifyPool()
pool([("1", "1")])
print(pool._idle[0]._process.pid, flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.returncode == -9
    for _ in range(600):
        try:
            os.kill(int(run.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a checker has outlived the process that it checks for")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1),
        ("<think></think><answer></answer>", 1),
        ("<think>a</think><answer>b</answer>\n", 0),
        (" <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think>b", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("", 0),
    ],
)
def test_format(text, wanted):
    assert thinks_then_answers([text]) == [wanted]


def test_format_equals_a_regular_expression_in_linear_time():
    dice = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "a"]
    for _ in range(20_000):
        text = "".join(dice.choices(parts, k=dice.randint(1, 7)))
        text = f"<think>{text}</answer>" if dice.random() < 0.5 else text
        wanted = re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL) is not None
        assert thinks_then_answers([text]) == [wanted], text
    began = time.process_time()
    assert thinks_then_answers(["<think>" + "</think><answer>" * 100_000]) == [0]
    assert thinks_then_answers(["<think>" + "</think> " * 100_000]) == [0]
    assert time.process_time() - began < 2  # a backtracking expression takes minutes


LENGTHS = [0, 1, 10, 49, 50, 51, 75, 99, 100, 101, 250]


def test_cosine_is_trls():
    """Compare with TRL's reward at this command's defaults: in both a short wrong answer is worst."""
    from trl.rewards import get_cosine_scaled_reward

    theirs = get_cosine_scaled_reward(
        100, min_value_wrong=-0.5, max_value_wrong=0.0, min_value_correct=0.5, max_value_correct=1.0
    )
    texts = [rf"\boxed{{{answer}}}" for answer in (3, 4, 3) for _ in LENGTHS]
    solutions = [solution for solution in ("3", "3", "none") for _ in LENGTHS]
    ids = [[5] * length for length in LENGTHS] * 3
    wanted = theirs(completions=as_trl(texts), solution=solutions, completion_ids=ids)
    ours = Cosine(RewardOptions(cosine_max_len=100))(texts, ids, solutions)
    assert ours[-1] is None
    assert ours == pytest.approx(wanted, abs=1e-12)


def test_cosine_by_hand():
    ours = Cosine(
        RewardOptions(
            cosine_min_len_value_wrong=-7,
            cosine_max_len_value_wrong=-1,
            cosine_min_len_value_correct=10,
            cosine_max_len_value_correct=2,
            cosine_max_len=90,
        )
    )
    ids = [[0] * length for length in (0, 30, 45, 60, 90)]
    right, wrong = ours(["3"] * 5, ids, ["3"] * 5), ours(["4"] * 5, ids, ["3"] * 5)
    assert right == pytest.approx([10, 8, 6, 4, 2])  # cos 60 degrees is a half
    assert wrong == pytest.approx([-7, -5.5, -4, -2.5, -1])


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_repetition_is_trls(n):
    from trl.rewards import get_repetition_penalty_reward

    draw = random.Random(n)
    ids = [[draw.randint(0, 1) for _ in range(length)] for length in (0, 1, 2, 3, 4, 5, 20, 100)]
    ours = Repetition(RewardOptions(repetition_n_grams=n, repetition_max_penalty=-1.7))(ids)
    assert min(ours) < -0.2
    assert ours == pytest.approx(get_repetition_penalty_reward(n, -1.7)(ids), abs=1e-12)


def test_repetition_by_hand():
    ours = Repetition(RewardOptions(repetition_n_grams=2, repetition_max_penalty=-1))
    assert ours([[1, 2, 3, 4], [5, 5, 5, 5, 5], [1]]) == [0, -0.75, 0]  # 3 of 3; 1 of 4; none


def test_soft_overlong_is_trls_and_dapos():
    from trl.rewards import get_soft_overlong_punishment

    ids = [[0] * length for length in LENGTHS]
    ours = SoftOverlong(RewardOptions(soft_max_length=100, soft_cache_length=50))(ids)
    assert ours == pytest.approx(get_soft_overlong_punishment(100, 50)(ids), abs=1e-12)
    # DAPO's equation 13
    formula = [0 if y <= 50 else (50 - y) / 50 if y <= 100 else -1 for y in LENGTHS]
    assert ours == pytest.approx(formula, abs=1e-12)
