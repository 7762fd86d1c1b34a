"""Answers of the rollout server to failed requests: {"kind", "error"}."""

import functools
import logging
from collections.abc import Awaitable, Callable

from fastapi import Request as Http
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from .bodies import client_gone
from .fields import RequestError

log = logging.getLogger("megaswift.rollout")


async def refuse(_http: Http, error: Exception) -> JSONResponse:
    """Answer a RequestError with its kind and status."""
    assert isinstance(error, RequestError)
    return JSONResponse({"kind": error.kind, "error": str(error)}, error.status)


async def refuse_value(_http: Http, error: Exception) -> JSONResponse:
    """Answer a ValueError as an invalid request."""
    return JSONResponse({"kind": "request", "error": str(error)}, 422)


def report_errors[T](route: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Wrap a route so that engine errors are reported to the client, too."""

    @functools.wraps(route)
    async def call(**arguments: object) -> T:
        try:
            return await route(**arguments)
        except (RequestError, ValueError):
            raise
        except ClientDisconnect:
            raise client_gone() from None
        except Exception as error:
            log.exception("%s failed", route.__name__)
            raise RequestError(500, "engine", f"{type(error).__name__}: {error}") from error

    return call
