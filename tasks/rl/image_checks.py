"""Checks of runs whose prompts have images, before any model is loaded."""

from ..options import GrpoOptions
from ..run.context import Run, has_media
from .reward_scorer import check_reward_columns


def check_data(run: Run) -> None:
    """Raise ValueError on every rank for data that the rewards cannot use."""
    check_reward_columns(run)
    options = run.options
    assert isinstance(options, GrpoOptions)
    if not has_media(run.data):
        return
    problem = "the data has images, which {} not see in this version"
    if options.rewards.reward_model:
        flag = f"--reward_model {options.rewards.reward_model}"
        raise ValueError(f"{flag}: {problem.format('it does')}. Set --reward_funcs.")
