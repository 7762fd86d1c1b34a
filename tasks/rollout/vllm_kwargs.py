"""Settings of vLLM: fields of its EngineArgs from --vllm_engine_kwargs, and its environment on a CPU."""

import dataclasses
import difflib
import os
from typing import Any


def set_cpu_defaults() -> None:
    """Set environment variables of vLLM on a CPU, unless the user has. Call it before vLLM is imported."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else most of the host's memory
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other processes use the same cores


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
