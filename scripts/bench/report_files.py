"""Tables of checkpoints that were saved and resumed from, and of conversions, for report.py.

- training waited: the seconds of `save_wait` in the log. complete after: from the begin of the save until the folder
  was synced and in its place; GB/s: of the whole folder in this time.
- `cp`: GB/s of a plain copy on the same file system in the same call, synced.
- first step, resumed: seconds from the command to the log line of the first step; a run that resumes has read and
  verified the checkpoint until then.
- read + write: seconds that the export prints, and GB/s of the weights in their sum; command: all of its seconds.
"""

# pyright: reportMissingImports=false

from typing import Any

from rows import ROWS

Run = dict[str, Any]
CHECKPOINT_COLUMNS = ["model", "GPUs", "save", "GB, of them weights", "file system", "training waited"]
CHECKPOINT_COLUMNS += ["complete after", "GB/s", "`cp`", "first step", "resumed"]
CHECKPOINT_COLUMNS += ["difference of losses and gradient norms"]


def tables(runs: list[Run]) -> list[str]:
    """Return the tables of those kinds that are there. runs: the latest ones"""
    lines: list[str] = []
    for kind, columns, cells in KINDS:
        of_kind = [run for run in runs if run.get("kind") == kind]
        if of_kind:
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(_row(run, columns, cells))} |" for run in of_kind]
            lines.append("")
    for run in runs:
        if run.get("kind") == "checkpoint" and not run["error"]:
            lines += losses(run)
    return lines


def losses(run: Run) -> list[str]:
    """Return a table of the losses before and after a checkpoint."""
    steps = [step["step"] for step in run["steps"]]
    resumed = {step["step"]: step["loss"] for step in run["resumed_steps"]}
    heads = f"| {title_of(run)}, {name_of(run)}: step | {' | '.join(map(str, steps))} |"
    values = [f"{step['loss']:.6f}" for step in run["steps"]]
    again = [f"{resumed[step]:.6f}" if step in resumed else "" for step in steps]
    rows = [f"| not stopped | {' | '.join(values)} |", f"| resumed | {' | '.join(again)} |"]
    return [heads, "|---" * (len(steps) + 1) + "|", *rows, ""]


def _row(run: Run, columns: list[str], cells: Any) -> list[str]:
    if run["error"]:
        error = run["error"].replace("|", "/")[:200]
        return [title_of(run), str(run.get("gpus", "")), name_of(run), error, *[""] * (len(columns) - 4)]
    return cells(run)


def title_of(run: Run) -> str:
    return ROWS[run["row"]].title


def name_of(run: Run) -> str:
    return f"{run['system']} `{run['flags']}`" if run["flags"] else run["system"]


def checkpoint_cells(run: Run) -> list[str]:
    size, copy = run["bytes"], run["copy"]
    part = "" if copy["bytes"] == size else f" (of {copy['bytes'] / 1e9:.1f} GB)"
    return [
        title_of(run),
        str(run["gpus"]),
        name_of(run),
        f"{size / 1e9:.1f}, {run['bytes_of_weights'] / 1e9:.1f}",
        run["file_system"],
        f"{run['save_wait']:.2f} s",
        f"{run['seconds_to_disk']:.1f} s",
        f"{size / run['seconds_to_disk'] / 1e9:.2f}",
        f"{copy['bytes'] / copy['seconds'] / 1e9:.2f}{part}",
        f"{run['first_step']:.0f} s",
        f"{run['first_step_resumed']:.0f} s",
        f"{run['difference']:.1e}" if run["difference"] else "none",
    ]


def conversion_cells(run: Run) -> list[str]:
    size, copy = run["bytes"], run["copy"]
    parts = []
    for part in (run["to_mcore"], run["to_hf"]):
        seconds = part["reading"] + part["writing"]
        rate = f"{size / max(seconds, 0.1) / 1e9:.2f} GB/s"  # the seconds are printed in tenths
        parts.append(f"{rate}: {part['reading']:.1f} + {part['writing']:.1f} s; command {part['seconds']:.0f} s")
    return [
        title_of(run),
        str(run["gpus"]),
        run["system"],
        f"{size / 1e9:.1f}",
        f"{run['file_system']}, {'warm' if run['is_warm'] else 'cold'}",
        f"{copy['bytes'] / copy['seconds'] / 1e9:.2f} GB/s",
        *parts,
        "all bytes",
    ]


CONVERSION_COLUMNS = ["model", "GPUs", "by", "GB", "files", "`cp`", "to megatron-core: read + write", "back", "equal"]
KINDS = [("conversion", CONVERSION_COLUMNS, conversion_cells), ("checkpoint", CHECKPOINT_COLUMNS, checkpoint_cells)]
