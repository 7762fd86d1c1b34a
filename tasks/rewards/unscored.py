"""Completions of which no reward says anything: what is known of them before a run, and what is said in its midst."""

from collections.abc import Sequence

import numpy as np

from ...templates.dataset.store import TokenStore
from ...templates.plural import plural
from ...templates.prepare import Prepared
from .reward_fn import Reward, RewardError, Sample

ROWS = 8  # of which none could be judged, before a run is thought to be of no use


def check_columns(rewards: Sequence[Reward], data: Prepared, *, evaluates: bool) -> list[str]:
    """Notes on rows that lack a column without which no reward can judge them.

    Raises ValueError where one wants a column that no row has, and where all rows to train on, or to evaluate on, lack
    one.
    """
    for reward in rewards:
        reward.check_columns(data.columns)
    notes = []
    for use, store in (("train", data.train), ("evaluate", data.val if evaluates else None)):
        if not isinstance(store, TokenStore):
            continue
        judged = np.zeros(len(store), bool)
        for reward in rewards:
            judged |= np.all([np.ones(len(store), bool), *map(store.has, reward.needs)], axis=0)
        if judged.all():
            continue
        wanted = ", ".join(sorted({name for reward in rewards for name in reward.needs}))
        names, lacking = " ".join(reward.name for reward in rewards), int((~judged).sum())
        if lacking == len(judged):
            raise ValueError(
                f"--reward_funcs {names} cannot judge any of the {plural(lacking, 'row')} to {use} on, which lack "
                f"{wanted}. Add "
                f"the column{' to --val_dataset, or leave that out' if use == 'evaluate' else ''}"
            )
        notes.append(
            f"--reward_funcs {names} cannot judge {lacking} of the {plural(len(judged), 'row')} to {use} on, "
            f"which lack {wanted} "
            f"(the first is {store.source_row(int(judged.argmin()))}): their completions have no advantage and do not "
            "count."
        )
    return notes


class Unjudged:
    """Tells of the first, once; a run of which no completion at all can be judged is ended.

    Such completions are no reason to end a run: they have no advantage, and statistics leave them out, as TRL has it.
    """

    def __init__(self, names: Sequence[str]):
        self._names = " ".join(names)
        self._judges = False  # anything, so far
        self._told = False
        self._first = ""  # of such completions, and why
        self._rows = 0  # that could not be judged before

    def look(self, samples: Sequence[Sample], rewards: np.ndarray) -> str | None:
        """A note for the user. Raises RewardError where nothing could be judged so far."""
        silent = np.isnan(rewards)
        self._judges |= not silent.all()
        if (self._told and self._judges) or not silent.any():
            return None
        self._first = self._first or self._why(samples[int(silent.argmax())])
        self._rows += len({sample.place for sample in samples})
        if not self._judges and self._rows >= ROWS:
            raise RewardError(
                f"--reward_funcs {self._names}: nothing of what was generated so far can be judged. The first: "
                f"{self._first}. Fix the rows, or add a reward that can score them"
            )
        if self._told:
            return None
        self._told = True
        return (
            f"--reward_funcs {self._names}: {self._first}. Such completions have no advantage and do not count; how "
            "many there are is in logging.jsonl (completions/unscored_ratio). This is said once."
        )

    @staticmethod
    def _why(sample: Sample) -> str:
        columns = ", ".join(
            f"{name}: {repr(value)[:100]}"
            for name, value in sample.columns.items()
            if name not in ("query", "response")
        )
        return (
            f"no reward says anything of {sample} ({columns}): each returned None, as accuracy and cosine do where "
            "there is no solution, or none that math-verify can read"
        )
