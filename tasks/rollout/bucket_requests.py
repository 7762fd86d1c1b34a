"""Requests that name memory of a run's process: its probe, and buckets of weights."""

import re

from fastapi import Request as Http

from ...templates.json_types import Json, JsonObject
from .claim import Claim
from .fields import Fields, invalid_request
from .weight_buckets import PROBE_BYTES, Bucket, MemoryHandle, parse_entry

MAX_ENTRIES = 2**20  # tensors of a bucket


def shared_bucket(body: JsonObject, owner: Claim) -> Bucket:
    """Return a bucket in memory of the process of the run that holds the claim, or to be broadcast by its GPU."""
    fields = Fields(body, ("entries", "place", "bytes"))
    count = fields.integer("bytes", 1)
    entries = [parse_entry(item, count) for item in fields.items("entries", MAX_ENTRIES)]
    if (item := fields.raw("place")) is None:
        return Bucket(entries, None, bytes=count)
    if not isinstance(item, list) or len(item) != 3 or not all(type(number) is int for number in item):
        raise invalid_request("place must be null, or the numbers [pid, fd, bytes]")
    handle = MemoryHandle(*item)  # pyright: ignore[reportArgumentType]
    if not owner.is_process(handle.pid) or handle.bytes < count:
        raise invalid_request("place must be memory of the process whose probe was read at /claim")
    return Bucket(entries, handle, bytes=count)


def probe_of(item: Json) -> tuple[int, int, str] | None:
    """Return process, descriptor and secret of a client's memory. Raises RequestError."""
    if item is None:
        return None
    fields = Fields(item, ("pid", "fd", "bytes", "secret"), "probe")
    secret = fields.text("secret")
    fields.integer("bytes", PROBE_BYTES, PROBE_BYTES)
    if not re.fullmatch(f"[0-9a-f]{{{2 * PROBE_BYTES}}}", secret):
        raise fields.invalid_request(f"secret must be {PROBE_BYTES} bytes in hex")
    return fields.integer("pid", 1), fields.integer("fd", 0), secret


def bucket_length(http: Http) -> int:
    """Return the content length of a bucket. Raises RequestError."""
    length = http.headers.get("content-length", "")
    if not length.isdecimal() or int(length) < 8:
        raise invalid_request(f"content-length {length or '(none)'}: a bucket has at least eight bytes")
    return int(length)
