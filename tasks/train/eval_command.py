"""`--eval_command`: a user's command that evaluates each checkpoint beside the training.

Rank 0 runs it, one checkpoint at a time, in the order of the saves; training goes on. The last line of its standard
output that is a JSON object has the metrics. The checkpoint keeps them in `eval_command.json`, not in its manifest.
"""

import atexit
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..distributed.watchdog import Watchdog
from ..observability.run_logger import RunLog, duration
from ..run.context import Run
from ..run.resume import best_metric, update_run_dir
from ..run.run_dir import EVAL_COMMAND, checkpoints, metrics_of, newest_first, step_of
from ..system.atomic_dir import hidden_path
from ..system.console import color_label
from .callbacks import Callback, StepRecord

CHECKPOINT = "MEGASWIFT_CHECKPOINT"  # environment variable of the command: the checkpoint's folder
POLL = 0.1  # seconds
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
# Variables of the training's processes. A command that finds them would wait for ranks that it does not have.
LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE",
)  # fmt: skip


class CheckpointEvaluation:
    """A process of the command on one checkpoint. Its output goes to files in `folder`."""

    def __init__(self, command: str, checkpoint: Path, folder: Path):
        self.checkpoint, self.start = checkpoint, time.monotonic()
        folder.mkdir(exist_ok=True)
        self.output, self.errors = folder / f"{checkpoint.name}.out", folder / f"{checkpoint.name}.err"
        words = [word.replace("{checkpoint}", str(checkpoint)) for word in shlex.split(command)]
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=command_environment(checkpoint),
                start_new_session=True,  # a signal of the terminal is for the run, which then ends the command
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the command runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the command and its children."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
                return

    def metrics(self) -> dict[str, float] | None:
        """Return the numbers that the command printed as `eval_<key>`; None if it printed no JSON object."""
        return read_metrics(self.output.read_text(encoding="utf-8", errors="replace"))


def command_environment(checkpoint: Path) -> dict[str, str]:
    """Return this process's environment with the checkpoint, and without the launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith(("TORCHELASTIC_", "MEGASWIFT_"))
    }
    return kept | {CHECKPOINT: str(checkpoint)}


def read_metrics(output: str) -> dict[str, float] | None:
    """Return the numbers of the last line that is a JSON object, by name as `eval_<key>`; None without such a line."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                return {
                    f"eval_{key.removeprefix('eval_')}": float(value)
                    for key, value in content.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
    return None


class EvalCommandCallback(Callback):
    """Callback of `--eval_command`: starts the command on complete checkpoints, and logs its metrics.

    Without the flag, and on ranks other than 0, the methods do nothing, except that `finish` waits for rank 0.
    """

    def __init__(self, run: Run, watchdog: Watchdog, log: RunLog):
        options = run.options.checkpoint
        self._run, self._watchdog, self._log = run, watchdog, log
        self._command, self._timeout = options.eval_command, options.eval_command_timeout
        self._waiting: deque[Path] = deque()
        self._current: CheckpointEvaluation | None = None
        self._lock = threading.Lock()  # a checkpoint that is written in the background is added by its thread
        if self._command:
            self._store: Any = PrefixStore("eval_command", _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
            atexit.register(self.stop)
        if run.resumed:  # and it ended before its commands
            for checkpoint in checkpoints(run.folder):
                if step_of(checkpoint) <= run.resumed.step and not (checkpoint / EVAL_COMMAND).exists():
                    self.add(checkpoint)

    def add(self, checkpoint: Path) -> None:
        """Run the command on a complete checkpoint, after those that were added before."""
        if self._command and dist.get_rank() == 0:
            with self._lock:
                self._waiting.append(checkpoint)

    def pending(self) -> set[Path]:
        """Return the checkpoints that the command reads or will read, which must stay."""
        with self._lock:
            return {*self._waiting, *([self._current.checkpoint] if self._current else [])}

    def pre_step(self, step: int) -> None:
        self._poll()

    def post_step(self, record: StepRecord) -> None:
        self._poll()

    def finish(self) -> None:
        """Wait for the commands of all checkpoints. Every rank calls this."""
        if not self._command:
            return
        if dist.get_rank() == 0:
            if self.pending():
                self._log.note("Waiting for --eval_command")
            while self.pending():
                self._poll()
                self._watchdog.tick()  # the command has its own limit of time
                time.sleep(POLL)
            self._store.set("finished", "")
        while not self._store.check(["finished"]):
            self._watchdog.tick_while_waiting()
            time.sleep(POLL)

    def stop(self) -> None:
        """End a running command, and forget those that wait. A run that resumes from the checkpoint runs it again."""
        with self._lock:
            self._waiting.clear()
            current, self._current = self._current, None
        if current:
            current.end()

    def _poll(self) -> None:
        """Start the next command, or log the metrics of one that has ended."""
        current = self._current
        if current is None:
            self._start_next()
        elif (code := current.exit_code) is not None:
            self._close(current, code)
            self._start_next()
        elif time.monotonic() - current.start > self._timeout:
            current.end()
            self._warn(current.checkpoint, f"ended after {self._timeout:g} s (--eval_command_timeout)")
            self._forget()

    def _start_next(self) -> None:
        with self._lock:
            if not self._waiting or not self._command:
                return
            checkpoint = self._waiting.popleft()
            try:
                self._current = CheckpointEvaluation(self._command, checkpoint, self._run.folder / "eval_command")
                return
            except OSError as error:  # the program is gone, the disk is full
                failure = error
        self._warn(checkpoint, f"not started: {failure}")

    def _forget(self) -> None:
        with self._lock:
            self._current = None

    def _close(self, current: CheckpointEvaluation, code: int) -> None:
        checkpoint, seconds = current.checkpoint, time.monotonic() - current.start
        try:
            if code:
                self._warn(
                    checkpoint, f"ended with code {code} after {duration(seconds)}. Its errors: {current.errors}"
                )
                return
            self._record(checkpoint, current.metrics(), current.output)
        except OSError as error:
            self._warn(checkpoint, f"its metrics could not be kept: {error}")
        finally:
            self._forget()

    def _record(self, checkpoint: Path, metrics: dict[str, float] | None, output: Path) -> None:
        """Log metrics and write them into the checkpoint; then `best` may be another one."""
        own = metrics_of(checkpoint)
        for name in sorted(set(own) & set(metrics or {})):
            self._warn(checkpoint, f"{name} is the evaluation's own metric, and is left out. Print another name")
        metrics = {name: value for name, value in (metrics or {}).items() if name not in own}
        temporary = hidden_path(checkpoint / EVAL_COMMAND)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        temporary.write_text(json.dumps(finite) + "\n", encoding="utf-8")
        temporary.replace(checkpoint / EVAL_COMMAND)
        if metrics:
            self._log.evaluation(step_of(checkpoint), metrics)
        wanted = best_metric(self._run.options)
        if self._run.options.checkpoint.metric_for_best_model and wanted not in {**own, **metrics}:
            printed = ", ".join(metrics) or "no numbers as a JSON object"
            self._warn(checkpoint, f"--metric_for_best_model {wanted}: it printed {printed} ({output})")
        newest = next(newest_first([self._run.folder]))
        update_run_dir(self._run.options, newest, in_use=self.pending())

    def _warn(self, checkpoint: Path, problem: str) -> None:
        self._log.note(color_label(f"warning: --eval_command on {checkpoint.name}: {problem}", sys.stdout))
