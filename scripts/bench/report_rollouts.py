"""Table of GRPO for report.py: the phases of a step.

- generate, weights, others: medians of `timing_s/...` in the log; train: what is left of a step, which is the forward
  and backward passes and the update.
- weights: what goes to the engines, and how fast.
- tokens/s/GPU: of prompts and answers, those of training and of servers' GPUs alike; answers: of answers alone.
- memory: in use at the end of training, and of generation (`memory/...` in the log); reserved: by the trainer.

ms-swift logs neither phases nor tokens.
"""

# pyright: reportMissingImports=false

from statistics import median
from typing import Any

COLUMNS = ["model", "GPUs", "system", "s/step", "generate", "weights", "others", "train", "tokens/s/GPU", "answers"]
COLUMNS += ["memory: train, generate, reserved", "engine's log-probabilities", "first step", "speed (target)"]
PHASE = "timing_s/"
OWN_COLUMN = "gen", "update_weights"


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each number that all steps have."""
    names = set.intersection(*(set(step) for step in steps))
    return {name: median(step[name] for step in steps) for name in names if isinstance(steps[0][name], int | float)}


def rollout_cells(
    figures: dict[str, Any], steps: list[dict[str, Any]], *, samples: int, gpus: int, speed: str
) -> list[str]:
    """Return the cells after model, GPUs and system. samples: completions of a step. steps: those that count"""
    numbers = medians(steps)
    phases = {name.removeprefix(PHASE): numbers[name] for name in sorted(numbers) if name.startswith(PHASE)}
    seconds = figures["seconds_per_step"]
    others = [f"{name} {value:.2f}" for name, value in phases.items() if name not in OWN_COLUMN and value >= 0.005]
    weights = f"{phases['update_weights']:.2f} s" if "update_weights" in phases else ""
    if "weight_sync/gb" in numbers:
        weights += f": {numbers['weight_sync/gb']:.3g} GB, {numbers['weight_sync/gb_per_s']:.1f} GB/s"
    length, tokens = numbers.get("completions/mean_length"), figures.get("real_tokens_per_second_per_gpu")
    in_use = [
        f"{numbers[f'memory/{name}_gib']:.0f}" for name in ("train", "generate") if f"memory/{name}_gib" in numbers
    ]
    difference = numbers.get("sampling/sampling_logp_difference/mean")
    return [
        f"{seconds:.2f}",
        f"{phases['gen']:.2f} s" if "gen" in phases else "",
        weights,
        ", ".join(others),
        f"{seconds - sum(phases.values()):.2f} s" if phases else "",
        "" if tokens is None else f"{tokens:,.0f}",
        "" if length is None else f"{samples * length / seconds / gpus:,.0f}",
        ", ".join([*in_use, f"{figures['memory_gib']:.1f}"]) + " GiB",
        "" if difference is None else f"{difference:.2g} apart",
        f"{figures['first_step']:.0f} s",
        speed,
    ]
