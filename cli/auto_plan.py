"""`--plan auto`: the layout that the plan finds, as flags of the run and words for its processes."""

from ..bridge.option_groups import with_flags
from ..tasks.options import SftOptions
from ..tasks.run.resume import newest_checkpoint
from .checks.generation import is_set_by_user
from .checks.model import supported_config
from .flags import UsageError, usage_errors
from .launch import gpu_model
from .training_launch import TrainingLaunch

SOURCE = "--plan auto"


def plan_layout(
    options: SftOptions, sources: dict[str, str], launch: TrainingLaunch
) -> tuple[SftOptions, list[str], list[str]]:
    """Return the options with the planned layout, the words to append to the command line, and notes for the user.

    The words fix all flags of the layout, so that processes that are started with them plan nothing again. So do the
    sources in args.json.
    Raises UsageError.
    """
    from ..tasks.plan.auto import FIX, FLAGS, auto_layout
    from ..tasks.plan.run_plan import Gpu

    requested = {name for name in sources if is_set_by_user(name, sources)}
    if requested.issuperset(FLAGS.values()):
        return options, [], []
    if launch.uses_ray:
        raise UsageError(f"--plan auto cannot be used with --use_ray true: the cluster's GPUs are not known. {FIX}.")
    gpus = launch.placement.training
    model = gpu_model(gpus[0]) if gpus else None
    if model is None:
        raise UsageError(f"--plan auto: no GPU is visible. {FIX}.")
    supported_config(options, weights=())
    gpu, checkpoint = Gpu(*model, launch.processes.per_node), newest_checkpoint(options)
    with usage_errors():
        layout = auto_layout(options, requested, launch.processes.world, gpu, checkpoint)
    sources |= dict.fromkeys(layout.flags, SOURCE)
    words = [f"--{name}={str(value).lower()}" for name, value in layout.flags.items()]
    return with_flags(options, **layout.flags), words, [layout.note]
