"""Process that answers requests with JSON lines over its pipes."""

import json
import subprocess
import sys
from typing import Any


class WorkerProcess:
    """Process of a module. `select` accepts it, where it is ready when an answer has come.

    environment: its variables; None: those of this process.
    """

    def __init__(self, module: str, environment: dict[str, str] | None = None):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: do not import from the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C then reaches only the run, which ends the worker by closing its pipe
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def fileno(self) -> int:
        return self._stdout.fileno()

    def write(self, request: Any) -> None:
        self._stdin.write(json.dumps(request).encode() + b"\n")
        self._stdin.flush()

    def read_line(self) -> bytes:
        """Wait for a line, and return it; empty if the process died."""
        return self._stdout.readline()

    def receive(self) -> Any:
        """Wait for the answer to a request, and return it. Raises EOFError if the process died."""
        if line := self.read_line():
            return json.loads(line)
        self.kill()
        raise EOFError

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
