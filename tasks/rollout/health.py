"""Whether a server that is waited for is still there, and answers of several at once."""

import asyncio
import sys
from collections.abc import Coroutine, Iterable
from typing import Any

import httpx
from tqdm import tqdm

POLL = 2.0  # seconds between two looks at a server that is waited for
ANSWER = 10.0  # seconds within which a server that is there answers /health


def say(text: str) -> None:
    """To who watches the run."""
    tqdm.write(text, file=sys.stderr)  # above the progress bar, where there is one


def cure(wait: float) -> str:
    """What to do about a server that is lost, of a run that waits so many seconds for it."""
    if wait:
        return f"See what it printed, and start it again: the run waits for it, for {wait:.0f} s."
    return (
        "See what it printed, start it again and resume the run; with --server_reconnect_timeout SECONDS a run waits "
        "for it instead."
    )


async def silence(http: httpx.AsyncClient) -> str | None:
    """Why the server is taken to be gone; None where it answers."""
    for last in (False, True):
        try:
            response = await http.get("/health", timeout=ANSWER)
            return None if response.is_success else f"/health gives {response.status_code}"
        except httpx.TimeoutException:
            if last:
                return f"no answer within {ANSWER:.0f} s, twice"
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
    return None


async def all_of(calls: Iterable[Coroutine]) -> list[Any]:
    """All answers in order; once one fails the others are left off, and its exception is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
