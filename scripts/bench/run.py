"""Benchmark of `megatron sft` and `rlhf` against ms-swift on the same work, with tables of the results.

    python scripts/bench/run.py 0.6b 4b moe --systems ours local peer --out DIR
    python scripts/bench/run.py 30b-grpo --engine-site VLLM --out DIR               # GRPO, of megaswift alone
    python scripts/bench/run.py tiny --out DIR                                      # tries the script, on any machine

rows.py has the rows and systems, systems.py the command of each system, report.py the columns. The work folder gets a
random checkpoint of the row's shape and real text, once. Then each system runs on them, with a log in DIR, and is
killed after its last step, so that no checkpoint is saved. Each run is appended to DIR/results.json; DIR/results.md has
the table. A failed run is a row with its error.

`--peer-site`: a folder with ms-swift's packages, used by its runs only. Default: the installed ms-swift.
`--engine-site`: a folder with vLLM's packages, used by megaswift behind its own. Default: the installed vLLM.
NPROC_PER_NODE: processes on a machine without GPUs.
`--flags`: extra flags for megaswift, for trials: `--flags="--apply_rope_fusion false"`.
`--profile`: megaswift runs three more steps, of which two are traced, to DIR/runs/*/out/profile.
"""

# pyright: reportMissingImports=false

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from make import paths
from measure import measure
from megaswift.cli.launch import visible_gpus
from records import append, compile_packages, heading, now, prepare, read
from report import Run, cells, latest_runs, markdown, summary, trainings
from rows import PEERS, ROWS, SYSTEMS
from systems import command, environment, step_of


def run_one(name: str, system: str, arguments: argparse.Namespace, timeout: float) -> Run:
    """Make the row's checkpoint and text, run a system on them, and return its result."""
    row, out = ROWS[name], arguments.out
    work: Path = arguments.work or out / "work"
    gpus = min(visible_gpus(), row.gpus or 8)
    steps = arguments.steps or row.steps
    folder = out / "runs" / "-".join(filter(None, [name, system, *arguments.flags.replace("--", "").split()]))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    caches = work / "caches" / ("peer" if system in PEERS else "ours")
    result: dict[str, Any] = {
        "row": name, "system": system, "flags": "" if system in PEERS else arguments.flags, "gpus": gpus,
        **heading(arguments.call, system, arguments.peer_site), "global_batch": row.batch_on(max(gpus, 1)),
        "length": row.length, "last_step": steps, "steps": [],
        "warmup": row.warmup if arguments.warmup is None else arguments.warmup,
        "caches": "warm" if caches.exists() else "cold", "error": None,
    }  # fmt: skip
    is_traced = arguments.profile and system not in PEERS
    flags = f"{arguments.flags} --profile true --profile_step_start {steps + 1} --profile_step_end {steps + 2}"
    try:
        if gpus < (row.gpus or 1) > 1:
            raise RuntimeError(f"needs {row.gpus} GPUs")
        prepare(name, work, timeout)
        model, data = paths(name, work)
        teacher = None
        if row.rlhf and row.rlhf.teacher:
            prepare(row.rlhf.teacher, work, timeout)
            teacher = paths(row.rlhf.teacher, work)[0]
        argv = command(
            system, row, model, data, folder / "out", gpus=gpus, steps=steps + 5, site=arguments.peer_site,
            flags=flags if is_traced else arguments.flags, teacher=teacher,
        )  # fmt: skip
        line = shlex.join(["python", *argv[1:]])
        result["command"] = line.replace(f"{Path(__file__).parents[2]}/", "")  # without a path of this machine
        print(f"== {name}, {system}: {result['command']}", flush=True)
        caches.mkdir(parents=True, exist_ok=True)
        result["steps"], result["error"] = measure(
            argv,
            environment(
                system,
                caches,
                gpus=gpus,
                site=arguments.peer_site,
                engine_site=arguments.engine_site,
                servers=row.rlhf.servers if row.rlhf else 0,
            ),
            folder / "out" / "logging.jsonl",
            folder / "printed.log",
            steps=steps + 3 if is_traced else steps,
            enough=None if is_traced else min(result["warmup"] + 1, steps),
            timeout=timeout,
            read=lambda line: step_of(system, line, gpus),
        )
        if not result["error"] and len(result["steps"]) < steps:
            print(f"   {len(result['steps'])} of {steps} steps in {timeout:.0f} s", flush=True)
            result["last_step"] = len(result["steps"])
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
    parser.add_argument("--warmup", type=int, help="first steps, which do not count; left out: the row's own number")
    parser.add_argument("--peer-site", type=Path)
    parser.add_argument("--engine-site", type=Path)
    parser.add_argument("--flags", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run, at most")
    parser.add_argument("--limit", type=float, help="seconds of the whole call: runs that come later are left out")
    arguments = parser.parse_args()
    call_start = time.monotonic()
    arguments.call = now()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    compile_packages(os.environ.get("PYTHONPATH"), arguments.peer_site, arguments.engine_site)
    runs = read(arguments.out)
    for name in arguments.rows:
        for system in arguments.systems:
            seconds_left = (arguments.limit or 1e9) - (time.monotonic() - call_start)
            if seconds_left < 30:
                print(f"== {name}, {system}: left out, the time is up", flush=True)
                continue
            run_start = time.monotonic()
            runs = append(arguments.out, run_one(name, system, arguments, min(arguments.timeout, seconds_left)))
            row_cells = " | ".join(cells(runs[-1], summary(runs[-1], trainings(runs))))
            print(f"   {row_cells} | {time.monotonic() - run_start:.0f} s in all", flush=True)
    (arguments.out / "results.md").write_text(markdown(runs) + "\n")
    print(f"\n{markdown(runs)}")
    sys.exit(any(run["error"] for run in latest_runs(runs)))


if __name__ == "__main__":
    main()
