"""Benchmark tables in Markdown from results.json files, printed or inserted between `<!-- bench -->` markers of a page.

    python scripts/bench/report.py DIR/results.json [...] [--into docs/results.md]

Of several runs with the same settings the last successful one counts; a failure is shown if there is no other.

- tokens/s/GPU: global batch x pack length / median seconds of a step / GPUs. Padding counts, for every system.
  A pair of DPO counts with both sequences, in every system.
- real: the same without padding, from megaswift's log.
- TFLOP/s/GPU and MFU: FLOPs of a step by tasks/observability/flops.py (matrix products, and causal attention within
  each document, without recomputation) per second, and as a share of the chip's dense bf16 peak. The peer's FLOPs are
  taken from megaswift on the same row, but not of DPO, where megaswift computes the prompt of a pair once.
- memory: `torch.cuda.max_memory_reserved` in the system's log, of the GPU with the most.
- first step: seconds from the command to the log line of step 1 (megaswift logs it during step 2).
- GRPO, saves and conversions have tables of their own: report_rollouts.py, report_files.py.
- Rows with pictures, in a table of their own:
  visual: share of visual tokens, without padding
  images/s/GPU: the peer's by the images of a step of megaswift on the same row
  tower: share of the vision tower in the time of a step, and its MFU, from megaswift's log
"""

# pyright: reportMissingImports=false

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pictures
from megaswift.bridge.families import family_of
from megaswift.tasks.observability.flops import VisionFlops, peak_flops
from report_files import tables
from report_rollouts import COLUMNS as ROLLOUT_COLUMNS
from report_rollouts import rollout_cells
from row import Row
from rows import BASELINES, MIN_SPEEDUPS, ROWS, SYSTEMS, TRAINED

Run = dict[str, Any]
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
COLUMNS = ["model", "GPUs", "system", "s/step", "tokens/s/GPU", "real", "TFLOP/s/GPU", "MFU", "memory", "first step"]
COLUMNS += ["speed (target)"]
VISUAL_COLUMNS = [*COLUMNS[:6], "visual", "images/s/GPU", "tower", *COLUMNS[6:]]
TABLES = {"text": COLUMNS, "pictures": VISUAL_COLUMNS, "rollouts": ROLLOUT_COLUMNS}
NAMES = {"ours": "megaswift", "peer": "ms-swift", "peer-flash": "ms-swift, flash"}


def table_of(row: Row) -> str:
    """Return the name of a row's table."""
    if row.rlhf and row.rlhf.generates:
        return "rollouts"
    return "pictures" if row.pictures else "text"


def name_of(run: Run) -> str:
    name = NAMES.get(run["system"], f"megaswift, {run['system']}")
    return f"{name} `{run['flags']}`" if run["flags"] else name


def latest_runs(runs: list[Run]) -> list[Run]:
    """Return one run for each kind, row, system, flags and number of GPUs, in the order of rows and systems."""
    latest: dict[tuple[str, ...], Run] = {}
    for run in runs:
        key = run.get("kind", ""), run["row"], run["system"], run["flags"], str(run.get("gpus"))
        if not run["error"] or key not in latest or latest[key]["error"]:
            latest[key] = run
    order = {name: position for position, name in enumerate(ROWS)}
    systems = {name: position for position, name in enumerate(SYSTEMS)}
    return sorted(
        latest.values(), key=lambda run: (order[run["row"]], systems.get(run["system"], len(systems)), run["flags"])
    )


def trainings(runs: list[Run]) -> list[Run]:
    """Return the results of run.py, without those of checkpoint.py and conversion.py, which have a kind."""
    return [run for run in runs if "kind" not in run]


def measured_steps(run: Run) -> list[dict[str, Any]]:
    """Return the steps after the warm-up, each with its `seconds` and the step `before` it."""
    pairs = zip(run["steps"], run["steps"][1:], strict=False)
    steps = [step | {"seconds": step["at"] - before["at"], "before": before} for before, step in pairs]
    return [step for step in steps if run["warmup"] < step["step"] <= run["last_step"]]


def summary(run: Run, runs: list[Run]) -> dict[str, Any]:
    """Return the figures of a run. runs: all runs, for the peer's FLOPs and the baseline"""
    steps, gpus = measured_steps(run), max(run["gpus"], 1)
    if run["error"] or not steps:
        return {"error": run["error"] or "no step behind the warm-up"}
    seconds = median(step["seconds"] for step in steps)
    result: dict[str, Any] = {
        "seconds_per_step": seconds,
        "tokens_per_second_per_gpu": run["global_batch"] * run["length"] / seconds / gpus,
        "memory_gib": max(step["memory_gib"] for step in run["steps"]),
        "first_step": run["steps"][0]["at"],
    }
    if "tokens" in steps[0]:
        real_tokens = mean(step["tokens"] - step["before"]["tokens"] for step in steps)
        result["real_tokens_per_second_per_gpu"] = real_tokens / seconds / gpus
    work = [run, *(other for other in runs if same_work(run, other))]
    if ROWS[run["row"]].pictures:
        result |= visual_figures(run, work, seconds * gpus)
    is_shared = not ROWS[run["row"]].rlhf  # FLOPs of other tasks are fewer in megaswift, which shares prompts
    flops = next(filter(None, (mean_of(other, "flops") for other in (work if is_shared else [run]))), None)
    if flops:
        result["tflops_per_gpu"] = flops / seconds / gpus / 1e12
        peak = peak_flops(run["device"])
        result["mfu"] = result["tflops_per_gpu"] * 1e12 / peak if peak else None
    baseline = next((other for other in baselines(run, runs) if measured_steps(other) and not other["error"]), None)
    if baseline:
        baseline_seconds = median(step["seconds"] for step in measured_steps(baseline))
        result |= {
            "ratio": baseline_seconds / seconds,
            "against": name_of(baseline),
            "one_call": baseline["call"] == run["call"],
        }
    result["least"] = ROWS[run["row"]].min_speedup.get(run["system"], MIN_SPEEDUPS.get(run["system"]))
    return result


def visual_figures(run: Run, work: list[Run], seconds: float) -> dict[str, Any]:
    """Return the figures of pictures. work: runs of the same work. seconds: of a step, of all GPUs"""
    result: dict[str, Any] = {}
    images = next(filter(None, (mean_of(other, "images") for other in work)), None)
    if images:
        result["images_per_second_per_gpu"] = images / seconds
    visual_tokens, share = mean_of(run, "visual_tokens"), mean_of(run, "vision_share")
    if visual_tokens:
        steps = measured_steps(run)
        result["visual_share"] = visual_tokens * len(steps) / (steps[-1]["tokens"] - steps[0]["before"]["tokens"])
    if images and share:
        peak = peak_flops(run["device"])
        tower_rate = tower_flops(ROWS[run["row"]], images) / (share * seconds)
        result |= {"tower_share": share, "tower_mfu": tower_rate / peak if peak else None}
    return result


def mean_of(run: Run, name: str) -> float | None:
    """Return the mean of a figure of the measured steps; None if the log does not have it."""
    steps = [step for step in measured_steps(run) if name in step]
    return mean(step[name] for step in steps) if steps else None


def tower_flops(row: Row, images: float) -> float:
    """Return the FLOPs of the tower in a step with so many of the row's pictures."""
    vision = family_of(row.config).vision
    assert vision
    assert row.pictures
    is_trained = TRAINED in row.layout
    flops = VisionFlops.of(vision(row.config), trains_layers=is_trained, trains_mergers=is_trained)
    grids = [pictures.grid(size) for size in pictures.sizes(row.pictures)]
    return flops.training(grids) * images / len(grids)


def same_work(one: Run, other: Run) -> bool:
    return all(one[name] == other[name] for name in ("row", "gpus", "global_batch", "length"))


def baselines(run: Run, runs: list[Run]) -> list[Run]:
    """Return baselines of a run on the same device, the preferred first: by system, of the same call, the latest."""
    systems = BASELINES.get(run["system"], ())
    if run["flags"]:  # a trial is compared with the default flags
        systems = (run["system"],)
    last_first = reversed(runs)
    candidates = [
        other
        for other in last_first
        if other["system"] in systems
        and (other["flags"], other["device"]) == ("", run["device"])
        and same_work(run, other)
    ]
    return sorted(candidates, key=lambda other: (systems.index(other["system"]), other["call"] != run["call"]))


def markdown(runs: list[Run]) -> str:
    """Return the table, the losses, and the commands with devices and versions."""
    latest = latest_runs(runs)
    all_runs, runs = trainings(runs), trainings(latest)
    lines: list[str] = []
    for table, columns in TABLES.items():
        runs_of_table = [run for run in runs if table_of(ROWS[run["row"]]) == table]
        if not runs_of_table:
            continue
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for run in runs_of_table:
            labels = [ROWS[run["row"]].title, str(run["gpus"]), name_of(run)]
            lines.append("| " + " | ".join(labels + cells(run, summary(run, all_runs))) + " |")
        lines.append("")
    lines += [*tables(latest), *(losses(runs) if runs else []), *sources(latest)]
    return "\n".join(lines)


def cells(run: Run, figures: dict[str, Any]) -> list[str]:
    row = ROWS[run["row"]]
    if "error" in figures:
        empty = len(TABLES[table_of(row)]) - 4
        return [figures["error"].partition(": Train")[0].replace("|", "/")[:120], *[""] * empty]
    speed = ""
    if "ratio" in figures:
        bound = f" ({figures['least']})" if figures["least"] and not run["flags"] else ""
        speed = f"{figures['ratio']:.2f} x {figures['against']}{'' if figures['one_call'] else ', another call'}{bound}"
    if table_of(row) == "rollouts":
        samples, gpus = run["global_batch"], max(run["gpus"], 1)
        return rollout_cells(figures, measured_steps(run), samples=samples, gpus=gpus, speed=speed)
    visual = []
    if row.pictures:
        visual += [f"{figures['visual_share']:.1%}" if "visual_share" in figures else ""]
        visual += [f"{figures['images_per_second_per_gpu']:.1f}" if "images_per_second_per_gpu" in figures else ""]
        tower_mfu = f" at {figures['tower_mfu']:.1%} MFU" if figures.get("tower_mfu") else ""
        visual += [f"{figures['tower_share']:.1%}{tower_mfu}" if "tower_share" in figures else ""]
    mfu, first_step = (row.mfu, row.first_step) if run["system"] == "ours" and not run["flags"] else (None, None)
    return [
        f"{figures['seconds_per_step']:.3f}",
        f"{figures['tokens_per_second_per_gpu']:,.0f}",
        f"{figures['real_tokens_per_second_per_gpu']:,.0f}" if "real_tokens_per_second_per_gpu" in figures else "",
        *visual,
        f"{figures['tflops_per_gpu']:.0f}" if "tflops_per_gpu" in figures else "",
        (f"{figures['mfu']:.1%}" if figures.get("mfu") else "") + (f" ({mfu:.0%})" if mfu else ""),
        f"{figures['memory_gib']:.1f} GiB",
        f"{figures['first_step']:.0f} s{'' if run['caches'] == 'warm' else ', cold'}"
        + (f" ({first_step:.0f} s)" if first_step else ""),
        speed,
    ]


def losses(runs: list[Run]) -> list[str]:
    """Return tables of losses by step, a table for each row."""
    lines = ["Losses of the same steps (each system shuffles its packs by itself: a step's documents differ).", ""]
    for row in dict.fromkeys(run["row"] for run in runs):
        curves = [run for run in runs if run["row"] == row and run["steps"]]
        if not curves:
            continue
        steps = range(1, min(run["last_step"] for run in curves) + 1)
        lines += [f"| {ROWS[row].title}: step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
        for run in curves:
            loss_by_step = {step["step"]: f"{step['loss']:.3f}" for step in run["steps"]}
            lines.append(f"| {name_of(run)} | " + " | ".join(loss_by_step.get(step, "") for step in steps) + " |")
        lines.append("")
    return lines


def sources(runs: list[Run]) -> list[str]:
    """Return a line for each call: date, device, command and versions."""
    lines = []
    for call in dict.fromkeys(run["call"] for run in runs):
        runs_of_call = [run for run in runs if run["call"] == call]
        versions = {name: version for run in runs_of_call for name, version in run["versions"].items()}
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"- {call}, {runs_of_call[0]['device']}: `{runs_of_call[0]['called']}`; {packages}")
    return lines


def insert(page: Path, text: str, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Replace the text between the markers of a page. Raises ValueError if it has no markers."""
    before, begin, rest = page.read_text().partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not end:
        raise ValueError(f"{page} has no {markers[0]} ... {markers[1]}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a page with markers; the results go into a .json beside it")
    arguments = parser.parse_args()
    runs = [run for file in arguments.results for run in json.loads(file.read_text())]
    if arguments.into:
        insert(arguments.into, markdown(runs))
        arguments.into.with_suffix(".json").write_text(json.dumps(latest_runs(runs), indent=1) + "\n")
    else:
        print(markdown(runs))


if __name__ == "__main__":
    main()
