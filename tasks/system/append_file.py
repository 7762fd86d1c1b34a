"""Append-only text files whose write errors do not end a run."""

import os
from collections.abc import Callable
from pathlib import Path

BUFFER_BYTES = 64 * 2**20  # further text is lost


class AppendFile:
    """Append-only text file. Lines that cannot be written are buffered, and written once there is space.

    note: called once when writing fails, and at the end with the amount lost. Raises OSError where the file cannot be
    opened.
    """

    def __init__(self, path: Path, note: Callable[[str], None]):
        self._path, self._note = path, note
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._buffer = b""
        self._failed = False
        self._lost = 0  # bytes

    def write(self, text: str) -> None:
        """Append whole lines; they are in the file when this returns, if there is space."""
        data = text.encode()
        if len(self._buffer) + len(data) <= BUFFER_BYTES:
            self._buffer += data
        else:
            self._lost += len(data)
        try:
            while self._buffer:
                self._buffer = self._buffer[os.write(self._descriptor, self._buffer) :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._note(
                    f"warning: {self._path} cannot be written ({error.strerror}). Training goes on; its lines are kept "
                    "in memory until they can be written."
                )
            self._failed = True

    def close(self) -> None:
        """Write the buffer if possible, and close the file."""
        self.write("")
        if lost := self._lost + len(self._buffer):
            self._note(f"warning: {lost:,} bytes of {self._path} could not be written and are lost.")
        os.close(self._descriptor)
