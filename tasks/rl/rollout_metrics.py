"""Metrics of rollouts: rewards, lengths, times; completions.jsonl."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..rollout.weight_sync import SyncStats
from ..system.append_file import AppendFile
from .episode import Episode

COMPLETIONS = "completions.jsonl"


class RolloutMetrics:
    """Sums since the last line of the log. Names are TRL's; those of times verl's."""

    def __init__(self):
        self._sums: dict[str, list[float]] = {}  # (sum, weight)

    def add(self, episodes: Sequence[Episode], group: int) -> None:
        """Add episodes that were generated together: `group` of each prompt, one prompt after the other."""
        rewards = np.array([episode.reward for episode in episodes])
        judged = ~np.isnan(rewards)
        groups = [each[~np.isnan(each)] for each in rewards.reshape(-1, group)]
        self.mean("reward", rewards[judged])
        if group > 1 and judged.sum() > 1:
            self.mean("reward_std", [rewards[judged].std(ddof=1)])  # of all together, as TRL has it
            self.mean("frac_reward_zero_std", [np.ptp(each) == 0 for each in groups if len(each)])
        self.mean("completions/unscored_ratio", ~judged)
        for name in episodes[0].rewards:
            scored_values = [value for episode in episodes if (value := episode.rewards[name]) is not None]
            self.mean(f"rewards/{name}/mean", scored_values)
            self.mean(f"rewards/{name}/std", [np.std(scored_values, ddof=1)] if len(scored_values) > 1 else [])
        self.lengths(episodes)

    def lengths(self, episodes: Sequence[Episode]) -> None:
        """Add the lengths of completions that were generated together."""
        lengths = np.array([episode.length for episode in episodes])
        cut_off = np.array([episode.finish_reason == "length" for episode in episodes])
        self.mean("completions/mean_length", lengths)
        self.mean("completions/min_length", [lengths.min()])
        self.mean("completions/max_length", [lengths.max()])
        self.mean("completions/clipped_ratio", cut_off)
        self.mean("completions/mean_terminated_length", lengths[~cut_off])

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds within to `timing_s/{phase}`, which is a mean over the steps since the last line."""
        began = time.perf_counter()
        yield
        entry = self._sums.setdefault(f"timing_s/{phase}", [0.0, 0.0])
        entry[0] += time.perf_counter() - began

    def count_step(self) -> None:
        self._sums.setdefault("steps", [0.0, 1.0])[0] += 1

    def add_weight_sync(self, stats: SyncStats) -> None:
        """Add what was sent to this rank's engine, if it has one."""
        if stats.bytes:
            self.mean("weight_sync/gb", [stats.bytes / 1e9])
            self.mean("weight_sync/gb_per_s", [stats.gigabytes_per_second])
        for state, gib in stats.held.items():
            self.mean(f"memory/{state}_gib", [gib])

    def add_policy_stats(self, stats: dict[str, float], most: float | None) -> None:
        """Add a step's PolicyStats.

        Raises ValueError where the log-probabilities of engine and trainer differ by more than `most` in the mean.
        """
        for name, value in stats.items():
            self.mean(name, [value])
        difference = stats.get("sampling/sampling_logp_difference/mean", 0.0)
        if most is not None and difference > most:
            raise ValueError(
                f"--max_sampling_logp_difference {most}: the engine's log-probabilities differ from the trainer's by "
                f"{difference:.4g}, in the mean over the tokens of a step. Use the same model and --torch_dtype in "
                "both. (With --async_generate true the engine's weights are one rollout batch older.)"
            )

    def means(self) -> dict[str, float]:
        steps = max(self._sums.get("steps", [1.0])[0], 1.0)
        values = {name: total / (weight or steps) for name, (total, weight) in self._sums.items()}
        values.pop("steps", None)
        return values

    def pop(self) -> dict[str, float]:
        """Return the means, and start anew."""
        values = self.means()
        self._sums = {}
        return values

    def merge(self, other: "RolloutMetrics") -> None:
        """Add the sums of another one."""
        for name, (total, weight) in other._sums.items():
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight

    def state(self) -> dict[str, Any]:
        return self._sums

    def load(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned. Metrics under earlier names are dropped."""
        self._sums = {name: sums for name, sums in state.items() if not name.startswith(("seconds/", "sync_"))}

    def mean(self, name: str, values: Any) -> None:
        """Add values to the mean of this name."""
        values = np.asarray(values, np.float64)
        if len(values):
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += float(values.sum())
            entry[1] += len(values)


def depends_on_machine(name: str) -> bool:
    """Return whether a metric is a time, a rate or a size of memory."""
    return name.startswith(("timing_s/", "weight_sync/", "memory/"))


def write_completions(file: AppendFile, generation: int, episodes: Sequence[Episode]) -> None:
    """Append a row for each episode: `--log_completions`."""
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
        row |= {"kl_penalty": episode.kl_penalty} if episode.kl_penalty else {}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def truncate_completions(folder: Path, generation: int) -> None:
    """Remove the rows after a generation: the run resumes there, and makes them again."""
    file = folder / COMPLETIONS
    if file.exists():
        rows = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half a row
        kept = [line for line in rows if json.loads(line)["generation"] <= generation]
        file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
