"""Append-only text file whose write errors do not end a run."""

import os
from collections.abc import Callable
from pathlib import Path

BUFFER_BYTES = 64 * 2**20  # text beyond this limit is lost


class AppendFile:
    """Append-only text file that buffers lines while they cannot be written.

    warn: called with a message when writing begins to fail, and at the end if bytes are lost. Raises OSError where the
    file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self._path, self._warn = path, warn
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._buffer = b""
        self._has_failed = False
        self._lost_bytes = 0

    def write(self, text: str) -> None:
        """Append whole lines. They are in the file when this returns, unless writing fails."""
        data = text.encode()
        if len(self._buffer) + len(data) <= BUFFER_BYTES:
            self._buffer += data
        else:
            self._lost_bytes += len(data)
        try:
            while self._buffer:
                self._buffer = self._buffer[os.write(self._descriptor, self._buffer) :]
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._warn(
                    f"warning: {self._path} cannot be written ({error.strerror}). Training goes on; its lines are kept "
                    "in memory until they can be written."
                )
            self._has_failed = True

    def close(self) -> None:
        """Write the buffer if possible, and close the file."""
        self.write("")
        if lost_bytes := self._lost_bytes + len(self._buffer):
            self._warn(f"warning: {lost_bytes:,} bytes of {self._path} could not be written and are lost.")
        os.close(self._descriptor)
