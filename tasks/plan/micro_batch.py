"""`--micro_batch_size auto`, the largest micro batch that fits by the plan and is not slower, and its default."""

import logging
from pathlib import Path

from ...bridge.option_groups import with_flags
from ..options import SftOptions
from ..system.memory import GIB
from .auto import AutoLayout, planned, saved_layout
from .memory import OUTSIDE
from .run_plan import Gpu, RunPlan, layout_of
from .search import Plan, Search, search

NAME, FLAG = "micro_batch_size", "--micro_batch_size auto"
FIX = "Set a number"
# Share of a GPU's memory that a plan may fill. Measured runs took up to 3 % more than planned (docs/plan.md).
FILLED = 0.95
# Products reach their full speed with fewer tokens of a rank; more would take memory for little.
MOST_TOKENS = 32_768
SLOWER = 1.0005  # times at most this factor apart are the same: sums of floating-point numbers
ABOUT_AS_FAST = 1.03  # likewise, of a default, which should leave memory free
CPU_MICRO_BATCHES = 4, 2

logger = logging.getLogger(__name__)


def auto_micro_batch(options: SftOptions, world: int, gpu: Gpu, checkpoint: Path | None = None) -> AutoLayout:
    """Return the micro batch of a run on GPUs, within its layout.

    checkpoint: one to resume from, whose micro batch is kept if it fits
    Raises ValueError for a run that is not planned or does not fit.
    """
    plan, result = _search_sizes(options, world, gpu)
    if not result.plans:
        if result.smallest is None:
            raise ValueError(
                f"{FLAG}: no micro batch divides --global_batch_size {plan.work.batch} in this layout, or the "
                "layout does not divide the model. Change one of them"
            )
        need = (result.smallest.memory.total + OUTSIDE) / GIB
        raise ValueError(
            f"{FLAG}: none fits: the smallest needs {need:.1f} GiB of each GPU by the plan, which has "
            f"{gpu.memory / GIB:.1f}. Set another layout (`megatron plan` prints them), or 1 to try"
        )
    kept = _saved(result.plans, checkpoint)
    best = kept or _largest(result.plans, plan.work.length / plan.layout.context)
    return _chosen(f"{FLAG}: {_size(best)}", best, is_kept=kept is not None)


def default_micro_batch(options: SftOptions, world: int, gpu: Gpu, checkpoint: Path | None = None) -> AutoLayout | None:
    """Return the micro batch of a run on GPUs that sets none: the smallest that is about as fast as any that fits.

    None: 1, since nothing fits, or the plan's memory depends on images, or is not held against runs of this kind
    (docs/plan.md). checkpoint: as of `auto_micro_batch`
    """
    try:
        plan, result = _search_sizes(options, world, gpu)
    except ValueError:
        return None
    except Exception as error:  # a fault of the plan must not stop a run
        logger.warning("The run's micro batch was not planned: %r", error)
        return None
    if not plan.has_measured_activations or plan.work.tower or not result.plans:
        return None
    kept = _saved(result.plans, checkpoint)
    useful = _useful(result.plans, plan.work.length / plan.layout.context)
    fastest = min(fit.seconds for fit in useful)
    as_fast = [fit for fit in useful if fit.seconds <= fastest * ABOUT_AS_FAST]
    best = kept or min(as_fast, key=_size)
    return _chosen(f"--{NAME}: {_size(best)} by default", best, is_kept=kept is not None)


def _search_sizes(options: SftOptions, world: int, gpu: Gpu) -> tuple[RunPlan, Search]:
    """Return the plan of a run, and the micro batches that fit within its layout. Raises ValueError without a plan."""
    options = with_flags(options, **{NAME: 1})
    if options.build.tensor_model_parallel_size > 1 and not options.build.sequence_parallel:
        raise ValueError(f"{FLAG}: tensor parallelism is planned with --sequence_parallel true. Set that too")
    plan = planned(options, (), world, gpu, FLAG, FIX)
    assert gpu.machine is not None
    names = [name for name in vars(plan.layout) if name not in ("gpus", "micro_batch")]
    pins = {name: getattr(plan.layout, name) for name in names} | {"recompute": [plan.layout.recompute]}
    return plan, search(plan.work, world, gpu.machine, FILLED * (gpu.memory - OUTSIDE), pins)


def _saved(plans: list[Plan], checkpoint: Path | None) -> Plan | None:
    """Return the plan with the micro batch of a checkpoint, if it fits."""
    saved = saved_layout(checkpoint).get(NAME) if checkpoint else None
    return next((fit for fit in plans if _size(fit) == saved), None)


def _chosen(text: str, best: Plan, *, is_kept: bool) -> AutoLayout:
    origin = ", as in the checkpoint" if is_kept else ""
    note = f"{text}{origin}, for {best.memory.total / GIB:.1f} GiB of each GPU by the plan."
    return AutoLayout({NAME: _size(best)}, note)


def _size(plan: Plan) -> int:
    return plan.layout.micro_batch


def _useful(plans: list[Plan], length: float) -> list[Plan]:
    """Return the plans of at most MOST_TOKENS, or the one of fewest. length: tokens of a sample"""
    return [fit for fit in plans if _size(fit) * length <= MOST_TOKENS] or [min(plans, key=_size)]


def _largest(plans: list[Plan], length: float) -> Plan:
    """Return the fastest plan of at most MOST_TOKENS, with the largest micro batch. length: tokens of a sample"""
    useful = _useful(plans, length)
    fastest = min(fit.seconds for fit in useful)
    return max((fit for fit in useful if fit.seconds <= fastest * SLOWER), key=_size)


def cpu_micro_batch(options: SftOptions, world: int) -> AutoLayout:
    """Return the micro batch of a run without GPUs: a small one, or 1 with pipeline stages, which would idle more."""
    layout = layout_of(options, world)
    share = options.training.global_batch_size // max(layout.data, 1)
    sizes = CPU_MICRO_BATCHES if layout.pipeline == 1 else ()
    size = next((size for size in sizes if share and share % size == 0), 1)
    return AutoLayout({NAME: size}, f"{FLAG}: {size}, without a GPU.")
