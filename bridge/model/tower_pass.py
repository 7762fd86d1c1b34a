"""Times of a tower's passes."""

import time
from typing import NamedTuple

import torch

from .. import runtime


class TowerPass(NamedTuple):
    """Begin and end of a pass: events of the device, or the host's clock on a CPU."""

    begin: torch.cuda.Event | float
    end: torch.cuda.Event | float

    def seconds(self) -> float:
        """Return its duration. The device must have reached its end."""
        if isinstance(self.begin, torch.cuda.Event) and isinstance(self.end, torch.cuda.Event):
            return self.begin.elapsed_time(self.end) / 1000
        assert isinstance(self.begin, float)
        assert isinstance(self.end, float)
        return self.end - self.begin


def now() -> torch.cuda.Event | float:
    if runtime.device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
