"""Flags of a run that the plan finds, and words for its processes: `--plan auto`, `--micro_batch_size`, its default."""

from typing import TYPE_CHECKING

from ..bridge.option_groups import with_flags
from ..tasks.options import CausalLmOptions, PtOptions, SftOptions
from ..tasks.run.resume import newest_checkpoint
from .checks.generation import is_set_by_user
from .checks.model import supported_config
from .flags import UsageError, usage_errors
from .launch import gpu_model, under_torchrun
from .training_launch import TrainingLaunch

if TYPE_CHECKING:
    from ..tasks.plan.auto import AutoLayout
    from ..tasks.plan.run_plan import Gpu

SOURCE = "--plan auto"
MICRO_BATCH = "micro_batch_size"
AUTO = "auto"  # its value until the plan has found a number


def plan_run(
    options: SftOptions, sources: dict[str, str], launch: TrainingLaunch
) -> tuple[SftOptions, list[str], list[str]]:
    """Return the options as planned, the words to append to the command line, and notes for the user.

    Raises UsageError.
    """
    if options.training.plan == AUTO:
        return plan_layout(options, sources, launch)  # chooses the micro batch too
    if options.training.micro_batch_size == AUTO:
        return plan_micro_batch(options, sources, launch)
    if options.training.plan != "off" and not is_set_by_user(MICRO_BATCH, sources):
        return plan_default_micro_batch(options, sources, launch)
    return options, [], []


def plan_layout(
    options: SftOptions, sources: dict[str, str], launch: TrainingLaunch
) -> tuple[SftOptions, list[str], list[str]]:
    """Return the options with the planned layout, the words to append to the command line, and notes for the user.

    The words fix all flags of the layout, so that processes that are started with them plan nothing again. So do the
    sources in args.json.
    Raises UsageError.
    """
    from ..tasks.plan.auto import ALWAYS_SET, FIX, auto_layout

    requested = {name for name in sources if is_set_by_user(name, sources)}
    if options.training.micro_batch_size == AUTO:
        requested -= {MICRO_BATCH}
    if requested.issuperset(ALWAYS_SET):
        return options, [], []
    gpu = _gpu(launch, SOURCE, FIX)
    if gpu is None:
        raise UsageError(f"--plan auto: no GPU is visible. {FIX}.")
    supported_config(options, weights=())
    with usage_errors():
        layout = auto_layout(options, requested, launch.processes.world, gpu, newest_checkpoint(options))
    return _apply(options, sources, layout, SOURCE)


def plan_micro_batch(
    options: SftOptions, sources: dict[str, str], launch: TrainingLaunch
) -> tuple[SftOptions, list[str], list[str]]:
    """Return what `plan_layout` does, for `--micro_batch_size auto`. Raises UsageError."""
    from ..tasks.plan.micro_batch import FIX, auto_micro_batch, cpu_micro_batch

    gpu, world = _gpu(launch, f"--{MICRO_BATCH} auto", FIX), launch.processes.world
    supported_config(options, weights=())
    with usage_errors():
        if gpu:
            micro_batch = auto_micro_batch(options, world, gpu, newest_checkpoint(options))
        else:
            micro_batch = cpu_micro_batch(options, world)
    return _apply(options, sources, micro_batch, f"--{MICRO_BATCH} auto")


def plan_default_micro_batch(
    options: SftOptions, sources: dict[str, str], launch: TrainingLaunch
) -> tuple[SftOptions, list[str], list[str]]:
    """Return what `plan_layout` does, for a run that sets no `--micro_batch_size`."""
    unplanned = options, [], []
    # Processes that plan by themselves, on GPUs or disks that may differ, could choose different sizes.
    if launch.uses_ray or launch.processes.nodes > 1 or under_torchrun() or not options.data.padding_free:
        return unplanned
    # Other tasks have no measured plan (RunPlan.has_measured_activations), whose modules would import torch.
    if type(options) not in (PtOptions, CausalLmOptions) or (gpu := _visible_gpu(launch)) is None:
        return unplanned
    try:
        supported_config(options, weights=())
    except UsageError:  # the run's checks raise it again
        return unplanned
    from ..tasks.plan.micro_batch import default_micro_batch

    micro_batch = default_micro_batch(options, launch.processes.world, gpu, newest_checkpoint(options))
    return _apply(options, sources, micro_batch, "by the plan") if micro_batch else unplanned


def _gpu(launch: TrainingLaunch, flag: str, fix: str) -> "Gpu | None":
    """Return the run's kind of GPU; None without one. Raises UsageError, with the flag and its fix, under Ray."""
    if launch.uses_ray:
        raise UsageError(f"{flag} cannot be used with --use_ray true: the cluster's GPUs are not known. {fix}.")
    return _visible_gpu(launch)


def _visible_gpu(launch: TrainingLaunch) -> "Gpu | None":
    gpus = launch.placement.training
    model = gpu_model(gpus[0]) if gpus else None
    if model is None:
        return None
    from ..tasks.plan.run_plan import Gpu  # imports torch

    return Gpu.here(*model, launch.processes.per_node)


def _apply(
    options: SftOptions, sources: dict[str, str], layout: "AutoLayout", source: str
) -> tuple[SftOptions, list[str], list[str]]:
    from ..tasks.plan.gpu_layout import flag_text

    sources |= dict.fromkeys(layout.flags, source)
    words = [f"--{name}={flag_text(value)}" for name, value in layout.flags.items()]
    return with_flags(options, **layout.flags), words, [layout.note]
