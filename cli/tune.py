"""`megatron tune`: short trials of the layouts that `megatron plan` puts first, and a config file of the fastest.

megatron tune sft --model Qwen/Qwen3-8B --dataset train.jsonl --packing true --max_length 8192 --trials 4

The flags are those of the run. Each trial is that run in a layout of the plan, for a few steps; it saves nothing.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..bridge.option_groups import flag_value
from ..tasks.options import SftOptions
from ..tasks.options.tune import TuneOptions
from ..tasks.run.args_json import SECRET
from ..tasks.run.trial import VARIABLE
from ..templates.plural import plural
from .auto_plan import AUTO, MICRO_BATCH
from .checks.common import output_folder
from .checks.generation import is_set_by_user
from .checks.model import supported_config
from .flags import UsageError, flags_of, usage_errors
from .launch import HIDDEN, end_with_parent, gpu_model, under_torchrun
from .parse import CONFIG_FILE, split_words
from .training_launch import TrainingLaunch

if TYPE_CHECKING:
    from ..tasks.plan.run_plan import Gpu
    from ..tasks.plan.search import Plan
    from ..tasks.plan.trials import Trial

NAME = "megatron tune"
CONFIG, RESULTS = "best.yaml", "trials.json"
WITHOUT_GPU = "NVIDIA H100"  # its speed orders the layouts for a CPU
MAIN = sys.executable, "-m", "megaswift.cli.main"  # words that start a trial
GRACE = 20.0  # seconds for a trial to end on SIGTERM
# Flags of a run that its trials do not have: where it ends, what it reads before, and whom it tells.
LEFT_OUT = (
    "num_train_epochs", "resume_from_checkpoint", "save_steps", "save_strategy", "eval_command", "report_to",
    "push_to_hub", "profile", "plan", "exit_duration_in_mins", "dry_run",
)  # fmt: skip


def split_tune_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of `megatron tune` itself, and those of the run. argv: without program and command"""
    tune_words: list[str] = []
    if argv and not argv[0].startswith("-") and not argv[0].endswith(CONFIG_FILE):
        tune_words, argv = [f"--command={argv[0]}"], argv[1:]
    pairs, config = split_words(argv)
    names, words = flags_of(TuneOptions), list[str]()
    for name, values in pairs:
        target = tune_words if name in names else words
        target += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return tune_words, [*(["--config", config] if config else []), *words]


def run(tune: TuneOptions, options: SftOptions, sources: Mapping[str, str], variables: Mapping[str, str]) -> int:
    """Run the trials of a run. Return 0 if one was measured. Raises UsageError.

    variables: that the run's config file has set
    """
    from ..tasks.plan.auto import layouts_to_try
    from ..tasks.plan.trials import best_of, table

    launch = _launch(options)
    supported_config(options, weights=())
    requested = {name for name in sources if is_set_by_user(name, sources)}
    if options.training.micro_batch_size == AUTO:
        requested -= {MICRO_BATCH}
    gpu, world = _gpu(launch), launch.processes.world
    with usage_errors():
        plan, candidates = layouts_to_try(options, requested, world, gpu, tune.trials, NAME)
    folder = _new_folder(tune, options)
    flags = {name: flag_value(options, name) for name in sorted(requested) if name not in SECRET}
    secrets = [f"--{name}={value}" for name in SECRET if (value := flag_value(options, name, None))]
    _end_on_signals()
    trials: list[Trial] = []
    for number, candidate in enumerate(candidates, 1):
        print(f"trial {number} of {len(candidates)}: {_described(candidate)}", flush=True)
        trials.append(_try(tune, flags, secrets, candidate, folder / f"trial-{number}.log"))
        print(f"  {_outcome(trials[-1])}", flush=True)
        facts = {"command": tune.command, "processes": world, "device": gpu.name if launch.gpus else "CPU"}
        rows = [trial.as_json(plan.work) for trial in trials]
        (folder / RESULTS).write_text(json.dumps(facts | {"trials": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"\n{table(plan.work, trials)}\n")
    if not launch.gpus:
        print(f"The plan is for {WITHOUT_GPU}s: there is no GPU here.")
    print(f"Measurements and logs: {folder}")
    if not (best := best_of(trials)):
        print("No layout could be measured: the logs say why.")
        return 1
    path = folder / CONFIG
    made = f"# By {NAME}, {plural(world, 'process')}: megatron {tune.command} THIS_FILE\n"
    environment = {"ENV": {**variables, "NPROC_PER_NODE": world}}
    path.write_text(made + _config(environment | flags | best.plan.layout.settings()), encoding="utf-8")
    print(f"The fastest: megatron {tune.command} {path}")
    return 0


def _launch(options: SftOptions) -> TrainingLaunch:
    if under_torchrun():
        raise UsageError(f"{NAME}: starts the processes of its trials. Run it without torchrun.")
    launch = TrainingLaunch.of(options)
    if launch.uses_ray:
        raise UsageError(f"--use_ray true: trials run on this machine. Remove it for {NAME}.")
    if launch.processes.nodes > 1:
        raise UsageError(f"NNODES={launch.processes.nodes}: trials run on this machine alone. Unset it for {NAME}.")
    return launch


def _gpu(launch: TrainingLaunch) -> "Gpu":
    """Return the kind of GPU whose plan orders the layouts."""
    from ..tasks.plan.run_plan import Gpu
    from ..tasks.system.memory import available_host_memory

    per_node = launch.processes.per_node
    if not launch.gpus:
        return Gpu(WITHOUT_GPU, available_host_memory() / per_node, per_node, host_memory=0)
    model = gpu_model(launch.placement.training[0])
    if model is None:
        raise UsageError(f"{NAME}: nvidia-smi does not say which GPUs these are. Try layouts by hand.")
    return Gpu.here(*model, per_node)


def _new_folder(tune: TuneOptions, options: SftOptions) -> Path:
    name = tune.trial_dir or output_folder(options) / f"tune-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(name).expanduser().absolute()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--trial_dir {folder}: cannot be made ({error.strerror}). Set a new folder.") from None
    return folder


def _try(tune: TuneOptions, flags: Mapping[str, Any], secrets: Sequence[str], plan: "Plan", log: Path) -> "Trial":
    """Run a trial to its end, and leave only its log."""
    from ..tasks.plan.trials import judge, read_measurement

    # A short path: sockets of data loaders lie there too.
    work = Path(tempfile.mkdtemp(prefix="megaswift-trial-"))
    try:
        file, output = work / "trial.yaml", work / "run"
        changes = {
            "train_iters": tune.trial_steps, "eval_iters": 0, "logging_steps": 1, "output_dir": str(output),
            "add_version": False, "report_to": [], "plan": "off",
        }  # fmt: skip
        kept = {name: value for name, value in flags.items() if name not in LEFT_OUT}
        file.write_text(_config(kept | plan.layout.settings() | changes), encoding="utf-8")
        command = [*MAIN, "megatron", tune.command, str(file)]
        environment = os.environ | {VARIABLE: "1", "TMPDIR": str(work), HIDDEN: json.dumps(list(secrets))}
        with log.open("wb") as stream:
            code = _wait(command, environment, stream.fileno(), tune.trial_timeout)
        text = log.read_text(encoding="utf-8", errors="replace")
        return judge(plan, code, text, read_measurement(output / "logging.jsonl"))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _wait(command: Sequence[str], environment: Mapping[str, str], output: int, timeout: float) -> int | None:
    """Return the exit code of a command, None if it took too long. Its processes have ended in any case."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_on_signals() -> None:
    """Have SIGTERM and SIGHUP end the trial too, as Ctrl-C does."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _described(plan: "Plan") -> str:
    from ..tasks.plan.table import RECOMPUTED

    layout = plan.layout
    extras = [f"micro batch {layout.micro_batch}"]
    extras += [f"{RECOMPUTED[layout.recompute]} recomputed"] * (layout.recompute != "none")
    extras += [f"activations of {plural(layout.offloaded_layers, 'layer')} on the host"] * (layout.offloaded_layers > 0)
    extras += ["AdamW on the host"] * layout.offloads
    return ", ".join([str(layout) if layout.gpus > 1 else "one process", *extras])


def _outcome(trial: "Trial") -> str:
    if measurement := trial.measurement:
        speed = f"{measurement.tokens_per_second:,.0f} tokens/s/GPU, {measurement.seconds:.2f} s/step"
        return f"{speed}, {measurement.memory_gib:.1f} GiB"
    return f"{trial.result}: {trial.reason}" if trial.reason else trial.result


def _config(flags: Mapping[str, Any]) -> str:
    """Return flags as a config file."""
    import yaml

    values = {name: value for name, value in flags.items() if value is not None}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
