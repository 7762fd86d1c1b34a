"""Utilities that plugins written for ms-swift import from `swift.utils`."""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...templates.json_types import JsonObject


class PluginLogger(logging.Logger):
    """Logger of plugins, with the methods that log a message once."""

    def __init__(self, name: str, level: int = logging.NOTSET):
        super().__init__(name, level)
        self._logged: set[str] = set()

    def info_once(self, message: str, *arguments: object, **settings: Any) -> None:
        if self._is_first(message):
            self.info(message, *arguments, **settings)

    def warning_once(self, message: str, *arguments: object, **settings: Any) -> None:
        if self._is_first(message):
            self.warning(message, *arguments, **settings)

    def _is_first(self, message: str) -> bool:
        is_first = message not in self._logged
        self._logged.add(message)
        return is_first


_logger: PluginLogger | None = None


def get_logger(*_: object, **__: object) -> PluginLogger:
    """Return the logger of all plugins. It writes to stderr: on rank 0 from INFO, elsewhere from ERROR."""
    global _logger
    if _logger is None:
        _logger = PluginLogger("megaswift.plugins", logging.INFO if is_master() else logging.ERROR)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)s:plugin] %(message)s"))
        _logger.addHandler(handler)
    return _logger


def get_dist_setting() -> tuple[int, int, int, int]:
    """Return rank, local rank, world size and local world size; -1 for the ranks outside a distributed run."""
    names = {"RANK": -1, "LOCAL_RANK": -1, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    rank, local_rank, size, local_size = (int(os.environ.get(name, default)) for name, default in names.items())
    return rank, local_rank, size, local_size


def is_master() -> bool:
    return get_dist_setting()[0] in (-1, 0)


def get_env_args(name: str, convert: Callable[[str], Any], default: Any) -> Any:
    """Return the environment variable of a name, in capitals, or the default."""
    value = os.environ.get(name.upper())
    if value is None:
        return default
    return value.lower() in ("1", "true") if convert is bool else convert(value)


def read_from_jsonl(path: str | Path, encoding: str = "utf-8") -> list[JsonObject]:
    return [json.loads(line) for line in Path(path).read_text(encoding=encoding).splitlines() if line.strip()]


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Return nested data with its tensors on the device."""
    if isinstance(data, Mapping):
        return {key: to_device(value, device, non_blocking) for key, value in data.items()}
    if isinstance(data, list | tuple):
        values = [to_device(value, device, non_blocking) for value in data]
        return tuple(values) if isinstance(data, tuple) else values
    return data.to(device=device, non_blocking=non_blocking) if hasattr(data, "to") else data
