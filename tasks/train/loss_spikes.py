"""Filter of loss spikes: skips the update of a step with an outlying loss or gradient norm, without a host sync.

The rule is that of OLMo-core's SkipStepOptimizer: a spike is more than `sigma` standard deviations above the mean of
the last 128 steps. Unlike OLMo-core, the history stores a spike clipped to that bound, so it does not hide later ones.
"""

from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime

WINDOW = 128  # steps
MIN_DEVIATION = 1e-3  # minimum standard deviation, as a share of the mean: a nearly constant loss has no spikes


class SpikeFilter:
    """History of losses and gradient norms, equal on every rank."""

    def __init__(self, sigma: float):
        self.sigma = sigma
        self._values = torch.zeros(WINDOW, 2, device=runtime.device())  # (loss, gradient norm) of each step
        self._steps = 0  # judged so far

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 if a step is a spike, else 0.0: fp32 [] on the device. The first 64 steps never are.

        loss, norm: fp32 [], of the global batch. A constant factor of the loss does not matter.
        """
        latest = torch.stack([loss, norm]).float()
        spike = torch.zeros((), device=latest.device)
        if self._steps >= WINDOW // 2:
            values = self._values[: min(self._steps, WINDOW)]
            mean = values.mean(0)
            bound = mean + self.sigma * values.std(0).maximum(MIN_DEVIATION * mean.abs())
            spike = (latest > bound).any().float()
            latest = latest.minimum(bound)
        self._values[self._steps % WINDOW] = latest
        self._steps += 1
        return spike

    def state(self) -> dict[str, Any]:
        """Return the state for JSON."""
        return {"values": self._values.tolist(), "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._values = torch.tensor(state["values"], device=self._values.device)
        self._steps = state["steps"]
