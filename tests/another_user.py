"""Another account of the machine: what it may read of this one's files and processes."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

NOBODY = 65534


def readable(paths: Iterable[Path]) -> list[Path]:
    """Return which of the paths another account can read. Skips the test if it cannot take another account's rights."""
    if os.getuid():
        pytest.skip("needs root, to take the rights of another account")
    paths = list(paths)
    reading, writing = os.pipe()
    child = os.fork()  # and no new interpreter, which may lie where the other account cannot look
    if not child:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(writing, bytes(_is_readable(path) for path in paths))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answers:
        answer = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    assert len(answer) == len(paths)
    return [path for path, is_readable in zip(paths, answer, strict=True) if is_readable]


def _is_readable(path: Path) -> bool:
    try:
        os.listdir(path) if os.path.isdir(path) else path.read_bytes()
    except OSError:
        return False
    return True
