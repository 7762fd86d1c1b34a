"""Time of a run by phase: in a step, and in the whole run."""

from collections.abc import Mapping

import numpy as np

from ...templates.json_types import JsonObject
from .log_rows import LogRows
from .series import rounded

PARTS = 240  # most points of a phase's curve
TIMES = "timing_s/"
NAMES = {  # verl's names, and those of the log, in words
    "gen": "generation",
    "update_weights": "weight sync",
    "multi_turn": "multi-turn environments",
    "reward": "scoring",
    "old_log_prob": "old log-probabilities",
    "ref": "reference model",
    "values": "critic's values",
    "update_critic": "critic's update",
    "teacher": "teacher",
    "scores": "group scores",
    "entropy": "entropies",
    "idle": "wait for generation",
}
DATA, TOWER, TRAINING = "data wait", "vision tower", "training"
SAVING, REST = "saving", "evaluation and other"


def phases_of(log: LogRows) -> JsonObject:
    """Return seconds by phase: {"steps", "seconds": phase -> seconds per step, "totals": phase -> of the whole run}.

    Training is what remains of a step. Phases that run beside it (--async_generate) are shown as if they did not.
    """
    rows = {step: row for step, row in log.train.items() if isinstance(row.get("seconds_per_step"), int | float)}
    if not rows:
        return {"steps": [], "seconds": {}, "totals": {}}
    steps = np.array(list(rows))
    per_row = [_seconds(row) for row in rows.values()]
    names = [name for name in dict.fromkeys(name for seconds in per_row for name in seconds) if name != TRAINING]
    table = np.array([[seconds.get(name, 0.0) for seconds in per_row] for name in (*names, TRAINING)])
    counts = np.diff(steps, prepend=0)  # steps of each row
    totals = dict(zip((*names, TRAINING), (table @ counts).tolist(), strict=True))
    totals[SAVING] = float(sum(row.get("save_wait") or 0.0 for row in log.saves.values()))
    elapsed = max((log.summary or {}).get("elapsed") or 0.0, log.last.get("elapsed") or 0.0)
    totals[REST] = max(0.0, elapsed - sum(totals.values()))
    bounds = np.linspace(0, len(steps), min(PARTS, len(steps)) + 1).astype(int)[:-1]
    means = np.add.reduceat(table * counts, bounds, axis=1) / np.maximum(np.add.reduceat(counts, bounds), 1)
    return {
        "steps": np.maximum.reduceat(steps, bounds).tolist(),
        "seconds": {name: rounded(row) for name, row in zip((*names, TRAINING), means, strict=True)},
        "totals": {name: seconds for name, seconds in totals.items() if seconds > 0},
    }


def _seconds(row: Mapping[str, object]) -> dict[str, float]:
    """Return the seconds of each phase of a row's mean step."""
    step = float(row["seconds_per_step"])  # type: ignore[arg-type]
    seconds = {DATA: _number(row.get("data_wait"))}
    for name, value in row.items():
        if name.startswith(TIMES):
            phase = name.removeprefix(TIMES)
            seconds[NAMES.get(phase, phase)] = _number(value)
    if "vision_share" in row:
        seconds[TOWER] = _number(row["vision_share"]) * step
    return seconds | {TRAINING: max(0.0, step - sum(seconds.values()))}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else 0.0
