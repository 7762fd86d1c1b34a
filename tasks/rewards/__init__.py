"""Reward functions.

Users add reward functions in files of `--external_plugins`, and select them by `--reward_funcs`:

    from megaswift.tasks.rewards import reward

    @reward("short")
    def short(completions, **columns):  # lists with one entry per completion
        return [-len(text) / 1000 for text in completions]

A function, or an instance of a class, receives the keywords that it names, or all with `**`: `completions` (texts),
`completion_ids` (tokens), `prompt` (text), `messages` (the conversation including the completion), and each column of
the dataset. It returns a number per completion, or None if it cannot score it. It may be async. In multi-turn episodes
`completions` are the last answers, `completion_ids` all generated tokens, `messages` the whole conversation, and
`rollout_infos` the scheduler's `turn.info`.
"""

from .registry import ORM, AsyncORM, orms, reward

__all__ = ["ORM", "AsyncORM", "orms", "reward"]
