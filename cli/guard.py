"""Process that kills sessions when the process that has started it ends without having removed them, as by SIGKILL.

It reads +SESSION and -SESSION, a line each, until the pipe's writer has ended. Started by path, so it imports nothing
of this project.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable


class Guard:
    """The process, in the one that starts it."""

    def __init__(self):
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def add(self, session: int) -> None:
        self._tell(f"+{session}\n")

    def remove(self, session: int) -> None:
        self._tell(f"-{session}\n")

    def close(self) -> None:
        """End the process, which kills the sessions that were not removed."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # the guard was killed: the parent-death signal is left
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def kill_session(session: int) -> None:
    """Kill the processes of a session that are in its first process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def sessions_left(lines: Iterable[str]) -> set[int]:
    """Return the sessions that were added and not removed, at the end of the lines."""
    sessions: set[int] = set()
    for line in lines:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    return sessions


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for session in sessions_left(sys.stdin):
        kill_session(session)
