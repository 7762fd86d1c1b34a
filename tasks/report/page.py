"""The page: facts and curves of one or several runs in a template, with styles and programs embedded."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ...templates.json_types import JsonObject
from ..system.atomic_dir import hidden_path
from .charts import charts_of
from .facts import checkpoints_of, data_of, options_of, starts_of, state_of_run
from .log_rows import LOG, LogRows
from .phases import phases_of
from .samples import completions_of, replies_of
from .series import series_of

ASSETS = files(__package__) / "assets"
STYLES = ("uplot/uPlot.min.css", "page.css", "print.css")
PROGRAMS = (
    "uplot/uPlot.iife.min.js", "elements.js", "plots.js", "phases.js", "overview.js", "data.js", "completions.js",
    "page.js",
)  # fmt: skip
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def run_content(folder: Path) -> JsonObject:
    """Return what a page shows of a run, for JSON. Reads the files of its folder only."""
    log = LogRows.read(folder / LOG)
    return {
        "name": f"{folder.parent.name}/{folder.name}",
        "folder": str(folder),
        "state": state_of_run(folder, log),
        "max_steps": log.max_steps,
        "last": log.last,
        "summary": log.summary or {},
        "unreadable_lines": log.unreadable,
        "curves": series_of(log.evaluations) | series_of(log.train),  # both have "elapsed"
        "phases": phases_of(log),
        "args": options_of(folder),
        "starts": starts_of(folder),
        "checkpoints": checkpoints_of(folder),
        "data": data_of(folder),
        "completions": completions_of(folder),
        "replies": replies_of(folder),
    }


def page(folders: Sequence[Path]) -> str:
    """Return the page of a run, or the comparison of several, as HTML without references to other files."""
    runs = [run_content(folder) for folder in folders]
    metrics = dict.fromkeys(name for run in runs for name in run["curves"])
    content = {"runs": runs, "topics": charts_of(metrics), "made": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    programs = [_asset(name) for name in PROGRAMS]
    values = {
        "title": _as_html(" and ".join(run["name"] for run in runs)),
        "license": _asset("uplot/LICENSE"),
        "styles": "\n".join(_asset(name) for name in STYLES),
        "content": as_script_json(content),
        "programs": "\n".join(f"<script>{program}</script>" for program in programs),
        "hashes": " ".join(f"'sha256-{_hash(program)}'" for program in programs),
    }
    return PLACEHOLDER.sub(lambda match: values[match[1]], _asset("page.html"))


def write_page(folders: Sequence[Path], file: Path) -> None:
    """Write the page to a file, whole or not at all. Raises OSError where it cannot be written."""
    partial = hidden_path(file)
    try:
        partial.write_text(page(folders), encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def as_script_json(content: JsonObject) -> str:
    """Return JSON that cannot end a <script> element. Numbers that are not finite become null."""
    text = json.dumps(_finite(content), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _finite(value: object) -> object:
    """Return JSON content with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _as_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _asset(name: str) -> str:
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def _hash(program: str) -> str:
    return base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
