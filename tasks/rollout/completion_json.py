"""Completions on their way from a server, as JSON."""

import base64
from typing import Any

import numpy as np

from .engine import Completion


def as_json(completion: Completion) -> dict[str, Any]:
    """Experts are bytes, in base64, of the smallest type that holds them."""
    found = dict(vars(completion))
    if (experts := completion.experts) is not None:
        kind = np.int16 if experts.min(initial=0) < 0 else np.min_scalar_type(experts.max(initial=0))
        data = base64.b64encode(experts.astype(kind).tobytes()).decode()
        found["experts"] = {"dtype": np.dtype(kind).name, "shape": list(experts.shape), "data": data}
    return found


def from_json(item: dict[str, Any]) -> Completion:
    """What `as_json` was given."""
    if (experts := item.get("experts")) is not None:
        flat = np.frombuffer(base64.b64decode(experts["data"]), np.dtype(experts["dtype"]))
        item = item | {"experts": flat.reshape(experts["shape"])}
    return Completion(**item)
