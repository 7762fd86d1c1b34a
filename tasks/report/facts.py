"""Facts of a run besides its log: state, options, commands, checkpoints, data."""

import json
import re
from pathlib import Path

from ...templates.json_types import JsonObject
from ..run.data_file import DATA
from ..run.run_dir import checkpoints, command_metrics, is_running, metrics_of, saved_at, step_of
from ..system.atomic_dir import read_manifest
from ..system.console import LOG as CONSOLE
from .log_rows import LogRows

START = re.compile(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4})$")  # console.log's heading of each start


def state_of_run(folder: Path, log: LogRows) -> str:
    """Return whether a run is finished, stopped (with the reason), running, or ended without its summary."""
    if log.summary:
        return f"stopped: {log.summary['stopped']}" if log.summary.get("stopped") else "finished"
    return "running" if is_running(folder) else "unfinished"


def options_of(folder: Path) -> JsonObject:
    """Return args.json as {"options": flag -> {"value", "source"} of those that are no defaults, and its facts}."""
    table = read_json(folder / "args.json")
    options = table.get("options") if isinstance(table.get("options"), dict) else {}
    entries = {name: entry for name, entry in (options or {}).items() if isinstance(entry, dict)}
    chosen = {name: entry for name, entry in entries.items() if entry.get("source") != "default"}
    return {**table, "options": chosen}


def starts_of(folder: Path) -> list[JsonObject]:
    """Return {"time", "command"} of each start of a run, from console.log."""
    starts, file = [], folder / CONSOLE
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if match := START.match(line):
                starts.append({"time": match[1], "command": next(stream, "").strip()})
    return starts


def checkpoints_of(folder: Path) -> list[JsonObject]:
    """Return step, size in bytes (None without a manifest), time, metrics and links of each checkpoint."""
    links = {}
    for name in ("last", "best"):
        if (folder / name).is_symlink():
            links.setdefault((folder / name).readlink().name, []).append(name)
    return [
        {
            "name": path.name,
            "step": step_of(path),
            "bytes": _bytes(path),
            "time": saved_at(path).time,
            "metrics": command_metrics(path) | metrics_of(path),
            "links": links.get(path.name, []),
        }
        for path in checkpoints(folder)
    ]


def _bytes(checkpoint: Path) -> int | None:
    try:
        return sum(int(entry["size"]) for entry in read_manifest(checkpoint).values()) or None
    except ValueError:
        return None


def data_of(folder: Path) -> JsonObject:
    """Return the statistics of the prepared data; empty for a run of an earlier version."""
    return read_json(folder / DATA)


def read_json(file: Path) -> JsonObject:
    """Return the object of a JSON file; empty if it is missing or unreadable."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
