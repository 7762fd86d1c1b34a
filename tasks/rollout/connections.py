"""Connections of clients to the rollout server: bounded in number, and closed where a request does not come."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http import auto

HEADER_SECONDS = 10.0  # within which a client that has connected, or begun a request, sends its headers
HTTPProtocol: Any = auto.AutoHTTPProtocol  # by h11, or by httptools where that is installed


class Connection(HTTPProtocol):
    """uvicorn's, that waits for headers no longer than HEADER_SECONDS.

    Where there are more than `most`, one that has sent no request makes room; else the newest is closed.
    """

    most = 512
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()
        if len(self.connections) > self.most:
            silent = [other for other in self.connections if other is not self and other.cycle is None]
            (silent[0] if silent else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._waiting = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def connection_settings() -> dict[str, Any]:
    """uvicorn's settings for as many connections as this process may have; half of its files are for other things."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = 2**20 if hard == resource.RLIM_INFINITY else hard
    Connection.most = max(8, min(files // 2, 16384))
    # asyncio takes as many as wait at a time, before the first of them can be closed.
    return {"http": Connection, "backlog": max(8, min(files // 4, 1024))}
