"""What a server says of given tokens, for students of its model: nobody has to claim it for that, and nothing changes.

POST /vocabulary      {} -> the tokenizer's, token by text
POST /top_log_probs   {tokens, places, top, vocab_size} -> log-probabilities and tokens (`packed`), as of `Reader`
"""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from .backend import Backend
from .bodies import Fields, Limits, json_body
from .engine import Top


class Serving(Protocol):
    """What of server.Server is needed."""

    backend: Backend
    limits: Limits

    async def at_work(self, http: Http, work: Coroutine[Any, Any, Any], check: Callable[[], None]) -> Any: ...
    def check_its_own(self) -> None: ...


async def vocabulary(server: Serving, http: Http) -> Response:
    return JSONResponse(await server.backend.vocabulary())


async def top_log_probs(server: Serving, http: Http) -> Response:
    fields = Fields(await json_body(http), ("tokens", "places", "top", "vocab_size"))
    asked: dict[str, Any] = {
        "tokens": server.limits.tokens(fields, room=0),
        "top": fields.integer("top", 1, server.limits.vocab_size),
        "vocab_size": fields.integer("vocab_size", 1),
    }
    asked["places"] = fields.integers("places", 0, len(asked["tokens"]) - 2)
    found = await server.at_work(http, server.backend.top_log_probs(**asked), server.check_its_own)
    return Response(packed(found), media_type="application/octet-stream")


def packed(top: Top) -> bytes:
    """Log-probabilities as fp32, then tokens as int32."""
    return top.log_probs.astype("<f4").tobytes() + top.tokens.astype("<i4").tobytes()


def unpacked(data: bytes, places: int, top: int) -> Top:
    """Raises ValueError where the bytes are not of so many places."""
    if len(data) != 8 * places * top:
        raise ValueError(f"{len(data)} bytes came in the place of {8 * places * top}")
    half = len(data) // 2
    return Top(
        np.frombuffer(data[:half], "<f4").reshape(places, top), np.frombuffer(data[half:], "<i4").reshape(-1, top)
    )


READING = (("/vocabulary", vocabulary), ("/top_log_probs", top_log_probs))
