"""Log of a run: a line and a JSON row every few steps, plots, and a progress bar on a terminal.

`RunLog` writes in the run's folder `logging.jsonl` (one JSON object per line), `runs/` (TensorBoard) and `images/*.png`
(curves.py). A line on the terminal has a few of the numbers. The keys of logging.jsonl are a stable interface:

    step, max_steps   optimizer steps done, and of the whole run
    loss, grad_norm, learning_rate, and the task's metrics, as passed to `train`
    tokens            trained tokens so far over all ranks, without padding
    tokens_per_second_per_gpu, tflops_per_gpu, mfu, seconds_per_step
                      rates since the previous row (a GPU is a process, on a CPU); mfu is a share of the chip's dense
                      bf16 peak, null where that is unknown. flops.py counts the FLOPs
    memory_gib        peak memory of this process: of its GPU (without what a sleeping vLLM has freed), or of the host
    data_wait         seconds that a step waited for its data, mean since the previous row
    elapsed, eta      seconds since the start, and the estimate to the end

    skipped_steps     steps so far whose update was skipped as a spike, if any

A row of an evaluation has step, max_steps, eval_loss (and the task's metrics) and elapsed; one of --eval_command has
its numbers, as eval_<key>, and comes later than the checkpoint's step; one of a checkpoint has save_wait, the seconds
that training waited for it. The last row is the summary. Resuming a run removes the rows of
later steps than the checkpoint's, which will be repeated.
"""

import contextlib
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ...templates.json_types import JsonObject
from ...templates.plural import plural
from ..options.groups import LoggingOptions
from ..system.append_file import AppendFile
from ..system.atomic_dir import os_error_hints
from ..system.console import GREEN, color_label, colorize, columns, file_size
from .reporters import reporters, require_reporters
from .throughput import Meter, Waiting


@dataclass(frozen=True)
class Start:
    """Initial state of a log; all 0 for a new run."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0  # seconds
    waiting: Waiting | None = None
    spikes: int = 0


class ThinnedRows:
    """Equidistant sample of at most `most` rows: every row, then every 2nd, then every 4th, ..."""

    def __init__(self, most: int = 4000):
        self.rows: list[JsonObject] = []
        self._most, self._every, self._added = most, 1, 0

    def add(self, row: JsonObject) -> None:
        if self._added % self._every == 0:
            self.rows.append(row)
        self._added += 1
        if len(self.rows) > self._most:
            self.rows, self._every = self.rows[::2], 2 * self._every


class RunLog:
    """Log of a run. With `folder` None, as on all processes but rank 0, each method does nothing.

        log = RunLog(folder, options, max_steps=100, chip_peak_flops=peak_flops(name), world_size=8)
        log.step(tokens, flops, data_wait)                  # each step
        if log.due(step): log.train(step, {"loss": ...})    # after fetching the metrics from the device
        with log.meter.paused(): ...                        # evaluations and checkpoints
        log.evaluation(step, {"eval_loss": ...})
        log.close({"last_checkpoint": ...})

    `settings`: the run's configuration for the reporters.
    `six_n`: FLOPs per token by the usual estimate, 6 x parameters, printed beside the exact count at the end.
    Raises ImportError on every process where `--report_to` names a package that is not installed.
    """

    def __init__(
        self,
        folder: Path | None,
        options: LoggingOptions,
        max_steps: int,
        chip_peak_flops: float | None,
        world_size: int,
        *,
        start: "Start | None" = None,
        six_n: float | None = None,
        settings: JsonObject | None = None,
    ):
        self.folder = folder
        self.max_steps = max_steps
        self.logging_steps = options.logging_steps
        self._on_gpu = chip_peak_flops is not None or _has_gpu()
        self._six_n = six_n
        self._phase = ""  # beside the progress bar
        self._rows: dict[str, ThinnedRows] = {}  # for the plots, by kind
        start = start or Start()
        self._step = start.step
        self.spikes = start.spikes  # steps whose update was skipped
        require_reporters(options)
        self._reporters = reporters(options, folder, settings or {}, start.step) if folder else []
        # Last, since its clock starts now and the reporters take a while.
        self.meter = Meter(world_size, chip_peak_flops, start.tokens, start.waiting)
        self._start = time.perf_counter() - start.elapsed
        if folder is None:
            return
        if start.step:
            for row in _rows_until(start.step, folder / "logging.jsonl"):
                is_evaluation = any(name.startswith("eval_") for name in row)
                self._add_row(row, "save" if "save_wait" in row else "eval" if is_evaluation else "train")
        self._file = AppendFile(folder / "logging.jsonl", self._warn)
        resizes = bool(columns(sys.stderr))
        self._bar = tqdm(
            total=max_steps, initial=start.step, desc="Train", dynamic_ncols=resizes, disable=not sys.stderr.isatty()
        )

    def due(self, step: int) -> bool:
        """Return whether to log this step (counted from 1): the first, the last, and every `--logging_steps`."""
        return step in (1, self.max_steps) or step % self.logging_steps == 0

    def step(
        self, tokens: int, flops: float, data_wait: float, ended: float | None = None, waiting: Waiting | None = None
    ) -> None:
        """Record a step; the arguments are those of Meter.step."""
        if self.folder is None:
            return
        self.meter.step(tokens, flops, data_wait, ended, waiting)
        self._step += 1
        self._bar.update()

    def train(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics with the rates since the last call. A metric replaces a rate of the same name."""
        if self.folder is None:
            return
        rates = self.meter.window()
        row = {"step": step, "max_steps": self.max_steps, **metrics, "tokens": self.meter.tokens, **rates}
        from ..system.memory import memory_gib  # here, because it imports torch and cli/ imports this file

        row |= {"memory_gib": memory_gib(), "elapsed": self.elapsed()}
        row["eta"] = (rates["seconds_per_step"] or 0.0) * (self.max_steps - step)
        row |= metrics | ({"skipped_steps": self.spikes} if self.spikes else {})
        self._write(row, "train")
        self.note(train_line(row, on_gpu=self._on_gpu))

    def spike(self, step: int) -> None:
        """Count a step whose update was skipped because of its loss or gradient norm."""
        self.spikes += 1
        self.note(
            f"step {step}: update skipped, loss or gradient norm is a spike (--loss_spike_sigma; {self.spikes} so far)"
        )

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation's metrics, including `eval_loss`."""
        if self.folder is None:
            return
        row = {"step": step, "max_steps": self.max_steps, **metrics, "elapsed": self.elapsed()}
        self._write(row, "eval")
        fields = [
            f"step {step}/{self.max_steps}",
            *([f"eval_loss {loss:.4f}"] if (loss := metrics.get("eval_loss")) else []),
        ]
        fields += task_fields({key: value for key, value in metrics.items() if key != "eval_loss"})
        self.note("  ".join([*fields, duration(row["elapsed"])]))

    def saved(self, step: int, paths: dict[str, Path], waited: float, *, being_written: bool) -> None:
        """Log a checkpoint that was saved, or is being written; training waited `waited` seconds for it."""
        if self.folder is None:
            return
        self._write({"step": step, "max_steps": self.max_steps, "save_wait": waited, "elapsed": self.elapsed()}, "save")
        if being_written:
            self.note(f"Writing {paths['checkpoint'].name} in the background (training waited {waited:.1f} s)")
        else:
            self.written(paths, waited)

    def written(self, paths: dict[str, Path], seconds: float) -> None:
        """Print that a checkpoint is complete."""
        for path in paths.values() if self.folder else ():
            size = file_size(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
            self.note(f"{colorize(f'Saved {path.name}', GREEN, sys.stdout)} ({size}, {seconds:.1f} s): {path}")

    def show_phase(self, phase: str | None) -> None:
        """Show beside the progress bar what the run does, such as `saving checkpoint-10`; nothing for a plain step."""
        if self.folder is None or self._bar.disable:
            return
        text = "" if phase is None or STEP.fullmatch(phase) else phase
        if text != self._phase:
            self._phase = text
            self._bar.set_postfix_str(text)

    def note(self, text: str) -> None:
        """Print text above the progress bar, or as a plain line."""
        if self.folder is None:
            return
        if self._bar.disable:
            print(text, file=sys.stdout, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def draw(self, *, overview_only: bool = False) -> list[Path]:
        """Draw the plots so far, or only the overview (less than a second); return their paths."""
        if self.folder is None:
            return []
        rows = sorted((row for thinned in self._rows.values() for row in thinned.rows), key=lambda row: row["step"])
        try:
            from .curves import draw  # numpy and matplotlib

            title = f"{self.folder.parent.name}/{self.folder.name}"
            return draw(rows, self.folder / "images", title, overview_only=overview_only)
        except Exception as error:  # of any kind: a plot must not end a run
            self._warn(f"warning: curves could not be drawn: {error!r}")
            return []

    def _warn(self, text: str) -> None:
        self.note(color_label(text, sys.stdout))

    def close(self, summary: JsonObject) -> None:
        """Write the summary as the last row, draw the plots, and print the speed of the run."""
        if self.folder is None:
            return
        self._bar.set_postfix_str("")
        self._bar.close()
        rates = self.meter.total()
        pictures = self.draw()
        summary = {"step": self._step, "max_steps": self.max_steps, **summary, "tokens": self.meter.tokens, **rates}
        self._file.write(_json({**summary, "elapsed": self.elapsed()}))
        self._file.close()
        for reporter in self._reporters:
            try:
                reporter.close()
            except Exception as error:
                self._warn(f"warning: {reporter.name} could not be closed: {error!r}")
        self.note(
            f"{plural(self.meter.tokens, 'token')} in {duration(self.elapsed())}; after the first step "
            f"{self._speed(rates)}"
        )
        if pictures:
            self.note(f"Curves: {pictures[0]}, with one picture per metric beside it")

    def _speed(self, rates: dict[str, float | None]) -> str:
        text = _rates_text(rates, on_gpu=self._on_gpu)
        if self._six_n and self._on_gpu:
            tflops = (rates["tokens_per_second_per_gpu"] or 0.0) * self._six_n / 1e12
            peak = self.meter.chip_peak_flops
            text += f" (by 6ND {tflops:.4g} TFLOP/s/GPU" + (f", MFU {tflops * 1e12 / peak:.1%})" if peak else ")")
        return text

    def elapsed(self) -> float:
        """Return the seconds of the whole run, including those before a resume."""
        return time.perf_counter() - self._start

    def _write(self, row: JsonObject, group: str) -> None:
        self._add_row(row, group)
        self._file.write(_json(row))
        scalars = {key: value for key, value in row.items() if value is not None and key not in ("step", "max_steps")}
        named = {f"{group}/{key.removeprefix('eval_')}": value for key, value in scalars.items()}
        for reporter in list(self._reporters):
            try:
                reporter.write(row["step"], named)
            except Exception as error:  # an unreachable service, a full disk
                self._reporters.remove(reporter)
                self._warn(f"warning: {reporter.name} failed and is disabled: {error!r}")

    def _add_row(self, row: JsonObject, group: str) -> None:
        self._rows.setdefault(group, ThinnedRows()).add(row)


def train_line(row: JsonObject, *, on_gpu: bool) -> str:
    """Return a row of logging.jsonl as a line with the most important numbers."""
    fields = [f"step {row['step']}/{row['max_steps']}"]
    if "loss" in row:
        fields.append(f"loss {row['loss']:.4f}")
    if "grad_norm" in row:
        fields.append(f"grad norm {row['grad_norm']:.3f}")
    if "learning_rate" in row:
        fields.append(f"lr {row['learning_rate']:.3e}")
    fields += task_fields({key: value for key, value in row.items() if key not in COMMON})
    fields += [_rates_text(row, on_gpu=on_gpu), f"{row['memory_gib']:.2f} GiB"]
    if on_gpu or row["data_wait"] > LONG_WAIT * row["seconds_per_step"]:
        fields.append(f"data wait {row['data_wait']:.3f} s")
    fields.append(f"left {duration(row['eta'])}")
    return "  ".join(fields)


COMMON = {
    "step", "max_steps", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second_per_gpu", "tflops_per_gpu",
    "mfu", "seconds_per_step", "memory_gib", "data_wait", "elapsed", "eta",
}  # fmt: skip
STEP = re.compile(r"(before |data of )?step \d+")  # phases that are not shown
LONG_WAIT = 0.05  # share of a step
SHORT_NAMES = {"rewards/margins": "margin", "rewards/accuracies": "accuracy", "completions/mean_length": "length"}
GENERATION_METRICS = ("reward", "kl", "completions/mean_length")


def task_fields(metrics: dict[str, float]) -> list[str]:
    """Return the few task metrics for a log line, as `name value`."""
    plain = {key.removeprefix("eval_"): (key, value) for key, value in metrics.items()}
    generates = any(name.startswith("completions/") for name in plain)
    shown = GENERATION_METRICS if generates else [name for name in plain if "/" not in name or name in SHORT_NAMES]
    fields = []
    for name in shown:
        if name in plain:
            key, value = plain[name]
            prefix = "eval_" if key.startswith("eval_") else ""
            fields.append(f"{prefix}{SHORT_NAMES.get(name, name)} {value:.4g}")
    return fields


def _rates_text(rates: JsonObject, *, on_gpu: bool) -> str:
    text = f"{rates['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU"
    if not on_gpu:  # not meaningful on a CPU
        return text
    mfu = "" if rates["mfu"] is None else f"  MFU {rates['mfu']:.1%}"
    return f"{text}  {rates['tflops_per_gpu']:.4g} TFLOP/s/GPU{mfu}"


def duration(seconds: float) -> str:
    """Return seconds as text: `3725.0` -> `1h 2m 5s`."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}h {minute}m {second}s" if hour else f"{minute}m {second}s" if minute else f"{second}s"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _json(row: JsonObject) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, default=str) + "\n"


def _rows_until(step: int, file: Path) -> list[JsonObject]:
    """Return the rows of a log up to a step, and remove the others from it, with summaries and partial lines."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["step"] <= step and "last_checkpoint" not in row:
                rows.append(row)
    with os_error_hints(file.parent):
        temporary = file.with_suffix(".partial")
        temporary.write_text("".join(_json(row) for row in rows), encoding="utf-8")
        temporary.replace(file)
    return rows
