"""Save of a training checkpoint with its optimizer, and exact resume from it, of a row of the benchmark.

    python scripts/bench/checkpoint.py 30b-pp4 --disk /some/disk --work /some/disk --out DIR
    python scripts/bench/checkpoint.py tiny --out DIR                       # tries the script, on any machine

A run saves after `--save-after` steps and goes on for `--more`. Another one resumes from that checkpoint and takes the
same steps again; its losses and gradient norms are compared with those of the run that was not stopped. The files of
the checkpoint, or the first `--copy-gb` of them, are also copied on the same disk by `cp`. The result is appended to
DIR/results.json, for report.py. The checkpoint is deleted, since it has the size of the weights and of the optimizer.
"""

# pyright: reportMissingImports=false

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from disk import copied, file_system, files_of, keep_logs, size_of
from make import paths
from measure import Step, measure
from megaswift.cli.launch import visible_gpus
from records import Run, append, compile_packages, heading, now, prepare
from report import markdown
from row import Row
from rows import ROWS
from systems import command, environment, step_of

WRITTEN = re.compile(r"Saved checkpoint-\d+ \(.*, ([\d.]+) s\)")


class Place:
    """Row, its files and its processes."""

    def __init__(self, name: str, work: Path, disk: Path, flags: str, timeout: float):
        self.row: Row = ROWS[name]
        self.gpus = min(visible_gpus(), self.row.gpus or 8)
        if self.gpus < (self.row.gpus or 1) > 1:
            raise RuntimeError(f"needs {self.row.gpus} GPUs")
        self.model, self.data = paths(name, work)
        self.disk, self.flags, self._end = disk, flags, time.perf_counter() + timeout
        self._environment = environment("ours", work / "caches" / "ours", gpus=self.gpus, site=None)

    @property
    def seconds_left(self) -> float:
        return max(1.0, self._end - time.perf_counter())

    def train(self, name: str, lines: int, flags: str, *, iterations: int, saves: bool) -> tuple[list[Step], str]:
        """Train until so many `lines` of steps and saves are logged and, if it `saves`, until a checkpoint is complete.

        Returns the lines and the command. Raises RuntimeError if the run fails.
        """
        out = self.disk / name
        argv = command(
            "ours", self.row, self.model, self.data, out, gpus=self.gpus, steps=iterations, site=None,
            flags=f"{self.flags} {flags}",
        )  # fmt: skip
        called = shlex.join(["python", *argv[1:]])
        print(f"== {name}: {called}", flush=True)
        steps, error = measure(
            argv, self._environment, out / "logging.jsonl", self.console_log(name), steps=lines,
            timeout=self.seconds_left, read=lambda line: line_of(line, self.gpus),
            is_complete=lambda: not saves or saved(self.console_log(name)) is not None,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"{name}: {error}")
        return steps, called

    def console_log(self, name: str) -> Path:
        return self.disk / f"{name}.log"


def line_of(line: dict[str, Any], gpus: int) -> Step | None:
    """Return a step, or {save_wait: seconds for which training waited for a save}."""
    return {"save_wait": line["save_wait"]} if "save_wait" in line else step_of("ours", line, gpus)


def saved(console_log: Path) -> float | None:
    """Return the seconds that the run prints when its first checkpoint is complete; None before.

    They begin with the save; with --async_save when the copy on the host is made, and training goes on.
    """
    printed = WRITTEN.search(console_log.read_text(errors="replace"))
    return float(printed[1]) if printed else None


def measured(place: Place, *, save_after: int, more: int, is_async: bool, copy_bytes: float) -> Run:
    """Return the figures of a save and of a resume."""
    checkpoint, iterations = place.disk / "first" / f"checkpoint-{save_after}", save_after + more + 5
    save = f"--save_steps {save_after} --async_save {str(is_async).lower()}"
    lines, called = place.train("first", save_after + more + 1, save, iterations=iterations, saves=True)
    first = [line for line in lines if "step" in line]
    save_wait = next(line["save_wait"] for line in lines if "save_wait" in line)
    after_copy = (saved(place.console_log("first")) or 0.0) if is_async else 0.0
    copy = copied(checkpoint, place.disk / "copy", copy_bytes)
    resume = f"--save_steps 100000 --resume_from_checkpoint {checkpoint}"
    second, resumed = place.train("second", more, resume, iterations=iterations, saves=False)
    again = first[save_after : save_after + more]
    pairs = [
        (one[name], other[name]) for one, other in zip(again, second, strict=True) for name in ("loss", "grad_norm")
    ]
    return {
        "save_wait": save_wait,
        "seconds_to_disk": save_wait + after_copy,
        "command": called,
        "resume_command": resumed,
        "steps": first,
        "resumed_steps": second,
        "bytes": size_of(files_of(checkpoint)),
        "bytes_of_weights": size_of(checkpoint.glob("*.safetensors")),
        "copy": copy,
        "first_step": first[0]["at"],
        "first_step_resumed": second[0]["at"],
        "difference": max(abs(one - other) / max(abs(one), 1e-9) for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS, metavar="ROW", help="a row of rows.py")
    parser.add_argument("--out", type=Path, required=True, help="results and logs")
    parser.add_argument("--work", type=Path, help="models, text and caches, kept between calls; left out: DIR/work")
    parser.add_argument("--disk", type=Path, help="where checkpoints are written; left out: DIR")
    parser.add_argument("--save-after", type=int, default=4, help="steps before the save, more than --more + 1")
    parser.add_argument("--more", type=int, default=2, help="steps after the save, taken again by the resumed run")
    parser.add_argument("--async", dest="is_async", action="store_true", help="save with --async_save true")
    parser.add_argument("--copy-gb", type=float, default=40, help="size of the plain copy, at most")
    parser.add_argument("--flags", default="", help="extra flags of both runs, such as --deterministic_mode true")
    parser.add_argument("--timeout", type=float, default=540, help="seconds of both runs together, at most")
    arguments = parser.parse_args()
    if arguments.save_after <= arguments.more + 1:
        parser.error("--save-after must be more than --more + 1: else the run saves once more")
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    compile_packages(os.environ.get("PYTHONPATH"))
    work = (arguments.work or arguments.out / "work").resolve()
    disk = (arguments.disk or arguments.out).resolve() / f"{arguments.row}-checkpoint"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir(parents=True)
    run: Run = {
        "kind": "checkpoint", "row": arguments.row, "system": "async" if arguments.is_async else "sync",
        "flags": arguments.flags, **heading(now()), "file_system": file_system(disk), "error": None,
    }  # fmt: skip
    try:
        prepare(arguments.row, work, arguments.timeout)
        place = Place(arguments.row, work, disk, arguments.flags, arguments.timeout)
        run["gpus"] = place.gpus
        run |= measured(
            place, save_after=arguments.save_after, more=arguments.more, is_async=arguments.is_async,
            copy_bytes=arguments.copy_gb * 1e9,
        )  # fmt: skip
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        run["error"] = str(error)
    finally:
        keep_logs(disk, arguments.out / "runs" / f"{disk.name}-{run['system']}")
    runs = append(arguments.out, run)
    print(markdown(runs))
    sys.exit(bool(run["error"]))


if __name__ == "__main__":
    main()
