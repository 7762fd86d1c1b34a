"""Wait for files that can be read."""

from collections.abc import Sequence
from multiprocessing.connection import wait


def readable[T](files: Sequence[T], timeout: float | None = None) -> list[T]:
    """Return those that can be read, or [] after `timeout` seconds. Descriptors may be any, unlike select.select's."""
    return wait(files, timeout)  # pyright: ignore[reportArgumentType, reportReturnType]
