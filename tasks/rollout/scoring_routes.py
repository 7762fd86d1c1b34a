"""Routes of the rollout server that score tokens for distillation. They need no claim and change no state.

POST /vocabulary     {} -> the tokenizer's vocabulary: token ids by token
POST /top_log_probs  {tokens, places (positions), top, vocab_size, images, videos, audios, prompt_length} ->
                     `encode_top` of `ScoringEngine.top_log_probs`
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

import numpy as np
from fastapi import Request as Http
from fastapi.responses import JSONResponse, Response

from .backend import Backend
from .bodies import MEDIA, Limits, json_body
from .engine import TopLogProbs
from .fields import Fields


class ScoringServer(Protocol):
    """Interface of server.Server that these routes need."""

    backend: Backend
    limits: Limits

    async def run_work[T](self, http: Http, work: Coroutine[object, object, T], check: Callable[[], None]) -> T: ...
    def check_base_weights(self) -> None: ...


async def vocabulary(server: ScoringServer, http: Http) -> Response:
    return JSONResponse(await server.backend.vocabulary())


async def top_log_probs(server: ScoringServer, http: Http) -> Response:
    fields = Fields(await json_body(http), ("tokens", "places", "top", "vocab_size", "prompt_length", *MEDIA))
    if any(name in fields for name in MEDIA):  # decoded in a thread, so that the server stays responsive
        document = await asyncio.to_thread(server.limits.document, fields)
    else:
        document = server.limits.document(fields)
    work = server.backend.top_log_probs(
        document,
        top=fields.integer("top", 1, server.limits.vocab_size),
        vocab_size=fields.integer("vocab_size", 1),
        positions=fields.integers("places", 0, (document.prompt_length or 0) - 2),
    )
    scores = await server.run_work(http, work, server.check_base_weights)
    return Response(encode_top(scores), media_type="application/octet-stream")


def encode_top(top: TopLogProbs) -> bytes:
    """Return log-probabilities as fp32, then tokens as int32, in little-endian bytes."""
    return top.log_probs.astype("<f4").tobytes() + top.tokens.astype("<i4").tobytes()


def decode_top(data: bytes, positions: int, top: int) -> TopLogProbs:
    """Decode the bytes of `encode_top`. Raises ValueError for a wrong number of bytes."""
    if len(data) != 8 * positions * top:
        raise ValueError(f"{len(data)} bytes instead of {8 * positions * top}")
    half = len(data) // 2
    return TopLogProbs(
        np.frombuffer(data[:half], "<f4").reshape(positions, top), np.frombuffer(data[half:], "<i4").reshape(-1, top)
    )


SCORING_ROUTES = (("/vocabulary", vocabulary), ("/top_log_probs", top_log_probs))
