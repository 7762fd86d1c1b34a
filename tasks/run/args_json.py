"""args.json: the resolved options of a run, each with where its value came from. Can be given back as a config file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ...bridge.options import ModelOptions
from ..system.atomic_dir import explained

SECRET = ("hub_token", "vllm_server_api_key", "teacher_model_server_api_key")


def save_args(path: str | Path, options: ModelOptions, sources: dict[str, str], **facts: Any) -> None:
    """Write {"options": {flag: {"value", "source"}}, **facts}.

    `sources` says where a value came from ("default", "command line", "derived: why", or a config file's path; what it
    does not name is a default); `facts` are what the run found out, such as the kernels that it chose.
    """
    table = {
        field.name: {"value": getattr(options, field.name), "source": sources.get(field.name, "default")}
        for field in dataclasses.fields(options)
        if field.name not in SECRET
    }
    with explained(Path(path)):
        Path(path).write_text(json.dumps({**facts, "options": table}, indent=2, default=os.fspath) + "\n")


def load_args(table: dict[str, Any], source: str) -> dict[str, tuple[Any, str]]:
    """Value and source of each option in what `save_args` wrote; `source` is the file's path.

    A default stays a default; a value that was derived is left out, to be derived again.
    """
    return {
        name: (entry["value"], "default" if entry["source"] == "default" else source)
        for name, entry in table["options"].items()
        if not entry["source"].startswith("derived")
    }
