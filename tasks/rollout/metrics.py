"""Metrics of a rollout server in Prometheus' text format, version 0.0.4."""

from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4"


COUNTERS = {
    "requests": "Completed prompts.",
    "prompt_tokens": "Prompt tokens of completed requests.",
    "completion_tokens": "Generated tokens.",
    "generation_seconds": "Seconds spent in /generate, summed over calls.",
    "weight_updates": "Loaded versions of the weights.",
}
GAUGES = {
    "generating": "Calls in progress.",
    "ready": "1 if the server can generate, else 0.",
}


def as_text(counters: Mapping[str, float], **gauges: float) -> str:
    """Return the values of COUNTERS and GAUGES in Prometheus' format."""
    lines = []
    for name, text in COUNTERS.items():
        lines += _lines(f"megaswift_rollout_{name}_total", "counter", text, counters[name])
    for name, text in GAUGES.items():
        lines += _lines(f"megaswift_rollout_{name}", "gauge", text, gauges[name])
    return "".join(f"{line}\n" for line in lines)


def _lines(name: str, kind: str, text: str, value: float) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
