"""Metrics of rollouts (rewards, lengths, times), and the log completions.jsonl."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...templates.formats.medium import media_columns, source_name
from ..rollout.weight_sync import SyncStats
from ..system.append_file import AppendFile
from .episode import Episode

COMPLETIONS = "completions.jsonl"


class RolloutMetrics:
    """Metrics since the last log line. Names are TRL's, those of times are verl's."""

    def __init__(self):
        self._sums: dict[str, list[float]] = {}  # (sum, weight)

    def add(self, episodes: Sequence[Episode], group_size: int) -> None:
        """Add episodes that were generated together, ordered by prompt, `group_size` of each."""
        rewards = np.array([episode.reward for episode in episodes])
        is_scored = ~np.isnan(rewards)
        groups = [group[~np.isnan(group)] for group in rewards.reshape(-1, group_size)]
        self.add_mean("reward", rewards[is_scored])
        if group_size > 1 and is_scored.sum() > 1:
            self.add_mean("reward_std", [rewards[is_scored].std(ddof=1)])  # over all episodes, as in TRL
            self.add_mean("frac_reward_zero_std", [np.ptp(group) == 0 for group in groups if len(group)])
        self.add_mean("completions/unscored_ratio", ~is_scored)
        for name in episodes[0].rewards:
            scored_values = [value for episode in episodes if (value := episode.rewards[name]) is not None]
            self.add_mean(f"rewards/{name}/mean", scored_values)
            self.add_mean(f"rewards/{name}/std", [np.std(scored_values, ddof=1)] if len(scored_values) > 1 else [])
        self.add_lengths(episodes)

    def add_lengths(self, episodes: Sequence[Episode]) -> None:
        """Add the lengths of completions that were generated together."""
        lengths = np.array([episode.length for episode in episodes])
        is_truncated = np.array([episode.finish_reason == "length" for episode in episodes])
        self.add_mean("completions/mean_length", lengths)
        self.add_mean("completions/min_length", [lengths.min()])
        self.add_mean("completions/max_length", [lengths.max()])
        self.add_mean("completions/clipped_ratio", is_truncated)
        self.add_mean("completions/mean_terminated_length", lengths[~is_truncated])

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the elapsed seconds to `timing_s/{phase}`, a mean over the steps since the last log line."""
        start = time.perf_counter()
        yield
        entry = self._sums.setdefault(f"timing_s/{phase}", [0.0, 0.0])
        entry[0] += time.perf_counter() - start

    def count_step(self) -> None:
        self._sums.setdefault("steps", [0.0, 1.0])[0] += 1

    def add_weight_sync(self, stats: SyncStats) -> None:
        """Add the statistics of a weight update of this rank's engine, if it has one."""
        if stats.bytes:
            self.add_mean("weight_sync/gb", [stats.bytes / 1e9])
            self.add_mean("weight_sync/gb_per_s", [stats.gigabytes_per_second])
        for state, gib in stats.held.items():
            self.add_mean(f"memory/{state}_gib", [gib])

    def add_policy_stats(self, stats: dict[str, float], limit: float | None) -> None:
        """Add a step's PolicyStats.

        Raises ValueError if the log-probabilities of engine and trainer differ by more than `limit` on average.
        """
        for name, value in stats.items():
            self.add_mean(name, [value])
        difference = stats.get("sampling/sampling_logp_difference/mean", 0.0)
        if limit is not None and difference > limit:
            raise ValueError(
                f"--max_sampling_logp_difference {limit}: the engine's log-probabilities differ from the trainer's by "
                f"{difference:.4g}, in the mean over the tokens of a step. Use the same model and --torch_dtype in "
                "both. (With --async_generate true the engine's weights are one rollout batch older.)"
            )

    def add_means(self, values: dict[str, float]) -> None:
        """Add one number to each mean."""
        for name, value in values.items():
            self.add_mean(name, [value])

    def means(self) -> dict[str, float]:
        steps = max(self._sums.get("steps", [1.0])[0], 1.0)
        values = {name: total / (weight or steps) for name, (total, weight) in self._sums.items()}
        values.pop("steps", None)
        return values

    def pop(self) -> dict[str, float]:
        """Return the means, and reset."""
        values = self.means()
        self._sums = {}
        return values

    def merge(self, other: "RolloutMetrics") -> None:
        """Add the metrics of `other`."""
        for name, (total, weight) in other._sums.items():
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight

    def state(self) -> dict[str, Any]:
        return self._sums

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Metrics under former names are dropped."""
        self._sums = {name: sums for name, sums in state.items() if not name.startswith(("seconds/", "sync_"))}

    def add_mean(self, name: str, values: Any) -> None:
        """Add values to the mean `name`."""
        values = np.asarray(values, np.float64)
        if len(values):
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += float(values.sum())
            entry[1] += len(values)


def depends_on_machine(name: str) -> bool:
    """Return whether a metric is a time, a rate or a memory size."""
    return name.startswith(("timing_s/", "weight_sync/", "memory/"))


def write_completions(file: AppendFile, generation: int, episodes: Sequence[Episode]) -> None:
    """Append a row per episode: `--log_completions`."""
    for episode in episodes:
        row = {
            "generation": generation,
            "messages": episode.columns.get("messages"),
            "completion": episode.text,
            "completion_ids": episode.tokens[episode.loss_mask > 0].tolist(),
            **({"turns": episode.turns, "info": episode.info} if episode.info else {}),
            "rewards": episode.rewards,
            "reward": None if math.isnan(episode.reward) else episode.reward,
            "advantage": episode.advantage,
            "finish_reason": episode.finish_reason,
            "length": episode.length,
        }
        row |= media_columns((image.medium for image in episode.media if image.medium), source_name)
        row |= {"kl_penalty": episode.kl_penalty} if episode.kl_penalty else {}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def truncate_completions(folder: Path, generation: int) -> None:
    """Remove the rows after `generation`, where the run resumes."""
    file = folder / COMPLETIONS
    if file.exists():
        rows = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last row may be incomplete
        kept = [line for line in rows if json.loads(line)["generation"] <= generation]
        file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
