"""Report of `--dry_run true`: options, layout, steps, and the command that starts the processes."""

from collections.abc import Mapping
from pathlib import Path

from ..bridge.option_groups import flag_value, flag_values
from ..tasks.options import GrpoOptions, SftOptions
from ..tasks.options.rollout import engine_kind
from ..tasks.plan.gpus import GPUS
from ..tasks.plan.run_plan import ASSUMED_IMAGES, TEXT, Gpu, Images, check_fits, memory_line, time_line
from ..tasks.run.args_json import SECRET
from ..tasks.run.planning import DataPlan, ProcessLayout, plan_data
from ..tasks.run.resume import requested_checkpoint
from ..tasks.system.memory import GIB
from ..templates.plural import plural
from .checks.common import check_writable
from .flags import flags_of, show
from .launch import gpu_model, shown_command, torchrun_command
from .training_launch import TrainingLaunch

WITHOUT_GPU = GPUS["h100"].name, GPUS["h100"].memory * GIB  # GPU of the time that is shown where there is none


def report(
    argv: list[str],
    options: SftOptions,
    sources: Mapping[str, str],
    layout: ProcessLayout,
    launch: TrainingLaunch,
) -> str:
    """Return the report. Tokenizes the dataset into the token cache, and reads the headers of the weights.

    argv: program, command, flags
    Raises the errors that the run would raise about data, weights and output folder.
    """
    check_writable(options)
    _check_weights(options)
    _check_fits(options, layout, launch)
    data = plan_data(options, layout)
    notes = [*_check_rewards(options, data), *_hub_adapter_notes(options)]
    _check_vocabularies(options, data)
    samples_per_pass = options.training.micro_batch_size * layout.data
    training = options.training
    command = torchrun_command(launch.processes, _without_dry_run(argv))
    images, gpu = _images(data), _gpu(launch)
    lines = [
        *_option_lines(options, sources),
        "",
        "Data",
        *(f"  {line}" for line in data.prepared.report.splitlines()),
        *(f"  note: {note}" for note in notes),
        "",
        "Run",
        f"  layout            {layout}",
        f"  data parallel     {layout.data}",
        f"  global batch      {training.global_batch_size} = {training.micro_batch_size} x DP {layout.data} x "
        f"{plural(training.global_batch_size // samples_per_pass, 'micro batch')}",
        f"  steps per epoch   {data.steps_per_epoch if data.steps_per_epoch is not None else 'unknown: streaming'}",
        f"  steps             {data.steps}",
        f"  memory            {memory_line(options, layout.world, images, gpu.memory)}",
        *_engine_lines(options, layout, images, launch),
        *_time_lines(options, layout, images, gpu, data),
        f"  command           {shown_command(command, launch.settings)}",
        *_server_lines(launch),
        "",
        "Dry run: nothing was trained.",
    ]
    return "\n".join(lines)


def _images(data: DataPlan) -> Images:
    """Return the images of the dataset. Those of a stream are not known."""
    from ..templates.dataset.store import TokenStore

    store = data.prepared.train
    if not isinstance(store, TokenStore):
        return ASSUMED_IMAGES
    visual_tokens = int(store.visual_tokens.sum())
    if not visual_tokens:
        return TEXT
    return Images(visual_tokens / int(store.lengths.sum()), visual_tokens / sum(store.media_counts().values()))


def _gpu(launch: TrainingLaunch) -> Gpu:
    """Return the GPU of the run; an H100 where there is none."""
    gpus = launch.placement.training
    return Gpu(*(gpu_model(gpus[0]) if gpus else None) or WITHOUT_GPU, launch.processes.per_node)


def _engine_lines(options: SftOptions, layout: ProcessLayout, images: Images, launch: TrainingLaunch) -> list[str]:
    """Return vLLM's memory in the training processes. Raises ValueError if it cannot fit on the GPUs that are here."""
    from ..tasks.rollout.memory_budget import planned_engine_memory

    if type(options) is not GrpoOptions or engine_kind(options.engine) != "vllm":
        return []
    gpu = _gpu(launch)
    try:
        budget = planned_engine_memory(options, layout.world, gpu.memory, images)
    except ValueError:
        if launch.placement.training and options.training.plan != "off":
            raise
        return [f"  generation        by the plan, vLLM does not fit beside training on {gpu.name}"]
    return [f"  generation        by vLLM with {budget}, by the plan, on {gpu.name}"] if budget else []


def _time_lines(options: SftOptions, layout: ProcessLayout, images: Images, gpu: Gpu, data: DataPlan) -> list[str]:
    """Return the expected time of the run."""
    from ..templates.dataset.store import TokenStore

    store = data.prepared.train
    document = round(store.lengths.mean()) if isinstance(store, TokenStore) else None
    line = time_line(options, layout.world, images, document, gpu, data.steps)
    return [f"  time              {line}"] if line else []


def _check_fits(options: SftOptions, layout: ProcessLayout, launch: TrainingLaunch) -> None:
    if options.training.plan == "off" or not launch.placement.training:
        return
    if model := gpu_model(launch.placement.training[0]):
        check_fits(options, layout.world, Gpu.here(*model, launch.processes.per_node))


def _server_lines(launch: TrainingLaunch) -> list[str]:
    """Return the placement of training and rollout servers, with the servers' commands."""
    if not launch.servers:
        return []
    commands = [shown_command(["swift", *server.words(port=0)], server.settings()) for server in launch.servers]
    return [
        f"  training          {plural(launch.processes.world, 'process')}",
        *(f"  {server.name}: {command}" for server, command in zip(launch.servers, commands, strict=True)),
    ]


def _check_weights(options: SftOptions) -> None:
    """Check the weights in local folders against their config.json. The run downloads those of hub ids."""
    from ..bridge.checkpoint.pretrained import check_weights

    models = [] if requested_checkpoint(options) else ["model", "critic_model"]  # else the checkpoint has them
    for name in ("ref_model", "teacher_model", "reward_model", *models):
        for folder in _local_folders(options, name):
            check_weights(folder, flag=f"--{name}")


def _hub_adapter_notes(options: SftOptions) -> list[str]:
    """Return a note for each adapter that is not a local folder: a dry run downloads none."""
    names = [name for name in options.adapters if not Path(name).expanduser().is_dir()]
    return [
        f"--adapters {name}: no such folder. The run downloads it from the hub; a dry run does not check it."
        for name in names
    ]


def _check_rewards(options: SftOptions, data: DataPlan) -> list[str]:
    """Return notes on columns that reward functions need and some rows lack. Raises ValueError if no row has them."""
    if not isinstance(options, GrpoOptions):
        return []
    from ..tasks.rewards.load import signatures
    from ..tasks.rewards.unscored import check_columns

    return check_columns(signatures(options.rewards), data.prepared, evaluates=options.training.eval_iters != 0)


def _check_vocabularies(options: SftOptions, data: DataPlan) -> None:
    from ..tasks.run.vocabulary import check_vocabulary

    for name in (
        "ref_model", "mcore_ref_model", "teacher_model", "mcore_teacher_model", "critic_model", "mcore_critic_model",
    ):  # fmt: skip
        for folder in _local_folders(options, name):
            check_vocabulary(data.tokenizer, folder, f"--{name} {flag_value(options, name)}")


def _local_folders(options: SftOptions, *names: str) -> list[Path]:
    """Return the existing folders of these options."""
    folders = [Path(value).expanduser() for name in names if (value := flag_value(options, name, None))]
    return [folder for folder in folders if folder.is_dir()]


def _option_lines(options: SftOptions, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each option that is set, and the number of options at their default."""
    flags = [flag for flag in flags_of(type(options)).values() if flag.name != "dry_run"]
    changed = [flag for flag in flags if sources.get(flag.name, "default") != "default"]
    lines, values = ["Options"], flag_values(options)
    for flag in changed:
        content = values[flag.name]
        value = "..." if flag.name in SECRET and content else show(content) or "-"
        lines.append(f"  {flag.name:<44}{value}   ({sources[flag.name]})")
    unchanged = plural(len(flags) - len(changed), "option")
    return [*lines, f"  {unchanged} at the default: see docs/flags.md, or args.json in the run's folder."]


def _without_dry_run(argv: list[str]) -> list[str]:
    words: list[str] = []
    for word in argv:
        is_value = words and words[-1].replace("-", "_") == "__dry_run"
        if is_value:
            words.pop()
        if not (is_value and word.lower() in ("true", "1", "yes")):
            words.append(word)
    return [word for word in words if word.replace("-", "_").partition("=")[0] != "__dry_run"]
