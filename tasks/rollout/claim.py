"""Claim of a rollout server: the one run that may send weights, sleep and wake it."""

import hmac
import time

from .fields import RequestError
from .weight_buckets import process_start_time


class Claim:
    """Token, description and process of the run with the claim.

    The claim ends when the run releases it, when its process ends, or after `silence` seconds without a request.
    """

    def __init__(self, silence: float):
        self.silence = silence
        self.run: str | None = None  # token; None: the server is free
        self.who = ""  # the run's description of itself; stays after the claim has ended
        self.last_request = 0.0
        self._process: tuple[int, str] | None = None  # id and start time, if on this host

    def check(self, token: str) -> None:
        """Renew the claim. Raises RequestError where another run has it, or none."""
        if self.run is None:
            raise RequestError(403, "unclaimed", "no run has claimed this server: POST /claim first")
        if not self.is_held_by(token):
            raise self.error(403)
        self.renew()

    def error(self, status: int) -> RequestError:
        """Return the error for another run."""
        ago = time.monotonic() - self.last_request
        return RequestError(
            status,
            "claimed",
            f"another run has claimed this server ({self.who}; last request {ago:.0f} s ago). It is free when that run "
            f"ends, or {self.silence:.0f} s after its last request. Start another server, or end that run.",
        )

    def is_held_by(self, token: str) -> bool:
        """Return whether the run with this token has the claim."""
        return self.run is not None and hmac.compare_digest(token.encode(), self.run.encode())

    def take(self, run: str, who: str) -> None:
        self.run, self.who, self._process = run, who, None

    def end(self) -> None:
        self.run = self._process = None

    def renew(self) -> None:
        self.last_request = time.monotonic()

    def is_silent(self) -> bool:
        """Return whether the run has not sent a request for `silence` seconds."""
        return self.run is not None and time.monotonic() - self.last_request >= self.silence

    def set_process(self, pid: int) -> None:
        """Remember the run's process on this host, if it is running."""
        if start := process_start_time(pid):
            self._process = pid, start

    def is_process(self, pid: int) -> bool:
        return self._process is not None and self._process[0] == pid

    def has_ended(self) -> bool:
        """Return whether the run's process was on this host and has ended."""
        return self._process is not None and process_start_time(self._process[0]) != self._process[1]
