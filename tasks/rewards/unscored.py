"""Completions that no reward scores: checks before a run, notes during it."""

from collections.abc import Collection, Sequence

import numpy as np

from ...templates.dataset.store import TokenStore
from ...templates.plural import plural
from ...templates.prepare import Prepared
from .reward_fn import Reward, RewardError, RewardSample

ROWS = 8  # number of rows without any score that ends a run


def check_columns(
    rewards: Sequence[Reward], data: Prepared, *, evaluates: bool, added: Collection[str] = ()
) -> list[str]:
    """Return notes on rows that no reward can score, since they lack required columns.

    added: columns that episodes have beside those of their rows. Raises ValueError if a reward requires a column that
    no row has, or if no row to train or evaluate on can be scored.
    """
    if not rewards:  # a teacher alone
        return []
    for reward in rewards:
        reward.check_columns([*data.columns, *added])
    notes = []
    for purpose, store in (("train", data.train), ("evaluate", data.val if evaluates else None)):
        if not isinstance(store, TokenStore):
            continue
        scored = np.zeros(len(store), bool)
        for reward in rewards:
            required = [names for names in reward.required_alternatives if set(names).isdisjoint(added)]
            groups = [np.any([store.has(name) for name in names], axis=0) for names in required]
            scored |= np.all([np.ones(len(store), bool), *groups], axis=0)
        if scored.all():
            continue
        groups = {" or ".join(names) for reward in rewards for names in reward.required_alternatives}
        columns = ", ".join(sorted(groups))
        names, missing = " ".join(reward.name for reward in rewards), int((~scored).sum())
        if missing == len(scored):
            raise ValueError(
                f"--reward_funcs {names} cannot score any of the {plural(missing, 'row')} to {purpose} on, which lack "
                f"{columns}. Add the column{' to --val_dataset, or remove that flag' if purpose == 'evaluate' else ''}"
            )
        notes.append(
            f"--reward_funcs {names} cannot score {missing} of the {plural(len(scored), 'row')} to {purpose} on, "
            f"which lack {columns} (the first is {store.source_row(int(scored.argmin()))}): their completions have no "
            "advantage and do not count."
        )
    return notes


class UnscoredMonitor:
    """Monitor that reports the first unscored completion, and ends a run without any scored completion.

    Unscored completions have no advantage, and statistics exclude them, as in TRL.
    """

    def __init__(self, names: Sequence[str]):
        self._names = " ".join(names)
        self._has_scores = False  # of any completion so far
        self._has_reported = False
        self._first = ""  # description of the first unscored completion
        self._rows = 0  # without any score so far

    def check(self, samples: Sequence[RewardSample], rewards: np.ndarray) -> str | None:
        """Return a note for the user. Raises RewardError if no completion could be scored so far."""
        is_unscored = np.isnan(rewards)
        self._has_scores |= not is_unscored.all()
        if (self._has_reported and self._has_scores) or not is_unscored.any():
            return None
        self._first = self._first or self._reason(samples[int(is_unscored.argmax())])
        self._rows += len({sample.row for sample in samples})
        if not self._has_scores and self._rows >= ROWS:
            raise RewardError(
                f"--reward_funcs {self._names}: no completion so far has a score. The first: "
                f"{self._first}. Fix the rows, or add a reward that can score them"
            )
        if self._has_reported:
            return None
        self._has_reported = True
        return (
            f"--reward_funcs {self._names}: {self._first}. Such completions have no advantage and do not count. Their "
            "share is in logging.jsonl (completions/unscored_ratio). This note is printed once."
        )

    @staticmethod
    def _reason(sample: RewardSample) -> str:
        columns = ", ".join(
            f"{name}: {repr(value)[:100]}"
            for name, value in sample.columns.items()
            if name not in ("query", "response")
        )
        return (
            f"no reward scores {sample} ({columns}): each returned None, as accuracy and cosine do without a solution "
            "that math-verify can read"
        )
