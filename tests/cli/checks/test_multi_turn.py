"""Unusable flags of multi-turn episodes."""

from pathlib import Path

import pytest
from megaswift.cli.flags import UsageError
from megaswift.tasks.multi_turn.registry import multi_turns, registered_tools

from tests.cli.checks.checking import check
from tests.tasks.multi_turn.conftest import own_registry, own_turns  # noqa: F401  (fixtures)

PLUGIN = """
from swift.rollout.gym_env import Env, envs
from megaswift.tasks.multi_turn import MultiTurnScheduler, multi_turns, scheduler, tool


@scheduler("again")
def again(turn):
    return None


class Whole(MultiTurnScheduler):
    async def run(self, infer_request, request_config):
        ...


class Stepping(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        return {"infer_request": infer_request}


class Lakes(Env):
    pass


multi_turns["whole"] = Whole
envs["lakes"] = Lakes
multi_turns["stepping"] = Stepping
"""
BARE = """
from megaswift.tasks.multi_turn import tool


@tool
def bare(x):
    return x
"""
SWIFT = "from swift.rollout import multi_turn_schedulers\n"


@pytest.fixture
def words(tmp_path: Path) -> str:
    for name, text in (("plugin", PLUGIN), ("bare", BARE), ("swift", SWIFT)):
        (tmp_path / f"{name}.py").write_text(text)
    return f"--reward_funcs accuracy --global_batch_size 8 --external_plugins {tmp_path}/"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "plugin.py --multi_turn_scheduler agian",
            "--multi_turn_scheduler agian: no such scheduler. The near",
        ),
        (
            "plugin.py --max_turns 3",
            "--max_turns 3: only for episodes of several turns. Set --multi_turn_scheduler, or",
        ),
        ("plugin.py --turn_timeout 3", "--turn_timeout 3.0: only for episodes of several turns. Set"),
        ("plugin.py --multi_turn_scheduler again --max_turns 0", "--max_turns 0: must be above 0."),
        ("plugin.py --multi_turn_scheduler again --turn_timeout 0", "--turn_timeout 0.0: must be above 0."),
        (
            "plugin.py --multi_turn_scheduler tools",
            "--multi_turn_scheduler tools: no tool is registered. Register functions",
        ),
        ("bare.py --multi_turn_scheduler tools", "@tool bare: "),
        (
            "plugin.py --multi_turn_scheduler whole",
            "--multi_turn_scheduler whole: its run() would never be called, only step(),",
        ),
        (
            "swift.py",
            "swift.rollout.multi_turn_schedulers does not exist here. swift.rollout has Env, envs, gym_env,",
        ),
        ("plugin.py --gym_env lake", "--gym_env lake: only for episodes of several turns. Set --multi_turn_sch"),
        (
            "plugin.py --multi_turn_scheduler stepping --gym_env lake",
            "--gym_env lake: --multi_turn_scheduler stepping has no environments. Set gym_scheduler",
        ),
        (
            "plugin.py --multi_turn_scheduler gym_scheduler --gym_env lake",
            "--gym_env lake: no such environment. The nearest is lakes. Use one of ",
        ),
        ("plugin.py --completion_length_limit_scope per_round", "--max_completion_length bounds the episode."),
    ],
)
def test_refusals(more: str, message: str, words: str, dense: Path) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, words + more)
    assert message in str(error.value)


def test_what_is_accepted(words: str, dense: Path) -> None:
    more = "plugin.py --multi_turn_scheduler stepping --max_turns 3 --turn_timeout 5"
    options, _ = check(dense, f"{words}{more} --completion_length_limit_scope total --use_gym_env false")
    assert (options.multi_turn.max_turns, options.multi_turn.turn_timeout) == (3, 5)
    assert set(multi_turns) == {"gym_scheduler", "again", "whole", "stepping"}
    assert not registered_tools


def test_distillation(words: str, dense: Path) -> None:
    plugin = words.partition("--external_plugins ")[2]
    flags = f"--teacher_model t --external_plugins {plugin}plugin.py --multi_turn_scheduler stepping"
    with pytest.raises(UsageError, match="--multi_turn_scheduler stepping: with --lmbda 0 the student generates noth"):
        check(dense, f"{flags} --lmbda 0", kind="gkd")
    with pytest.raises(UsageError, match=r"--multi_turn_scheduler stepping: a teacher's completions \(--seq_kd\) have"):
        check(dense, f"{flags} --seq_kd true", kind="gkd")
    with pytest.raises(UsageError, match="--multi_turn_scheduler other: no such scheduler"):
        check(dense, flags.replace("stepping", "other"), kind="gkd")
