"""`--plan auto`: the fastest layout that fits by the plan, within what the flags or a checkpoint fix."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...bridge.option_groups import flag_value
from ...templates.plural import plural
from ..options import SftOptions
from ..system.memory import GIB
from .gpu_layout import RECOMPUTE, Recompute, Settings, flag_text
from .memory import OUTSIDE
from .run_plan import Gpu, RunPlan, UnplannedRunError, pack_length, plan_run
from .search import DIVISION, Plan, Search, search, smallest_cluster

# Fields of `GpuLayout` and the flags that fix them.
FLAGS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
    "offloads": "optimizer_cpu_offload",
}
RECOMPUTE_FLAGS = "recompute_granularity", "recompute_modules"
RECOMPUTED_LAYERS = "recompute_method", "recompute_num_layers"
OFFLOAD_FLAGS = "cpu_offloading", "cpu_offloading_num_layers"
LAYOUT_FLAGS = *FLAGS.values(), *RECOMPUTE_FLAGS, *RECOMPUTED_LAYERS, *OFFLOAD_FLAGS
ALWAYS_SET = [  # by each plan
    *(flag for name, flag in FLAGS.items() if name not in DIVISION), *RECOMPUTE_FLAGS, "cpu_offloading",
]  # fmt: skip
PLANNED_MODULES = ["core_attn"], ["mlp"], ["core_attn", "mlp"]  # values of --recompute_modules
FIX = "Set the layout's flags instead (`megatron plan` prints them)"


@dataclass(frozen=True)
class AutoLayout:
    """Flags that `--plan auto` sets, and a note about them."""

    flags: Settings
    note: str


def auto_layout(
    options: SftOptions, requested: Collection[str], world: int, gpu: Gpu, checkpoint: Path | None = None
) -> AutoLayout:
    """Return the best layout of a run, within the flags that are set.

    requested: names of the flags that the user has set
    checkpoint: one to resume from, whose layout is kept if it fits
    Raises ValueError for a run that is not planned or does not fit.
    """
    plan = planned(options, requested, world, gpu, "--plan auto", FIX)
    values = {flag: flag_value(options, flag) for flag in LAYOUT_FLAGS if flag in requested}
    saved = saved_layout(checkpoint) if checkpoint else {}
    result, origin = _search(plan, gpu, saved | values), "as in the checkpoint" if saved else ""
    if not result.best:
        result, origin = _search(plan, gpu, values), ""
    if not result.best:
        raise ValueError(f"--plan auto: {_misfit(plan, gpu, values, result)}")
    flags = {name: value for name, value in result.best.layout.settings().items() if name not in requested}
    return AutoLayout(flags, _note(plan, result.best, origin))


def planned(options: SftOptions, requested: Collection[str], world: int, gpu: Gpu, flag: str, fix: str) -> RunPlan:
    """Return the plan of the run's model and batch. Raises ValueError, with `flag` and its fix, where there is none."""
    if gpu.machine is None:
        raise ValueError(f"{flag}: the speed of {gpu.name} is not known. {fix}")
    if options.build.recompute_modules not in PLANNED_MODULES:
        raise ValueError(f"{flag} cannot be used with --recompute_modules, which is not planned. Remove one of them")
    if options.build.recompute_method == "uniform" and options.build.recompute_num_layers not in (None, 1):
        raise ValueError(f"{flag}: --recompute_num_layers is planned as 1 with --recompute_method uniform. Set that")
    if "sequence_parallel" in requested and not options.build.sequence_parallel:
        raise ValueError(f"{flag} cannot be used with --sequence_parallel false. Remove one of them")
    if pack_length(options) is None:
        raise ValueError(f"{flag} needs the longest sample. Set --max_length")
    try:
        return plan_run(options, world, gpu_bytes=gpu.memory)
    except UnplannedRunError as error:
        raise ValueError(f"{flag}: not planned: {error}. {fix}") from None


def layouts_to_try(
    options: SftOptions, requested: Collection[str], world: int, gpu: Gpu, count: int, flag: str
) -> tuple[RunPlan, list[Plan]]:
    """Return the plan of a run's model and batch, and the first layouts that fit, within the flags that are set.

    flag: as of `planned`. Raises ValueError for a run that is not planned or does not fit.
    """
    plan = planned(options, requested, world, gpu, flag, "Try layouts by hand")
    values = {name: flag_value(options, name) for name in LAYOUT_FLAGS if name in requested}
    result = _search(plan, gpu, values)
    if not result.plans:
        raise ValueError(f"{flag}: {_misfit(plan, gpu, values, result)}")
    return plan, result.plans[:count]


def saved_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the flags of the layout of a checkpoint's run; empty if they cannot be read."""
    try:
        saved = json.loads((checkpoint / "args.json").read_text(encoding="utf-8"))["options"]
        # Older files lack the newest flags.
        return {"cpu_offloading": False} | {flag: saved[flag]["value"] for flag in LAYOUT_FLAGS if flag in saved}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _search(plan: RunPlan, gpu: Gpu, values: Mapping[str, Any]) -> Search:
    pins = {field: values[flag] for field, flag in FLAGS.items() if flag in values}
    if "virtual" in pins:
        pins["virtual"] = pins["virtual"] or 1
    pins["recompute"] = _allowed_recompute(values.get("recompute_granularity"), values.get("recompute_modules"))
    if any(name in values for name in RECOMPUTED_LAYERS):
        is_block = values.get("recompute_method") == "block"
        pins["recomputed"] = values.get("recompute_num_layers") if is_block else None
    if "cpu_offloading" in values:
        pins["offloaded_layers"] = values.get("cpu_offloading_num_layers", 0) if values["cpu_offloading"] else 0
    assert gpu.machine is not None
    return search(plan.work, plan.layout.gpus, gpu.machine, gpu.memory - OUTSIDE, pins)


def _allowed_recompute(granularity: str | None, modules: Collection[str] | None) -> tuple[Recompute, ...]:
    """Return what may be recomputed by the values of the two flags; None: not set."""
    if granularity in ("full", "none"):
        return (granularity,)
    if modules is not None:
        return ("mlp" if "mlp" in modules else "none",)
    return RECOMPUTE[:2] if granularity else RECOMPUTE


def _note(plan: RunPlan, best: Plan, origin: str) -> str:
    memory, speed = best.memory.total / GIB, best.tokens_per_second(plan.work)
    about = ", ".join(filter(None, (str(best.layout), origin, f"{memory:.1f} GiB of each GPU")))
    return f"--plan auto: {about} and {speed:,.0f} tokens/s/GPU by the plan: {best.layout.flags()}."


def _misfit(plan: RunPlan, gpu: Gpu, values: Mapping[str, Any], result: Search) -> str:
    """Return the error message where no layout fits."""
    assert gpu.machine is not None
    fixed = " ".join(f"--{name} {flag_text(value)}" for name, value in values.items())
    where = f"{plural(plan.layout.gpus, 'GPU')} of {gpu.memory / GIB:.1f} GiB" + (f" with {fixed}" if fixed else "")
    if result.smallest is None:
        return (
            f"no layout of {where} divides --global_batch_size {plan.work.batch}, the lengths, and "
            f"the heads, layers and experts of {plan.work.names_of_models}. Change one of them"
        )
    need = (result.smallest.memory.total + OUTSIDE) / GIB
    cluster = None if fixed else smallest_cluster(plan.work, gpu.machine, gpu.memory - OUTSIDE, {})
    fix = "Remove flags of the layout" if fixed else "Set a shorter --max_length, or --tuner_type lora"
    if cluster:
        fix = f"It fits on {cluster} GPUs"
    return f"no layout fits on {where}. The least memory is {need:.1f} GiB of each GPU. {fix}"
