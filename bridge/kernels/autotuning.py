"""Compiles the variants of autotuned Triton kernels in parallel, where the autotuner compiles one after another."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.autotuner import Autotuner


@contextmanager
def parallel_compilation() -> Iterator[None]:
    """Compile all variants of a kernel at once before the autotuner measures them, in this context.

    flash-linear-attention's kernels of a Kimi delta attention have 150 variants, which take minutes one by one.
    """
    measure = Autotuner.run

    def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if len(tuner.configs) > 1:
            arguments = {name: value for name, value in kwargs.items() if name != "warmup"}
            # A variant that does not compile is left to the autotuner.
            with AsyncCompileMode(pool, ignore_errors=True):
                tuner.warmup(*args, **arguments)
        return measure(tuner, *args, **kwargs)

    with ThreadPoolExecutor(_threads()) as pool:
        Autotuner.run = run  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            Autotuner.run = measure


def _threads() -> int:
    """Return the cores for each process on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
