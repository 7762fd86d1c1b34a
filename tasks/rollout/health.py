"""Health checks of rollout servers, and concurrent calls to several of them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable

import httpx
from tqdm import tqdm

from .addresses import started_servers

POLL_INTERVAL = 2.0  # seconds between health checks
ANSWER_TIMEOUT = 10.0  # seconds for an answer of /health, and to connect


def notify(text: str) -> None:
    """Print a message to stderr, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)


def reconnect_hint(reconnect_timeout: float) -> str:
    """Return text on how to recover a lost server; `reconnect_timeout`: seconds that the run waits for it."""
    if started_servers():
        return "The command that started it shows the end of its log."
    if reconnect_timeout:
        return f"See its log and restart it: the run waits for it, for {reconnect_timeout:.0f} s."
    return (
        "See its log, restart it and resume the run; with --server_reconnect_timeout SECONDS a run waits for it "
        "instead."
    )


async def unreachable_reason(http: httpx.AsyncClient) -> str | None:
    """Return why the server is considered unreachable; None if it answers."""
    for is_last_attempt in (False, True):
        try:
            response = await http.get("/health", timeout=ANSWER_TIMEOUT)
            return None if response.is_success else f"/health returns {response.status_code}"
        except httpx.TimeoutException:
            if is_last_attempt:
                return f"no answer within {ANSWER_TIMEOUT:.0f} s, twice"
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
    return None


async def supervise[T](
    http: httpx.AsyncClient, work: Coroutine[object, object, T], make_error: Callable[[str], Exception]
) -> T:
    """Return the result of `work`; raise `make_error(reason)` once the server is unreachable."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_INTERVAL))[0]:
            if reason := await unreachable_reason(http):
                raise make_error(reason)
        return await task
    finally:
        task.cancel()


async def gather_all[T](calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return all results in order. The first failure cancels the other calls and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
