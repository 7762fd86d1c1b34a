"""Reporters of metrics selected by `--report_to`: TensorBoard, wandb, swanlab, mlflow, trackio."""

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Protocol

from ...templates.json_types import JsonObject
from ..options.groups import LoggingOptions

PROJECT = "megaswift"  # where no flag names one
PACKAGES = "wandb", "swanlab", "mlflow", "trackio"


class Reporter(Protocol):
    """Service that receives the scalars of a step. Its methods may raise any exception."""

    name: str

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def require_reporters(options: LoggingOptions) -> None:
    """Raise ImportError if `--report_to` names a package that is not installed."""
    for name in PACKAGES:
        if name in options.report_to and importlib.util.find_spec(name) is None:
            raise ImportError(
                f"--report_to {name}: the package {name} is not installed. Install it (pip install {name}), or remove "
                "the flag: logging.jsonl and TensorBoard's files need no package."
            )


class TensorBoard(Reporter):
    name = "TensorBoard"

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Reporter):
    name = "wandb"

    def __init__(self, options: LoggingOptions, folder: Path, settings: JsonObject):
        import wandb  # pyright: ignore[reportMissingImports]

        name = options.wandb_exp_name or folder.name
        self._run = wandb.init(
            project=options.wandb_project,
            name=name,
            dir=str(folder),
            config=settings,
            id=_run_id(folder),
            resume="allow",
        )
        self._step = 0

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if step < self._step:  # of --eval_command; wandb drops rows of earlier steps
            scalars = scalars | {"eval/checkpoint_step": step}
        self._step = max(step, self._step)
        self._run.log(scalars, step=self._step)

    def close(self) -> None:
        self._run.finish()


class Swanlab(Reporter):
    name = "swanlab"

    def __init__(self, options: LoggingOptions, folder: Path, settings: JsonObject):
        import swanlab  # pyright: ignore[reportMissingImports]

        self._swanlab = swanlab
        name = options.swanlab_exp_name or folder.name
        swanlab.init(
            project=options.swanlab_project, experiment_name=name, logdir=str(folder / "swanlab"), config=settings
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._swanlab.log(scalars, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class Mlflow(Reporter):
    """Run of mlflow, at the server and in the experiment that mlflow's environment variables name."""

    name = "mlflow"
    TAG = "megaswift.run_id"  # by which a resumed run is found

    def __init__(self, folder: Path, settings: JsonObject):
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow, run_id = mlflow, _run_id(folder)
        if not os.environ.get("MLFLOW_EXPERIMENT_NAME") and not os.environ.get("MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(PROJECT)
        known = mlflow.search_runs(filter_string=f"tags.`{self.TAG}` = '{run_id}'", max_results=1, output_format="list")
        if known:
            mlflow.start_run(run_id=known[0].info.run_id)
            return
        mlflow.start_run(run_name=folder.name, tags={self.TAG: run_id})
        mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})  # the shortest limit of servers

    def write(self, step: int, scalars: dict[str, float]) -> None:
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in scalars.items()}  # others are refused
        self._mlflow.log_metrics(allowed, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio(Reporter):
    name = "trackio"

    def __init__(self, folder: Path, settings: JsonObject):
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        trackio.init(project=PROJECT, name=f"{folder.name}-{_run_id(folder)[:6]}", config=settings, resume="allow")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        self._trackio.finish()


def _run_id(folder: Path) -> str:
    """Return a name of the run that is the same when it is resumed."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def reporters(options: LoggingOptions, folder: Path, settings: JsonObject, step: int) -> list[Reporter]:
    """Start the reporters in `--report_to`; TensorBoard is included unless it is `none`.

    settings: the run's configuration. step: last step of the resumed run, or 0.
    """
    started: list[Reporter] = []
    if "none" not in options.report_to:
        events = Path(options.tensorboard_dir) if options.tensorboard_dir else folder / "runs"
        started.append(TensorBoard(events, step))
    if "wandb" in options.report_to:
        started.append(Wandb(options, folder, settings))
    if "swanlab" in options.report_to:
        started.append(Swanlab(options, folder, settings))
    if "mlflow" in options.report_to:
        started.append(Mlflow(folder, settings))
    if "trackio" in options.report_to:
        started.append(Trackio(folder, settings))
    return started
