"""args.json: the resolved options of a run and the source of each value. It is a valid config file."""

import json
import os
from pathlib import Path
from typing import Any

from ...bridge.option_groups import flag_values
from ...templates.json_types import JsonObject
from ..system.atomic_dir import os_error_hints

SECRET = ("hub_token", "vllm_server_api_key", "teacher_model_server_api_key")


def save_args(path: str | Path, options: object, sources: dict[str, str], **facts: object) -> None:
    """Write {"options": {flag: {"value", "source"}}, **facts}.

    `sources`: origin of each value ("default", "command line", "derived: why", or a config file's path); absent:
        default.
    `facts`: findings of the run, such as the chosen kernels.
    """
    table = {
        name: {"value": value, "source": sources.get(name, "default")}
        for name, value in flag_values(options).items()
        if name not in SECRET
    }
    with os_error_hints(Path(path)):
        Path(path).write_text(json.dumps({**facts, "options": table}, indent=2, default=os.fspath) + "\n")


def load_args(table: JsonObject, source: str) -> dict[str, tuple[Any, str]]:
    """Return value and source of each option in `save_args`'s JSON; `source` is the file's path.

    Defaults stay defaults. Derived values are omitted, to be derived again.
    """
    return {
        name: (entry["value"], "default" if entry["source"] == "default" else source)
        for name, entry in table["options"].items()
        if not entry["source"].startswith("derived")
    }
