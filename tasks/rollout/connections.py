"""HTTP connections of the rollout server: limited in number, and closed if no request arrives."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http import auto

from ...templates.json_types import JsonObject

HEADER_SECONDS = 10.0  # for request headers, from the connection or the first byte of the request
HTTPProtocol: Any = auto.AutoHTTPProtocol  # httptools if installed, else h11


class Connection(HTTPProtocol):
    """uvicorn's protocol with a timeout of HEADER_SECONDS for request headers.

    Beyond `max_count` connections, it closes one without a request, else the newest.
    """

    max_count = 512
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_headers()
        if len(self.connections) > self.max_count:
            idle = [
                connection for connection in self.connections if connection is not self and connection.cycle is None
            ]
            (idle[0] if idle else self).transport.abort()

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


def connection_settings() -> JsonObject:
    """Return uvicorn's settings for as many connections as half of this process's file limit allows."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    files = 2**20 if hard_limit == resource.RLIM_INFINITY else hard_limit
    Connection.max_count = max(8, min(files // 2, 16384))
    # asyncio accepts the whole backlog before it can close a connection.
    return {"http": Connection, "backlog": max(8, min(files // 4, 1024))}
