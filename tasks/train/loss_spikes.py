"""Steps whose loss or gradient norm stands out: their update is skipped, on the device, without a wait of the host.

The rule is OLMo-core's (SkipStepOptimizer): a value is a spike if it lies more than `sigma` standard deviations above
the mean of the last 128. Unlike there a spike counts as that bound in what follows, so that one does not hide the next.
"""

from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime

WINDOW = 128  # steps
LEAST_DEVIATION = 1e-3  # share of the mean: a loss that hardly varies has no spikes within this


class SpikeFilter:
    """The last losses and gradient norms of a run, the same on every rank."""

    def __init__(self, sigma: float):
        self.sigma = sigma
        self._values = torch.zeros(WINDOW, 2, device=runtime.device())  # (loss, gradient norm) of each step
        self._steps = 0  # judged so far

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 if a step is a spike, else 0.0: fp32 [], on the device. No step is one in the first 64.

        loss, norm: fp32 [], of the global batch; the loss up to a factor that is the same for all steps.
        """
        latest = torch.stack([loss, norm]).float()
        spike = torch.zeros((), device=latest.device)
        if self._steps >= WINDOW // 2:
            values = self._values[: min(self._steps, WINDOW)]
            mean = values.mean(0)
            bound = mean + self.sigma * values.std(0).maximum(LEAST_DEVIATION * mean.abs())
            spike = (latest > bound).any().float()
            latest = latest.minimum(bound)
        self._values[self._steps % WINDOW] = latest
        self._steps += 1
        return spike

    def state(self) -> dict[str, Any]:
        """Return the state for JSON."""
        return {"values": self._values.tolist(), "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._values = torch.tensor(state["values"], device=self._values.device)
        self._steps = state["steps"]
