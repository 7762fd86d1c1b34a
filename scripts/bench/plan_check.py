"""Plans of `megatron plan` beside what the runs of a results.json took: memory and time of a step.

    python scripts/bench/plan_check.py docs/results.json [--into docs/plan.md]

Each successful run of megaswift is planned from its flags, as `--dry_run true` does, with the mean length of documents,
and the share and size of images, of its data. The time is that of the kind of GPU that it ran on. Of GRPO the memory
of training is planned, without vLLM's. Exits with 1 if an error is outside of MEMORY or TIME, in a run of a kind of
which the plan claims activations to be known.
"""

# pyright: reportMissingImports=false

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megaswift.cli.main import read_options
from megaswift.tasks.plan.gpus import gpu_kind
from megaswift.tasks.plan.memory import OUTSIDE
from megaswift.tasks.plan.run_plan import TEXT, Images, UnplannedRunError, plan_run
from megaswift.tasks.plan.speed import Machine, seconds_per_step
from megaswift.tasks.plan.table import aligned
from report import Run, insert, latest_runs, mean_of, measured_steps, name_of, summary, trainings
from rows import PEERS, ROWS
from systems import command

MEMORY, TIME = (-0.03, 0.08), (-0.15, 0.15)  # bounds of the relative errors: planned / measured - 1
DOCUMENT = 1000  # mean tokens of a chat
GIB = 2**30
MARKERS = "<!-- plan -->", "<!-- /plan -->"
HEADINGS = ("model", "GPUs", "system", "GPU", "GiB planned", "measured", "error", "s/step planned", "measured", "error")
# Runs of another program, by row and call: the experts of gpt-oss kept more and were slower; trained towers kept more
# of a patch, did not use the memory that is free, and were recomputed in pipelines. Experts of gpt-oss had no adapters.
OLD_RUNS = {
    ("moe-ep2", "2026-11-26 21:12"),
    ("gpt-oss-20b-lora", "2026-11-26 10:18"),
    ("gpt-oss-20b-lora", "2026-11-26 12:53"),
    ("vl-4b-trained", "2026-11-25 03:50"),
    ("vl-4b-trained-mb1", "2026-11-26 04:42"),
    ("vl-4b-tp2", "2026-11-26 13:48"),
    ("vl-4b-pp2", "2026-11-26 13:48"),
    ("vl-moe-trained", "2026-11-26 00:23"),
}


@dataclass(frozen=True)
class Check:
    """Plan of a run beside its measurement: GiB of the GPU with most, and seconds of a step."""

    run: Run
    planned_memory: float
    memory: float
    planned_seconds: float | None  # None: a part of the step is not planned
    seconds: float
    is_claimed: bool  # the plan takes runs of this kind for measured

    @property
    def memory_error(self) -> float:
        return self.planned_memory / self.memory - 1

    @property
    def time_error(self) -> float:
        return self.planned_seconds / self.seconds - 1 if self.planned_seconds else 0.0

    @property
    def is_close(self) -> bool:
        is_in = MEMORY[0] <= self.memory_error <= MEMORY[1]
        return is_in and TIME[0] <= self.time_error <= TIME[1]

    @property
    def cells(self) -> tuple[str, ...]:
        run = self.run
        device = run["device"].removeprefix("NVIDIA ").split()[0]
        cells = f"{self.planned_memory:.1f}", f"{self.memory:.1f}", f"{self.memory_error:+.1%}"
        times = "", f"{self.seconds:.3f}", ""
        if self.planned_seconds:
            times = f"{self.planned_seconds:.3f}", f"{self.seconds:.3f}", f"{self.time_error:+.1%}"
        title = ROWS[run["row"]].title + ("" if self.is_claimed else " (*)")
        return title, str(run["gpus"]), name_of(run), device, *cells, *times


def check(run: Run, folder: Path) -> Check:
    """Plan a run. folder: empty, or with the config.json of its model"""
    row, measured = ROWS[run["row"]], summary(run, [run])
    (folder / "config.json").write_text(json.dumps(row.config))
    # A plan takes FlashAttention-4 to be there if it is installed here.
    exchange = "all_gather" if "flash-attn-4" in run["versions"] else "p2p"
    flags = run["flags"] if "cp_comm_type" in run["flags"] else f"{run['flags']} --cp_comm_type {exchange}"
    teacher = None
    if row.rlhf and row.rlhf.teacher:
        teacher = folder / "teacher"
        teacher.mkdir(exist_ok=True)
        (teacher / "config.json").write_text(json.dumps(ROWS[row.rlhf.teacher].config))
    argv = command(
        run["system"], row, folder, folder, folder, gpus=run["gpus"], steps=1, site=None, flags=flags, teacher=teacher
    )
    options = read_options("megatron", argv[argv.index("rlhf" if row.rlhf else "sft") :])[0]
    gpus = run["gpus"] - (row.rlhf.servers if row.rlhf else 0)
    plan = plan_run(options, gpus, images_of(run), gpu_kind(run["device"]).memory * GIB)
    work = replace(plan.work, document_length=row.document_tokens or DOCUMENT)
    if row.rlhf and row.rlhf.kind == "dpo":  # a pair, whose prompt is computed once
        length = round(tokens_of_step(run) / run["global_batch"]) - row.rlhf.prompt
        work = replace(work, length=length, document_length=length)
    if row.rlhf and row.rlhf.kind == "gkd":  # a plan fills packs with documents of --max_length
        work = replace(work, global_batch=round(tokens_of_step(run) / work.length))
    machine = Machine.of(run["device"])
    assert machine is not None
    return Check(
        run,
        replace(plan, work=work).memory.total / GIB,
        training_memory(run) or 0.0,
        None if options.generates else seconds_per_step(work, plan.layout, machine),
        measured["seconds_per_step"],
        plan.is_measured,
    )


def training_memory(run: Run) -> float | None:
    """Return the GiB of training, without vLLM's; None if both have theirs at the same time."""
    if not (rlhf := ROWS[run["row"]].rlhf) or rlhf.servers or not rlhf.generates:
        return max(step["memory_gib"] for step in run["steps"])
    by_turns = [step["memory/train_gib"] for step in run["steps"] if "memory/train_gib" in step]
    return max(by_turns) - OUTSIDE / GIB if by_turns else None  # measured is all that is used of the GPU


def tokens_of_step(run: Run) -> float:
    """Return the tokens of a step in the mean."""
    steps = measured_steps(run)
    return (steps[-1]["tokens"] - steps[0]["before"]["tokens"]) / len(steps)


def images_of(run: Run) -> Images:
    """Return the images in the data of a run, by its log."""
    images, visual_tokens = mean_of(run, "images"), mean_of(run, "visual_tokens")
    if not images or not visual_tokens:
        return TEXT
    return Images(visual_tokens / tokens_of_step(run), visual_tokens / images)


def checks(runs: list[Run]) -> list[Check]:
    """Return the checks of all successful runs of megaswift on GPUs that are planned."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for run in latest_runs(trainings(runs)):
            is_old = (run["row"], run["call"]) in OLD_RUNS
            is_planned = not is_old and run["system"] not in PEERS and not run["error"] and run["gpus"]
            if is_planned and measured_steps(run) and training_memory(run):
                with suppress(UnplannedRunError):
                    results.append(check(run, Path(folder)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a page with markers")
    arguments = parser.parse_args()
    results = checks([run for file in arguments.results for run in json.loads(file.read_text())])
    rows = [HEADINGS, *(result.cells for result in results)]
    print(aligned(rows))
    if arguments.into:
        lines = [f"| {' | '.join(row)} |" for row in (HEADINGS, ["---"] * len(HEADINGS), *rows[1:])]
        insert(arguments.into, "\n".join(lines), MARKERS)
    claimed = [result for result in results if result.is_claimed]
    far = [result for result in claimed if not result.is_close]
    bounds = f"within the bounds: {MEMORY} in memory, {TIME} in time. (*): not claimed to be"
    print(f"\n{len(claimed) - len(far)} of {len(claimed)} runs are {bounds}")
    sys.exit(int(bool(far)))


if __name__ == "__main__":
    main()
