"""Text files that a run appends to, and that are not worth a run: where the disk is full, training goes on."""

import os
from collections.abc import Callable
from pathlib import Path

KEPT = 64 * 2**20  # bytes of text that wait for room; what comes beyond these is lost


class AppendFile:
    """Text file that is appended to. What cannot be written is kept, and written once there is room.

    note: is told once when lines cannot be written, and at the end of those that are lost.
    Raises OSError where the file cannot be opened.
    """

    def __init__(self, path: Path, note: Callable[[str], None]):
        self._path, self._note = path, note
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._waiting = b""
        self._failed = False
        self._lost = 0  # bytes

    def write(self, text: str) -> None:
        """Append whole lines, each at the end of the file when this returns, unless there is no room."""
        data = text.encode()
        if len(self._waiting) + len(data) <= KEPT:
            self._waiting += data
        else:
            self._lost += len(data)
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._note(
                    f"warning: {self._path} cannot be written ({error.strerror}). Training goes on; its lines are kept "
                    "in memory until they can be written."
                )
            self._failed = True

    def close(self) -> None:
        """Try to write what waits, and close the file."""
        self.write("")
        if lost := self._lost + len(self._waiting):
            self._note(f"warning: {lost:,} bytes of {self._path} could not be written and are lost.")
        os.close(self._descriptor)
