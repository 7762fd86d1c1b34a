"""Rows of a run's logging.jsonl, by kind and step. The log may have been cut off in the middle of a line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...templates.json_types import JsonObject

LOG = "logging.jsonl"
SUMMARY = "last_checkpoint"  # key that only the summary has


@dataclass
class LogRows:
    """Rows of each kind by step, in order of steps. A step that was logged again has the later values."""

    train: dict[int, JsonObject] = field(default_factory=dict)
    evaluations: dict[int, JsonObject] = field(default_factory=dict)
    saves: dict[int, JsonObject] = field(default_factory=dict)
    summary: JsonObject | None = None  # the last row of a run that has ended
    unreadable: int = 0  # lines that are no rows
    _kinds: dict[tuple[str, ...], dict[int, JsonObject]] = field(default_factory=dict)  # keyed by the names of a row

    @classmethod
    def read(cls, file: Path) -> "LogRows":
        """Read a log; a missing file has no rows."""
        log = cls()
        for row in log._parse(file):
            if SUMMARY in row:
                log.summary = row
                continue
            log.summary = None  # the run was resumed after it
            kind = log._kind(row)
            kind.setdefault(row["step"], {}).update(row)
        log.train, log.evaluations, log.saves = (
            dict(sorted(rows.items())) for rows in (log.train, log.evaluations, log.saves)
        )
        return log

    def _parse(self, file: Path) -> Iterator[JsonObject]:
        if not file.is_file():
            return
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row
                elif line.strip():
                    self.unreadable += 1

    def _kind(self, row: JsonObject) -> dict[int, JsonObject]:
        names = tuple(row)
        if names not in self._kinds:
            is_evaluation = any(name.startswith("eval_") for name in names)
            self._kinds[names] = self.saves if "save_wait" in row else self.evaluations if is_evaluation else self.train
        return self._kinds[names]

    @property
    def last(self) -> JsonObject:
        """Last row of training; empty without any."""
        return next(reversed(self.train.values()), {})

    @property
    def max_steps(self) -> int | None:
        """Number of steps of the whole run."""
        row = self.summary or self.last or next(reversed(self.evaluations.values()), {})
        return row.get("max_steps")
