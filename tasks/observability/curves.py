"""Plots of a run: images/overview.png with its main curves, and a picture for each metric."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...templates.json_types import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[JsonObject]  # rows of logging.jsonl
OVERVIEW = "overview.png"
MAX_PLOTS = 6  # in the overview
POSITIONS = ("step", "max_steps", "elapsed", "eta", "tokens")
SKIPPED_PREFIXES = ("save_wait", "data_wait", "seconds_per_step", "weight_sync/", "timing_s/", "memory/")
COLORS = ("#2563eb", "#dc2626")
MIN_SMOOTHED_POINTS = 20  # points


@dataclass(frozen=True)
class Plot:
    """Curves on shared axes. `spread`: metric drawn as a band around the first curve."""

    title: str
    metrics: tuple[str, ...]
    spread: str = ""


PLOTS = (  # by importance
    Plot("reward (band: standard deviation)", ("reward", "eval_reward"), spread="reward_std"),
    Plot("loss", ("loss", "eval_loss")),
    Plot("reward margin, chosen - rejected", ("rewards/margins", "eval_rewards/margins")),
    Plot("implicit rewards", ("rewards/chosen", "rewards/rejected")),
    Plot("accuracy of the rewards", ("rewards/accuracies", "eval_rewards/accuracies")),
    Plot("accuracy", ("accuracy", "eval_accuracy")),
    Plot("mean squared error", ("mse", "eval_mse")),
    Plot("completion length, tokens", ("completions/mean_length",)),
    Plot("KL divergence", ("kl",)),
    Plot("entropy", ("entropy",)),
    Plot("gradient norm", ("grad_norm",)),
    Plot("learning rate", ("learning_rate",)),
    Plot("tokens/s/GPU", ("tokens_per_second_per_gpu",)),
)


def draw(rows: Rows, folder: Path, title: str, *, overview_only: bool = False) -> list[Path]:
    """Draw the overview and one picture per metric into `folder`, and return their paths, the overview first.

    title: the run's name. overview_only: skip the other pictures. loss.png has the training and evaluation losses.
    """
    metrics = dict.fromkeys(key for row in rows for key, value in row.items() if _is_number(value))
    names = [name for name in metrics if name not in POSITIONS and not name.startswith(SKIPPED_PREFIXES)]
    folder.mkdir(exist_ok=True)
    plots = [plot for plot in PLOTS if set(plot.metrics) & metrics.keys()][:MAX_PLOTS]
    pictures = [_Page(len(plots), title).draw(plots, rows, folder / OVERVIEW)] if plots else []
    if overview_only or not names:
        return pictures
    page = _Page(1, title)
    for name in names:
        if name.startswith("eval_") and name.removeprefix("eval_") in names:
            continue  # drawn with the training's
        plot = Plot(name, tuple(key for key in (name, f"eval_{name}") if key in names))
        pictures.append(page.draw([plot], rows, folder / f"{name.replace('/', '_')}.png"))
    return pictures


class _Page:
    """Axes on which one picture after the other is drawn: making axes takes longer than drawing on them."""

    # inches around and between the axes; matplotlib's layout engines draw each text twice to find them
    LEFT, RIGHT, TOP, BOTTOM, BETWEEN, ABOVE = 0.75, 0.2, 0.65, 0.5, 0.75, 0.55

    def __init__(self, plots: int, title: str):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = 1 if plots == 1 else 2 if plots in (2, 4) else 3
        lines = -(-plots // columns)
        width, height = (7, 4) if plots == 1 else (4.6 * columns, 3.2 * lines + 0.4)
        self.figure = Figure(figsize=(width, height))
        FigureCanvasAgg(self.figure)
        inner_width = (width - self.LEFT - self.RIGHT - self.BETWEEN * (columns - 1)) / columns
        inner_height = (height - self.TOP - self.BOTTOM - self.ABOVE * (lines - 1)) / lines
        self.figure.subplots_adjust(
            left=self.LEFT / width,
            right=1 - self.RIGHT / width,
            top=1 - self.TOP / height,
            bottom=self.BOTTOM / height,
            wspace=self.BETWEEN / inner_width,
            hspace=self.ABOVE / inner_height,
        )
        self.figure.suptitle(title, fontsize=11, color="#444444", y=1 - 0.1 / height, va="top")
        self.axes = [self.figure.add_subplot(lines, columns, number + 1) for number in range(plots)]
        for number, axes in enumerate(self.axes):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if number >= plots - columns:
                axes.set_xlabel("step")

    def draw(self, plots: Sequence[Plot], rows: Rows, path: Path) -> Path:
        """Replace what is on the axes by these plots, and write the picture."""
        for axes, plot in zip(self.axes, plots, strict=True):
            for artist in [*axes.lines, *axes.collections, *filter(None, [axes.get_legend()])]:
                artist.remove()
            axes.relim()
            axes.autoscale()
            _plot(axes, plot, rows)
        self.figure.savefig(path, dpi=110)
        return path


def _plot(axes: "Axes", plot: Plot, rows: Rows) -> None:
    axes.set_title(plot.title, fontsize=10)
    axes.ticklabel_format(axis="y", scilimits=(-3, 6), useOffset=False)
    curves = {name: points for name in plot.metrics if len((points := _points(rows, name))[0])}
    for (name, (steps, values)), color in zip(curves.items(), COLORS, strict=False):
        dot = "o" if name.startswith("eval_") or len(steps) == 1 else ""
        if _is_noisy(values):
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=f"{name}, smoothed")
        else:
            axes.plot(steps, values, color=color, linewidth=1.8, marker=dot, markersize=4, label=name)
    if plot.spread and plot.metrics[0] in curves:
        steps, low, high = _band(rows, plot.metrics[0], plot.spread)
        axes.fill_between(steps, low, high, color=COLORS[0], alpha=0.12, linewidth=0)
    if len(curves) > 1:
        axes.legend(fontsize=8, frameon=False)
    if steps_shown := {int(step) for steps, _ in curves.values() for step in steps}:
        axes.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore[reportCallIssue]
        axes.margins(x=0.02 if len(steps_shown) > 1 else 0.1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _points(rows: Rows, *names: str) -> tuple[np.ndarray, ...]:
    """Return the steps that have these metrics, and the values of each."""
    selected: Iterable = [row for row in rows if all(_is_number(row.get(name)) for name in names)]
    return tuple(np.array([row[name] for row in selected], dtype=float) for name in ("step", *names))


def _band(rows: Rows, middle: str, spread: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps, values, spreads = _points(rows, middle, spread)
    if _is_noisy(values):
        values, spreads = smooth(values), smooth(spreads)
    return steps, values - spreads, values + spreads


def _is_noisy(values: np.ndarray) -> bool:
    """Return whether a curve's steps are much larger than its trend."""
    return len(values) >= MIN_SMOOTHED_POINTS and bool(np.abs(np.diff(values)).sum() > 3 * np.ptp(values))


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred mean over a tenth of the points, over fewer near both ends."""
    half = max(2, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    end = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[end] - sums[first]) / (end - first)
