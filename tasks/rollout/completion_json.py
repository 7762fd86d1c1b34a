"""JSON encoding of completions in a rollout server's responses."""

import base64

import numpy as np

from ...templates.json_types import JsonObject
from .engine import Completion


def as_json(completion: Completion) -> JsonObject:
    """Return a completion as JSON. Its experts are encoded in base64, in the smallest integer type that holds them."""
    fields = dict(vars(completion))
    if (experts := completion.experts) is not None:
        dtype = np.int16 if experts.min(initial=0) < 0 else np.min_scalar_type(experts.max(initial=0))
        data = base64.b64encode(experts.astype(dtype).tobytes()).decode()
        fields["experts"] = {"dtype": np.dtype(dtype).name, "shape": list(experts.shape), "data": data}
    return fields


def from_json(item: JsonObject) -> Completion:
    """Return the completion that `as_json` has encoded."""
    if (experts := item.get("experts")) is not None:
        flat = np.frombuffer(base64.b64decode(experts["data"]), np.dtype(experts["dtype"]))
        item = item | {"experts": flat.reshape(experts["shape"])}
    return Completion(**item)
