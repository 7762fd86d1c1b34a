"""Completions without a score from any reward: checks before a run, notes during it."""

from collections.abc import Sequence

import numpy as np

from ...templates.dataset.store import TokenStore
from ...templates.plural import plural
from ...templates.prepare import Prepared
from .reward_fn import Reward, RewardError, RewardSample

ROWS = 8  # without any score, after which a run is ended


def check_columns(rewards: Sequence[Reward], data: Prepared, *, evaluates: bool) -> list[str]:
    """Return notes on rows that lack a column without which no reward can score them.

    Raises ValueError where a reward requires a column that no row has, and where all rows to train or evaluate on lack
    one.
    """
    for reward in rewards:
        reward.check_columns(data.columns)
    notes = []
    for use, store in (("train", data.train), ("evaluate", data.val if evaluates else None)):
        if not isinstance(store, TokenStore):
            continue
        scored = np.zeros(len(store), bool)
        for reward in rewards:
            scored |= np.all([np.ones(len(store), bool), *map(store.has, reward.needs)], axis=0)
        if scored.all():
            continue
        columns = ", ".join(sorted({name for reward in rewards for name in reward.needs}))
        names, missing = " ".join(reward.name for reward in rewards), int((~scored).sum())
        if missing == len(scored):
            raise ValueError(
                f"--reward_funcs {names} cannot score any of the {plural(missing, 'row')} to {use} on, which lack "
                f"{columns}. Add the column{' to --val_dataset, or remove that flag' if use == 'evaluate' else ''}"
            )
        notes.append(
            f"--reward_funcs {names} cannot score {missing} of the {plural(len(scored), 'row')} to {use} on, "
            f"which lack {columns} (the first is {store.source_row(int(scored.argmin()))}): their completions have no "
            "advantage and do not count."
        )
    return notes


class UnscoredMonitor:
    """Monitor that reports the first unscored completion, and ends a run without any scored one.

    Unscored completions have no advantage, and statistics exclude them, as in TRL.
    """

    def __init__(self, names: Sequence[str]):
        self._names = " ".join(names)
        self._has_scores = False  # of any completion so far
        self._reported = False
        self._first = ""  # description of the first unscored completion
        self._rows = 0  # without any score so far

    def check(self, samples: Sequence[RewardSample], rewards: np.ndarray) -> str | None:
        """Return a note for the user. Raises RewardError where nothing could be scored so far."""
        silent = np.isnan(rewards)
        self._has_scores |= not silent.all()
        if (self._reported and self._has_scores) or not silent.any():
            return None
        self._first = self._first or self._why(samples[int(silent.argmax())])
        self._rows += len({sample.row for sample in samples})
        if not self._has_scores and self._rows >= ROWS:
            raise RewardError(
                f"--reward_funcs {self._names}: no completion so far has a score. The first: "
                f"{self._first}. Fix the rows, or add a reward that can score them"
            )
        if self._reported:
            return None
        self._reported = True
        return (
            f"--reward_funcs {self._names}: {self._first}. Such completions have no advantage and do not count. Their "
            "share is in logging.jsonl (completions/unscored_ratio). This note is printed once."
        )

    @staticmethod
    def _why(sample: RewardSample) -> str:
        columns = ", ".join(
            f"{name}: {repr(value)[:100]}"
            for name, value in sample.columns.items()
            if name not in ("query", "response")
        )
        return (
            f"no reward scores {sample} ({columns}): each returned None, as accuracy and cosine do without a solution "
            "that math-verify can read"
        )
