"""What a user sees of what was generated: rewards, lengths, seconds; completions.jsonl."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..rollout.weight_sync import Sync
from ..system.append_file import AppendFile
from .episode import Episode

COMPLETIONS = "completions.jsonl"


class RolloutLog:
    """Sums since the last line of the log; their names are TRL's."""

    def __init__(self):
        self._sums: dict[str, list[float]] = {}  # (sum, weight)

    def add(self, episodes: Sequence[Episode], group: int) -> None:
        """What was generated at a time: `group` completions of each prompt, one prompt after the other."""
        rewards = np.array([episode.reward for episode in episodes])
        judged = ~np.isnan(rewards)
        groups = [each[~np.isnan(each)] for each in rewards.reshape(-1, group)]
        self.mean("reward", rewards[judged])
        if group > 1 and judged.sum() > 1:
            self.mean("reward_std", [rewards[judged].std(ddof=1)])  # of all together, as TRL has it
            self.mean("frac_reward_zero_std", [np.ptp(each) == 0 for each in groups if len(each)])
        self.mean("completions/unjudged_ratio", ~judged)
        for name in episodes[0].rewards:
            given = [value for episode in episodes if (value := episode.rewards[name]) is not None]
            self.mean(f"rewards/{name}/mean", given)
            self.mean(f"rewards/{name}/std", [np.std(given, ddof=1)] if len(given) > 1 else [])
        self.lengths(episodes)

    def lengths(self, episodes: Sequence[Episode]) -> None:
        """Of what was generated at a time."""
        lengths = np.array([episode.length for episode in episodes])
        cut_off = np.array([episode.finish == "length" for episode in episodes])
        self.mean("completions/mean_length", lengths)
        self.mean("completions/min_length", [lengths.min()])
        self.mean("completions/max_length", [lengths.max()])
        self.mean("completions/clipped_ratio", cut_off)
        self.mean("completions/mean_terminated_length", lengths[~cut_off])

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A phase of the loop, whose seconds are to be in the log."""
        began = time.perf_counter()
        yield
        self.seconds(phase, time.perf_counter() - began)

    def seconds(self, phase: str, seconds: float) -> None:
        """That a phase of the loop took: summed, and given as a mean over the steps of the line."""
        entry = self._sums.setdefault(f"seconds/{phase}", [0.0, 0.0])
        entry[0] += seconds

    def step(self) -> None:
        """A step has begun."""
        self._sums.setdefault("steps", [0.0, 1.0])[0] += 1

    def synced(self, found: Sync) -> None:
        """Weights have gone to this rank's engine, if it has one."""
        if found.bytes:
            self.mean("sync_gb", [found.bytes / 1e9])
            self.mean("sync_gb_per_second", [found.gigabytes_per_second])
        for state, gib in found.held.items():
            self.mean(f"memory/{state}_gib", [gib])

    def seen(self, found: dict[str, float], most: float | None) -> None:
        """In a step, as policy.py's `Seen` gives it. Raises ValueError where engine and trainer are more than `most`
        apart."""
        for name, value in found.items():
            self.mean(name, [value])
        if most is not None and found.get("logprob_gap/mean", 0.0) > most:
            raise ValueError(
                f"the engine's log-probabilities are {found['logprob_gap/mean']:.4g} from the trainer's, in the mean "
                f"over the tokens of a step (--max_logprob_gap {most}). Is the engine the same model, in the same "
                "--torch_dtype? (With --async_generate true it is an earlier one, by a generation.)"
            )

    def means(self) -> dict[str, float]:
        steps = max(self._sums.get("steps", [1.0])[0], 1.0)
        found = {name: total / (weight or steps) for name, (total, weight) in self._sums.items()}
        found.pop("steps", None)
        return found

    def take(self) -> dict[str, float]:
        """The means; sums begin anew."""
        found = self.means()
        self._sums = {}
        return found

    def add_all(self, other: "RolloutLog") -> None:
        """What another one has, too."""
        for name, (total, weight) in other._sums.items():
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight

    def state(self) -> dict[str, Any]:
        return self._sums

    def load(self, state: dict[str, Any]) -> None:
        self._sums = state

    def mean(self, name: str, values: Any) -> None:
        """These are among what the mean of this name is over."""
        values = np.asarray(values, np.float64)
        if len(values):
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += float(values.sum())
            entry[1] += len(values)


def of_this_machine(name: str) -> bool:
    """Whether it says how a run went, and not what came of it."""
    return name.startswith(("seconds", "sync", "memory/"))


def write_completions(file: AppendFile, generation: int, episodes: Sequence[Episode]) -> None:
    """--log_completions: a row for each, behind those of earlier generations."""
    for episode in episodes:
        row = {
            "generation": generation,
            "messages": episode.columns.get("messages"),
            "completion": episode.text,
            "completion_ids": episode.tokens[episode.trained > 0].tolist(),
            **({"turns": episode.turns, "info": episode.info} if episode.info else {}),
            "rewards": episode.rewards,
            "reward": None if math.isnan(episode.reward) else episode.reward,
            "advantage": episode.advantage,
            "finish": episode.finish,
            "length": episode.length,
        }
        row |= {"kl_penalty": episode.penalty} if episode.penalty else {}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def forget_completions(folder: Path, generation: int) -> None:
    """Leave out those after a generation: a run goes on from there, and makes them again."""
    file = folder / COMPLETIONS
    if file.exists():
        rows = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half a row
        kept = [line for line in rows if json.loads(line)["generation"] <= generation]
        file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
