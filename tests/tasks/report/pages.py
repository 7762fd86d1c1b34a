"""Run folders, and what a page has of them, as an HTML parser reads it."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

TRAIN = {"grad_norm": 0.5, "learning_rate": 1e-4, "mfu": None, "data_wait": 0.1, "seconds_per_step": 1.0}
TRAIN |= {"tokens_per_second_per_gpu": 100.0, "memory_gib": 1.5, "eta": 3.0}


def train_row(step: int, max_steps: int = 10, **metrics: float | None) -> dict[str, Any]:
    row = {"step": step, "max_steps": max_steps, "loss": 1 / step, "tokens": 100 * step, "elapsed": float(step)}
    return row | TRAIN | metrics


def write_log(folder: Path, rows: list[dict[str, Any]], end: str = "") -> Path:
    """Write logging.jsonl with NaN and Infinity as Python writes them; `end`: a line that was cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logging.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return folder


def write_completions(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def completion_row(generation: int, text: str, reward: float | None = 1.0, prompt: str = "why?") -> dict[str, Any]:
    return {
        "generation": generation,
        "messages": [{"role": "user", "content": prompt}],
        "completion": text,
        "completion_ids": [1, 2],
        "rewards": {"exact": reward},
        "reward": reward,
        "advantage": 0.5,
        "finish_reason": "stop",
        "length": 2,
    }


class Page(HTMLParser):
    """Elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, file: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = self._tag = ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._tag = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts[-1] += data
        elif self._tag == "title":
            self.title += data

    @property
    def content(self) -> dict[str, Any]:
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        (number,) = [i for i, attributes in enumerate(scripts) if attributes.get("id") == "content"]
        return json.loads(self.scripts[number], parse_constant=_refuse)


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON: JSON.parse of a browser fails")


def spiky(steps: int) -> list[dict[str, Any]]:
    """Rows of a long run whose loss has one spike up, one down, and one value that is not finite."""
    rows = [
        train_row(step, steps, loss=2 + math.sin(step / 500) + 0.1 * math.cos(37 * step))
        for step in range(1, steps + 1)
    ]
    rows[steps // 3]["loss"], rows[steps // 2]["loss"], rows[steps // 5]["loss"] = 77.0, -55.0, math.nan
    return rows
