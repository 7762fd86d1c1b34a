"""`--micro_batch_size auto`: the largest micro batch that fits by the plan and is not slower."""

from pathlib import Path

from ...bridge.option_groups import with_flags
from ..options import SftOptions
from ..system.memory import GIB
from .auto import AutoLayout, planned, saved_layout
from .memory import OUTSIDE
from .run_plan import Gpu, layout_of
from .search import Plan, search

NAME, FLAG = "micro_batch_size", "--micro_batch_size auto"
FIX = "Set a number"
# Share of a GPU's memory that a plan may fill. Measured runs took up to 3 % more than planned (docs/plan.md).
FILLED = 0.95
# Products reach their full speed with fewer tokens of a rank; more would take memory for little.
MOST_TOKENS = 32_768
SLOWER = 1.0005  # times at most this factor apart are the same: sums of floating-point numbers
CPU_MICRO_BATCHES = 4, 2


def auto_micro_batch(options: SftOptions, world: int, gpu: Gpu, checkpoint: Path | None = None) -> AutoLayout:
    """Return the micro batch of a run on GPUs, within its layout.

    checkpoint: one to resume from, whose micro batch is kept if it fits
    Raises ValueError for a run that is not planned or does not fit.
    """
    options = with_flags(options, **{NAME: 1})
    if options.build.tensor_model_parallel_size > 1 and not options.build.sequence_parallel:
        raise ValueError(f"{FLAG}: tensor parallelism is planned with --sequence_parallel true. Set that too")
    plan = planned(options, (), world, gpu, FLAG, FIX)
    assert gpu.machine is not None
    names = [name for name in vars(plan.layout) if name not in ("gpus", "micro_batch")]
    pins = {name: getattr(plan.layout, name) for name in names} | {"recompute": [plan.layout.recompute]}
    limit = FILLED * (gpu.memory - OUTSIDE)
    result = search(plan.work, world, gpu.machine, limit, pins)
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
    saved = saved_layout(checkpoint).get(NAME) if checkpoint else None
    kept = next((fit for fit in result.plans if fit.layout.micro_batch == saved), None)
    best = kept or _largest(result.plans, plan.work.length / plan.layout.context)
    origin = ", as in the checkpoint" if kept else ""
    size = best.layout.micro_batch
    note = f"{FLAG}: {size}{origin}, for {best.memory.total / GIB:.1f} GiB of each GPU by the plan."
    return AutoLayout({NAME: size}, note)


def _largest(plans: list[Plan], length: float) -> Plan:
    """Return the fastest plan of at most MOST_TOKENS, with the largest micro batch. length: tokens of a sample"""
    useful = [fit for fit in plans if fit.layout.micro_batch * length <= MOST_TOKENS]
    if not useful:
        return min(plans, key=lambda fit: fit.layout.micro_batch)
    fastest = min(fit.seconds for fit in useful)
    return max((fit for fit in useful if fit.seconds <= fastest * SLOWER), key=lambda fit: fit.layout.micro_batch)


def cpu_micro_batch(options: SftOptions, world: int) -> AutoLayout:
    """Return the micro batch of a run without GPUs: a small one, or 1 with pipeline stages, which would idle more."""
    layout = layout_of(options, world)
    share = options.training.global_batch_size // max(layout.data, 1)
    sizes = CPU_MICRO_BATCHES if layout.pipeline == 1 else ()
    size = next((size for size in sizes if share and share % size == 0), 1)
    return AutoLayout({NAME: size}, f"{FLAG}: {size}, without a GPU.")
