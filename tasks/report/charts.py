"""Charts of a page: which metrics share one, by topic."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...templates.json_types import JsonObject

# Drawn elsewhere, or coordinates of other charts.
UNDRAWN = ("tokens", "elapsed", "skipped_steps", "data_wait", "vision_share")
UNDRAWN_PREFIXES = ("timing_s/",)


@dataclass(frozen=True)
class Chart:
    """Metrics on shared axes, each with its evaluation's.

    spread: metric drawn as a band around the first. limits: metrics that bound a band. unit: "" for a plain number.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    spread: str = ""
    limits: tuple[str, ...] = ()


TOPICS: dict[str, tuple[Chart, ...]] = {
    "Rewards": (
        Chart("Reward", ("reward",), spread="reward_std"),
        Chart("Completion length", ("completions/mean_length",), "tokens",
              limits=("completions/min_length", "completions/max_length")),
        Chart("Truncated completions", ("completions/clipped_ratio",), "share"),
        Chart("Prompts without a difference in reward", ("frac_reward_zero_std",), "share"),
        Chart("KL divergence", ("kl",)),
        Chart("Entropy", ("entropy",)),
        Chart("Clipped ratios", ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"), "share"),
        Chart("Engine and trainer: difference of log-probabilities", ("sampling/sampling_logp_difference/mean",),
              limits=("sampling/sampling_logp_difference/max",)),
    ),
    "Training": (
        Chart("Loss", ("loss",)),
        Chart("Reward margin", ("rewards/margins",)),
        Chart("Rewards of chosen and rejected", ("rewards/chosen", "rewards/rejected")),
        Chart("Accuracy of the rewards", ("rewards/accuracies",), "share"),
        Chart("Accuracy", ("accuracy",), "share"),
        Chart("Gradient norm", ("grad_norm",)),
        Chart("Learning rate", ("learning_rate",)),
    ),
    "Speed and memory": (
        Chart("Tokens per second and GPU", ("tokens_per_second_per_gpu",)),
        Chart("MFU", ("mfu",), "share"),
        Chart("TFLOP/s per GPU", ("tflops_per_gpu",)),
        Chart("Time per step", ("seconds_per_step",), "s"),
        Chart("Peak memory", ("memory_gib",), "GiB"),
        Chart("Images per step", ("images",)),
        Chart("Visual tokens per step", ("visual_tokens",)),
    ),
}  # fmt: skip
OTHER = "Other metrics"


def charts_of(metrics: Iterable[str]) -> list[JsonObject]:
    """Return the topics of a page: {"title", "charts"}. Every metric has a place, those without a chart at the end."""
    remaining = {name: None for name in metrics if name not in UNDRAWN and not name.startswith(UNDRAWN_PREFIXES)}
    topics = []
    for title, charts in TOPICS.items():
        topics.append(_topic(title, [*charts, *_named_charts(title, remaining)], remaining))
    plain = [name for name in remaining if not (name.startswith("eval_") and name.removeprefix("eval_") in remaining)]
    topics.append(_topic(OTHER, [Chart(name, (name,)) for name in plain], remaining))
    return [topic for topic in topics if topic["charts"]]


def _topic(title: str, charts: Iterable[Chart], remaining: dict[str, None]) -> JsonObject:
    return {"title": title, "charts": [drawn for chart in charts if (drawn := _take(chart, remaining))]}


def _named_charts(title: str, metrics: Iterable[str]) -> list[Chart]:
    """Return the charts of metrics whose names depend on the run: each reward function, each state of memory."""
    if title == "Rewards":
        rewards = re.compile(r"rewards/(.+)/mean")  # those of preferences have no /mean
        matches = [match for name in metrics if (match := rewards.fullmatch(name))]
        return [Chart(f"Reward: {match[1]}", (match[0],), spread=f"rewards/{match[1]}/std") for match in matches]
    if title == "Speed and memory":
        names = [name for name in metrics if name.startswith("memory/")]
        return [Chart(name.replace("/", ": ").replace("_", " ").capitalize(), (name,), "GiB") for name in names]
    return []


def _take(chart: Chart, remaining: dict[str, None]) -> JsonObject | None:
    """Remove a chart's metrics from the remaining ones, and return it for JSON; None if it has none of them."""
    lines = [name for metric in chart.metrics for name in (metric, f"eval_{metric}") if name in remaining]
    if not lines:
        return None
    limits = _present(chart.limits, remaining)
    spread = next(iter(_present((chart.spread,), remaining)), "")
    for name in (*lines, *limits, *([spread] if spread else [])):
        del remaining[name]
    return {"title": chart.title, "lines": lines, "unit": chart.unit, "spread": spread, "limits": limits}


def _present(names: Sequence[str], remaining: dict[str, None]) -> list[str]:
    return [name for name in names if name in remaining]
