"""Trials of `megatron tune`: layouts of a plan, what short runs of them took, and the table of both."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...templates.json_types import JsonObject
from ..system.memory import GIB
from .search import Plan
from .table import aligned, choices
from .workload import Workload

FAST, MEMORY, FAILED, SLOW = "measured", "out of memory", "failed", "timed out"
HEADINGS = (
    "layout", "micro batch", "recompute", "AdamW on", "GiB planned", "GiB", "s/step planned", "s/step",
    "tokens/s/GPU planned", "tokens/s/GPU", "result",
)  # fmt: skip
OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
SIGKILLED = -9, 137  # exit codes of a process that the system has ended, usually for memory


@dataclass(frozen=True)
class Measurement:
    """Memory and time of a trial, on its first process: the peak, and medians of the steps after the first."""

    memory_gib: float
    seconds: float
    tokens_per_second: float  # per GPU


@dataclass(frozen=True)
class Trial:
    """Layout of the plan, and the result of a short run of it."""

    plan: Plan
    result: str  # FAST, MEMORY, FAILED or SLOW
    measurement: Measurement | None = None
    reason: str = ""  # first line of the error

    def as_json(self, work: Workload) -> JsonObject:
        planned = {
            "memory_gib": self.plan.memory.total / GIB,
            "seconds_per_step": self.plan.seconds,
            "tokens_per_second_per_gpu": self.plan.tokens_per_second(work),
        }
        row: JsonObject = {"flags": self.plan.layout.settings(), "planned": planned, "result": self.result}
        if self.measurement:
            measurement = self.measurement
            row["measured"] = dict(
                zip(planned, (measurement.memory_gib, measurement.seconds, measurement.tokens_per_second), strict=True)
            )
        return row | ({"reason": self.reason} if self.reason else {})


def read_measurement(file: Path) -> Measurement | None:
    """Return what the log of a trial says, None for fewer than two steps."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    steps = [row for row in rows if "loss" in row and row.get("seconds_per_step")]
    if len(steps) < 2:
        return None
    return Measurement(
        max(row["memory_gib"] for row in steps),
        statistics.median(row["seconds_per_step"] for row in steps[1:]),
        statistics.median(row["tokens_per_second_per_gpu"] for row in steps[1:]),
    )


def judge(plan: Plan, code: int | None, output: str, measurement: Measurement | None) -> Trial:
    """Return the result of a trial. code: exit code; None: it was ended after its time. output: what it printed"""
    if code == 0 and measurement:
        return Trial(plan, FAST, measurement)
    errors = ERROR.findall(output)
    reason = errors[-1] if errors else f"exit code {code}"
    if code is None:
        return Trial(plan, SLOW)
    if code in SIGKILLED or OUT_OF_MEMORY.search(output):
        return Trial(plan, MEMORY, reason=reason)
    return Trial(plan, FAILED, reason=reason)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest trial; None if none was measured."""
    measured = [trial for trial in trials if trial.measurement]
    return min(measured, key=lambda trial: trial.measurement.seconds, default=None)  # type: ignore[union-attr]


def table(work: Workload, trials: Sequence[Trial]) -> str:
    """Return plans and measurements as lines of columns, the fastest first. Memory in GiB."""
    ranked = sorted(trials, key=lambda trial: trial.measurement.seconds if trial.measurement else float("inf"))
    return aligned([HEADINGS, *(_cells(work, trial) for trial in ranked)])


def _cells(work: Workload, trial: Trial) -> tuple[str, ...]:
    plan, measurement = trial.plan, trial.measurement
    planned = _numbers(plan.memory.total / GIB, plan.seconds, plan.tokens_per_second(work))
    measured = ("",) * 3
    if measurement:
        measured = _numbers(measurement.memory_gib, measurement.seconds, measurement.tokens_per_second)
    numbers = (cell for pair in zip(planned, measured, strict=True) for cell in pair)
    return (*choices(plan.layout), *numbers, trial.result)


def _numbers(memory: float, seconds: float, tokens: float) -> tuple[str, str, str]:
    return f"{memory:.1f}", f"{seconds:.3g}", f"{tokens:,.0f}"
