"""Fields of vLLM's EngineArgs from --vllm_engine_kwargs."""

import dataclasses
import difflib
from typing import Any


def engine_kwargs(settings: dict[str, Any], names: set[str] | None = None) -> dict[str, Any]:
    """Return the settings as keyword arguments of an engine. Raises ValueError for a name that vLLM does not have.

    names: fields of EngineArgs; None: those of the installed vLLM.
    """
    if not settings:
        return {}
    if names is None:
        from vllm import EngineArgs  # pyright: ignore[reportMissingImports]

        names = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := next((name for name in settings if name not in names), None):
        nearest = difflib.get_close_matches(unknown, names, n=1)
        hint = f" Is it {nearest[0]}?" if nearest else ""
        raise ValueError(f"--vllm_engine_kwargs: {unknown} is no field of vLLM's EngineArgs.{hint} Fix or remove it")
    return dict(settings)
