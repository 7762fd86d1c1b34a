"""Curves of a page: metrics by step, thinned to as many points as a screen shows, with their spikes."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from ...templates.json_types import JsonObject

POINTS = 2000  # most points of a curve
DIGITS = 6  # significant digits of a value
POSITIONS = ("step", "max_steps", "eta")  # keys of rows that are no curves
LISTED = 20  # most steps with values that are not finite that are listed by number


def series_of(rows: Mapping[int, JsonObject]) -> dict[str, JsonObject]:
    """Return each metric of rows by step as {"steps", "values"}, with "means" if thinned.

    "gaps" has the number of values that are not finite (null in the log), and "gap_steps" the first of their steps.
    A metric without any finite value is left out, unless it is `loss` or `grad_norm`, which would be a fault.
    """
    curves = {}
    for name in dict.fromkeys(name for names in dict.fromkeys(map(tuple, rows.values())) for name in names):
        if name in POSITIONS:
            continue
        column = {step: row[name] for step, row in rows.items() if name in row}
        if all(value is None or isinstance(value, int | float) for value in column.values()):
            curve = _curve(np.array(list(column)), np.array(list(column.values()), np.float64))  # null is NaN
            if curve["steps"] or name in ("loss", "grad_norm"):
                curves[name] = curve
    return curves


def _curve(steps: np.ndarray, values: np.ndarray) -> JsonObject:
    is_finite = np.isfinite(values)
    gaps = steps[~is_finite]
    curve = thin(steps[is_finite], values[is_finite])
    return curve | ({"gaps": len(gaps), "gap_steps": gaps[:LISTED].tolist()} if len(gaps) else {})


def thin(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> JsonObject:
    """Return at most `points` (and both ends) of a curve: the least and the greatest value of each of equal parts.

    steps: int64 [n], rising. values: float64 [n], finite. "means" has the mean of each point's part, to be smoothed.
    """
    if len(steps) <= points:
        return {"steps": steps.tolist(), "values": rounded(values)}
    bounds = np.linspace(0, len(steps), points // 2 + 1).astype(int)
    chosen, means = [], []
    for start, stop in pairwise(bounds):
        part = values[start:stop]
        kept = {int(part.argmin()), int(part.argmax())}
        kept |= ({0} if start == 0 else set()) | ({stop - start - 1} if stop == len(steps) else set())
        chosen += [start + index for index in sorted(kept)]
        means += [part.mean()] * len(kept)
    return {"steps": steps[chosen].tolist(), "values": rounded(values[chosen]), "means": rounded(np.array(means))}


def rounded(values: np.ndarray) -> list[float]:
    """Return values with a few significant digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
