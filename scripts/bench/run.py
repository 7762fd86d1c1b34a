"""How fast `megatron sft` trains, beside ms-swift on the same work: rows of models, one run after another, and a table.

    python scripts/bench/run.py 0.6b 4b moe --systems ours local peer --out DIR
    python scripts/bench/run.py tiny --out DIR                                      # tries the script, on any machine

Rows and systems are in rows.py; what each system is told, in systems.py; what the columns mean, in report.py. Makes a
random checkpoint of the row's shape and real text once, in the work folder, then runs each system on them with a log
of its own in DIR, and ends it behind its last step: no checkpoint is saved. Results are in DIR/results.json after each
run, behind those of earlier calls, and in DIR/results.md. A run that fails is a row that says so.

`--peer-site`: a folder with ms-swift's packages, for its runs alone; left out, ms-swift is the installed one.
`--flags`: further flags of ours, for trials: `--flags="--apply_rope_fusion false"`.
`--profile`: our runs go on for three steps, of which two are traced, to DIR/runs/*/out/profile.
"""

# pyright: reportMissingImports=false

import argparse
import compileall
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from make import places
from measure import measure
from megaswift.cli.launch import visible_gpus
from report import Run, cells, chosen, markdown, summary
from rows import ROWS, SYSTEMS
from systems import command, environment, step_of, versions

HERE = Path(__file__).parent


@cache
def device() -> str:
    """Return the first GPU's name, or the processor's kind."""
    if not visible_gpus():
        return platform.machine()
    for ask in (
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"],
    ):
        if shutil.which(ask[0]):
            told = subprocess.run(ask, capture_output=True, text=True, check=False)
            if not told.returncode:
                return told.stdout.splitlines()[0].strip()
    return "a GPU of unknown name"


def prepare(name: str, work: Path, timeout: float) -> None:
    """In a process of its own, which leaves the GPU empty."""
    subprocess.run([sys.executable, str(HERE / "make.py"), name, str(work)], check=True, timeout=timeout)


def run_one(name: str, system: str, arguments: argparse.Namespace, timeout: float) -> Run:
    """Make what the row needs, run the system on it, and return what was seen."""
    row, out = ROWS[name], arguments.out
    work: Path = arguments.work or out / "work"
    gpus = min(visible_gpus(), row.gpus or 8)
    steps = arguments.steps or row.steps
    place = out / "runs" / "-".join(filter(None, [name, system, *arguments.flags.replace("--", "").split()]))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    caches = work / "caches" / ("peer" if system == "peer" else "ours")
    result: dict[str, Any] = {
        "row": name, "system": system, "flags": "" if system == "peer" else arguments.flags, "gpus": gpus,
        "call": arguments.call, "called": shlex.join(["python", *sys.argv]), "device": device(),
        "versions": versions(system, arguments.peer_site), "global_batch": row.batch_on(max(gpus, 1)),
        "length": row.length, "warmup": arguments.warmup, "last_step": steps, "steps": [],
        "caches": "warm" if caches.exists() else "cold", "error": None,
    }  # fmt: skip
    traced = arguments.profile and system != "peer"
    flags = f"{arguments.flags} --profile true --profile_step_start {steps + 1} --profile_step_end {steps + 2}"
    try:
        if gpus < (row.gpus or 1) > 1:
            raise RuntimeError(f"needs {row.gpus} GPUs")
        prepare(name, work, timeout)
        model, data = places(name, work)
        called = command(
            system, row, model, data, place / "out", gpus=gpus, steps=steps + 5, site=arguments.peer_site,
            flags=flags if traced else arguments.flags,
        )  # fmt: skip
        result["command"] = shlex.join(called)
        print(f"== {name}, {system}: {result['command']}", flush=True)
        caches.mkdir(parents=True, exist_ok=True)
        result["steps"], result["error"] = measure(
            called,
            environment(system, caches, gpus=gpus, site=arguments.peer_site),
            place / "out" / "logging.jsonl",
            place / "printed.log",
            steps=steps + 3 if traced else steps,
            timeout=timeout,
            read=lambda line: step_of(system, line, gpus),
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        result["error"] = str(error)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ours"], help=", ".join(SYSTEMS))
    parser.add_argument("--out", type=Path, required=True, help="results, logs, and what the runs write")
    parser.add_argument("--work", type=Path, help="models, text and caches, kept between calls; left out: DIR/work")
    parser.add_argument("--steps", type=int, help="measured up to this step; left out: the row's own number")
    parser.add_argument("--warmup", type=int, default=3, help="the first steps, which do not count")
    parser.add_argument("--peer-site", type=Path)
    parser.add_argument("--flags", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run, at most")
    parser.add_argument("--limit", type=float, help="seconds of the whole call: runs that come later are left out")
    arguments = parser.parse_args()
    started = time.monotonic()
    arguments.call = datetime.now().strftime("%Y-%m-%d %H:%M")
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for folder in filter(None, [os.environ.get("PYTHONPATH"), arguments.peer_site and str(arguments.peer_site)]):
        for entry in folder.split(os.pathsep):  # packages that were only unpacked: as their installation leaves them
            compileall.compile_dir(entry, quiet=2, workers=0)
    file = arguments.out / "results.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    for name in arguments.rows:
        for system in arguments.systems:
            left = (arguments.limit or 1e9) - (time.monotonic() - started)
            if left < 30:
                print(f"== {name}, {system}: left out, the time is up", flush=True)
                continue
            began = time.monotonic()
            runs.append(run_one(name, system, arguments, min(arguments.timeout, left)))
            file.write_text(json.dumps(runs, indent=1) + "\n")
            seen = " | ".join(cells(runs[-1], summary(runs[-1], runs)))
            print(f"   {seen} | {time.monotonic() - began:.0f} s in all", flush=True)
    (arguments.out / "results.md").write_text(markdown(runs) + "\n")
    print(f"\n{markdown(runs)}")
    sys.exit(any(run["error"] for run in chosen(runs)))


if __name__ == "__main__":
    main()
