"""What rewards in ms-swift's style are called with, and math-verify in their threads."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import math_verify.grader
import math_verify.parser
import math_verify.utils
import pytest
from math_verify import parse, verify
from math_verify.errors import TimeoutException
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards import ORM, AsyncORM
from megaswift.tasks.rewards.load import load_rewards
from megaswift.tasks.rewards.math_verify_threads import ThreadTimeLimit, allow_time_limits_in_threads
from megaswift.tasks.rewards.reward_fn import Reward, RewardSample, TrainerState
from megaswift.tasks.rewards.scoring import score
from megaswift.tasks.system.plugins import load_plugins

SWALLOWS = r"""
from concurrent.futures import ThreadPoolExecutor
from swift.rewards import ORM, orms

class Swallows(ORM):
    def __call__(self, completions, solution, **kwargs):
        from math_verify import parse, verify

        def check(pair):
            try:
                return float(verify(parse(pair[1]), parse(pair[0])))
            except Exception:
                return 0.0

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(check, zip(completions, solution)))

orms["swallows"] = Swallows
"""


@pytest.fixture
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give math-verify its own time limits, also after an earlier test has loaded plugins."""
    for module in (math_verify.parser, math_verify.grader):
        monkeypatch.setattr(module, "timeout", math_verify.utils.timeout)


def samples() -> list[RewardSample]:
    """Return two completions of one prompt and one of another, whose row lacks a column."""
    return [
        RewardSample(
            f"row {row}",
            "?",
            [{"role": "user", "content": "?"}],
            text,
            [row],
            {"solution": solution},
            info={"num_turns": row},
            finish_reason=finish,
            prompt_id=f"p{row}",
            request_id=f"p{row}-{number}",
        )
        for row, number, text, solution, finish in (
            (1, 0, "a", "A", "stop"),
            (1, 1, "b", "A", "length"),
            (2, 0, "c", None, "stop"),
        )
    ]


def test_keywords_are_ms_swift_s():
    calls = []

    class Records(ORM):
        def __call__(self, texts, solution, **kwargs):  # positional, so the name is free
            calls.append((texts, solution, kwargs))
            return [0.0] * len(texts)

    reward = Reward("records", Records())
    assert reward.required_columns == ["solution"]
    reward.trainer_state = TrainerState(3, 10)
    score([reward], [1], samples(), 10)
    ((texts, solution, kwargs),) = calls
    assert (texts, solution) == (["a", "b", "c"], ["A", "A", None])
    assert kwargs["trainer_state"].global_step == 3
    assert kwargs["trainer_state"].max_steps == 10
    assert kwargs["prompt_id"] == ["p1", "p1", "p2"]
    assert kwargs["is_truncated"] == [False, True, False]
    assert kwargs["finish_reason"] == ["stop", "length", "stop"]
    assert kwargs["messages"][1] == [{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}]
    assert kwargs["rollout_infos"][2] == {"num_turns": 2}
    trajectory = kwargs["trajectory_inputs"][kwargs["request_id"][1]]
    assert [row["messages"][-1]["content"] for row in trajectory] == ["b"]
    assert trajectory[-1]["solution"] == "A"


def test_async_rewards_are_awaited_together():
    """Each waits for the other, for which both must run."""
    arrived = {name: threading.Event() for name in "ab"}

    class Waits(AsyncORM):
        def __init__(self, name, other):
            self.name, self.other = name, other

        async def __call__(self, completions, **kwargs):
            arrived[self.name].set()
            while not arrived[self.other].is_set():
                await asyncio.sleep(0.01)
            return [1.0] * len(completions)

    rewards = [Reward("a", Waits("a", "b")), Reward("b", Waits("b", "a"))]
    assert score(rewards, [1, 1], samples(), 20).rewards.tolist() == [2, 2, 2]


def test_math_verify_in_worker_threads(tmp_path, own_limits):
    """Without the replacement this plugin scores every answer 0, since it catches math-verify's ValueError."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="threaded environment"):
        pool.submit(parse, "$1/2$").result()
    (tmp_path / "plugin.py").write_text(SWALLOWS)
    load_plugins([str(tmp_path / "plugin.py")])
    options = RewardOptions(reward_funcs=["swallows"])
    asked = [
        RewardSample(f"row {i}", "", [], text, [], {"solution": "$1/2$"})
        for i, text in enumerate(("$0.5$", r"\boxed{\frac{2}{4}}", "$2$"))
    ]
    assert score(load_rewards(options, options), [1], asked, 60).rewards.tolist() == [1, 1, 0]
    assert verify(parse("$1/2$"), parse("$0.5$"))  # the main thread has its own limit


def test_a_time_limit_ends_a_call_in_a_thread(own_limits):
    def forever() -> None:
        while True:
            time.sleep(0.001)

    allow_time_limits_in_threads()
    allow_time_limits_in_threads()  # does not replace its own
    limit = math_verify.parser.timeout
    assert isinstance(limit, ThreadTimeLimit)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeoutException):
            pool.submit(limit(0.1)(forever)).result(timeout=20)
        assert pool.submit(limit(0.1)(sum), [1, 2]).result() == 3
        assert pool.submit(lambda: time.sleep(0.3) or 5).result() == 5  # no exception comes late
        assert pool.submit(limit(None)(sum), [1, 2]).result() == 3
