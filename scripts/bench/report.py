"""The table of results.json files, in Markdown, alone or into a page between its `<!-- bench -->` markers.

    python scripts/bench/report.py DIR/results.json [...] [--into docs/results.md]

Of several runs of the same thing the last counts; a failure only where nothing else is there.

- tokens/s/GPU: global batch x pack length / median seconds of a step / GPUs: padding counts, for every system alike.
- real: the same without padding, as megaswift logs it.
- TFLOP/s/GPU and MFU: FLOPs of a step by tasks/observability/flops.py (matrix products, and attention over the causal
  pairs within each document; recomputation not), over the same seconds, and over the chip's dense bf16 peak. A step of
  the peer has the FLOPs of ours on the row.
- memory: `torch.cuda.max_memory_reserved` of the fullest GPU that the system names (its logs have it).
- first step: seconds from the command to the log line of step 1 (ours comes once step 2 is under way).
"""

# pyright: reportMissingImports=false

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from megaswift.tasks.observability.flops import peak_flops
from rows import AGAINST, LEAST, ROWS, SYSTEMS

Run = dict[str, Any]
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
COLUMNS = ["model", "GPUs", "system", "s/step", "tokens/s/GPU", "real", "TFLOP/s/GPU", "MFU", "memory", "first step"]
COLUMNS += ["speed (target)"]
NAMES = {"ours": "megaswift", "peer": "ms-swift"}


def name_of(run: Run) -> str:
    name = NAMES.get(run["system"], f"megaswift, {run['system']}")
    return f"{name} `{run['flags']}`" if run["flags"] else name


def chosen(runs: list[Run]) -> list[Run]:
    """Return one run of each thing, in the order of rows and systems."""
    found: dict[tuple[str, str, str, int], Run] = {}
    for run in runs:
        key = run["row"], run["system"], run["flags"], run["gpus"]
        if not run["error"] or key not in found or found[key]["error"]:
            found[key] = run
    order = {name: place for place, name in enumerate(ROWS)}
    return sorted(found.values(), key=lambda run: (order[run["row"]], SYSTEMS.index(run["system"]), run["flags"]))


def measured(run: Run) -> list[dict[str, Any]]:
    """Return the steps behind the warm-up, each with its `seconds` (and, of ours, its real tokens)."""
    pairs = zip(run["steps"], run["steps"][1:], strict=False)
    found = [step | {"seconds": step["at"] - before["at"], "before": before} for before, step in pairs]
    return [step for step in found if run["warmup"] < step["step"] <= run["last_step"]]


def summary(run: Run, runs: list[Run]) -> dict[str, Any]:
    """What the table shows of a run. `runs`: all, for the peer's FLOPs and for what it is held against."""
    steps, gpus = measured(run), max(run["gpus"], 1)
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
        real = mean(step["tokens"] - step["before"]["tokens"] for step in steps)
        result["real_tokens_per_second_per_gpu"] = real / seconds / gpus
    flops = flops_of(run) or next(filter(None, (flops_of(other) for other in runs if same_work(run, other))), None)
    if flops:
        result["tflops_per_gpu"] = flops / seconds / gpus / 1e12
        peak = peak_flops(run["device"])
        result["mfu"] = result["tflops_per_gpu"] * 1e12 / peak if peak else None
    against = next((other for other in baselines(run, runs) if measured(other) and not other["error"]), None)
    if against:
        theirs = median(step["seconds"] for step in measured(against))
        result |= {"ratio": theirs / seconds, "against": name_of(against), "one_call": against["call"] == run["call"]}
    result["least"] = ROWS[run["row"]].least.get(run["system"], LEAST.get(run["system"]))
    return result


def flops_of(run: Run) -> float | None:
    """Of a step, the mean over the measured ones."""
    steps = [step for step in measured(run) if "flops" in step]
    return mean(step["flops"] for step in steps) if steps else None


def same_work(one: Run, other: Run) -> bool:
    return all(one[name] == other[name] for name in ("row", "gpus", "global_batch", "length"))


def baselines(run: Run, runs: list[Run]) -> list[Run]:
    """What a run is held against, the best first: of the same call where that has it, else of the last."""
    wanted = AGAINST.get(run["system"])
    if run["flags"]:  # a trial is held against the defaults
        wanted = run["system"]
    last_first = reversed(runs)
    found = [each for each in last_first if each["system"] == wanted and not each["flags"] and same_work(run, each)]
    return sorted(found, key=lambda other: (other["call"] != run["call"], other["device"] != run["device"]))


def markdown(runs: list[Run]) -> str:
    """Return the whole fragment: what was measured where, the table, the losses."""
    everything, runs = runs, chosen(runs)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for run in runs:
        about = [ROWS[run["row"]].title, str(run["gpus"]), name_of(run)]
        lines.append("| " + " | ".join(about + cells(run, summary(run, everything))) + " |")
    lines += ["", *losses(runs), *where(runs)]
    return "\n".join(lines)


def cells(run: Run, found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"].partition(": Train")[0].replace("|", "/")[:120], *[""] * 7]
    ratio = ""
    if "ratio" in found:
        least = f" ({found['least']})" if found["least"] and not run["flags"] else ""
        ratio = f"{found['ratio']:.2f} x {found['against']}{'' if found['one_call'] else ', another call'}{least}"
    row = ROWS[run["row"]]
    mfu, first = (row.mfu, row.first_step) if run["system"] == "ours" and not run["flags"] else (None, None)
    return [
        f"{found['seconds_per_step']:.3f}",
        f"{found['tokens_per_second_per_gpu']:,.0f}",
        f"{found['real_tokens_per_second_per_gpu']:,.0f}" if "real_tokens_per_second_per_gpu" in found else "",
        f"{found['tflops_per_gpu']:.0f}" if "tflops_per_gpu" in found else "",
        (f"{found['mfu']:.1%}" if found.get("mfu") else "") + (f" ({mfu:.0%})" if mfu else ""),
        f"{found['memory_gib']:.1f} GiB",
        f"{found['first_step']:.0f} s{'' if run['caches'] == 'warm' else ', cold'}"
        + (f" ({first:.0f} s)" if first else ""),
        ratio,
    ]


def losses(runs: list[Run]) -> list[str]:
    """Return the losses of each row's systems, step by step."""
    lines = ["Losses of the same steps (each system shuffles its packs by itself: a step's documents differ).", ""]
    for row in dict.fromkeys(run["row"] for run in runs):
        curves = [run for run in runs if run["row"] == row and run["steps"]]
        if not curves:
            continue
        steps = range(1, min(run["last_step"] for run in curves) + 1)
        lines += [f"| {ROWS[row].title}: step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
        for run in curves:
            at = {step["step"]: f"{step['loss']:.3f}" for step in run["steps"]}
            lines.append(f"| {name_of(run)} | " + " | ".join(at.get(step, "") for step in steps) + " |")
        lines.append("")
    return lines


def where(runs: list[Run]) -> list[str]:
    """Dates, devices, versions and commands."""
    lines = []
    for call in dict.fromkeys(run["call"] for run in runs):
        mine = [run for run in runs if run["call"] == call]
        versions = {name: version for run in mine for name, version in run["versions"].items()}
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"- {call}, {mine[0]['device']}: `{mine[0]['called']}`; {packages}")
    return lines


def put(page: Path, text: str) -> None:
    """Replace what is between the markers of a page. Raises ValueError where it has none."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, help="a page with markers; the results go into a .json beside it")
    arguments = parser.parse_args()
    runs = [run for file in arguments.results for run in json.loads(file.read_text())]
    if arguments.into:
        put(arguments.into, markdown(runs))
        arguments.into.with_suffix(".json").write_text(json.dumps(chosen(runs), indent=1) + "\n")
    else:
        print(markdown(runs))


if __name__ == "__main__":
    main()
