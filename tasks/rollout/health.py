"""Health checks of rollout servers, and concurrent calls to several of them."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable

import httpx
from tqdm import tqdm

POLL = 2.0  # seconds between two health checks
ANSWER = 10.0  # seconds for an answer of /health


def notify(text: str) -> None:
    """Print a message above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)


def reconnect_hint(wait: float) -> str:
    """Return how to recover a lost server; `wait`: seconds for which the run waits for it."""
    if wait:
        return f"See its log and restart it: the run waits for it, for {wait:.0f} s."
    return (
        "See its log, restart it and resume the run; with --server_reconnect_timeout SECONDS a run waits for it "
        "instead."
    )


async def unreachable_reason(http: httpx.AsyncClient) -> str | None:
    """Return why the server counts as gone; None if it answers."""
    for last in (False, True):
        try:
            response = await http.get("/health", timeout=ANSWER)
            return None if response.is_success else f"/health returns {response.status_code}"
        except httpx.TimeoutException:
            if last:
                return f"no answer within {ANSWER:.0f} s, twice"
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
    return None


async def supervise[T](
    http: httpx.AsyncClient, work: Coroutine[object, object, T], lost: Callable[[str], Exception]
) -> T:
    """Await `work`; raise `lost(reason)` once the server is unreachable."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL))[0]:
            if reason := await unreachable_reason(http):
                raise lost(reason)
        return await task
    finally:
        task.cancel()


async def gather_all[T](calls: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return all results in order; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
