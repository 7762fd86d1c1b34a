"""The rewards of completions: all functions at the same time, and an error that says which failed, and for what."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...templates.plural import plural
from ..system.plugins import place_of
from .reward_fn import Reward, RewardError, Sample


@dataclass(frozen=True)
class Scores:
    rewards: np.ndarray  # float64 [samples]: the weighted sum, NaN where none says anything
    by_function: dict[str, np.ndarray]  # name -> float64 [samples], NaN where it says nothing of a sample


class Call(threading.Thread):
    """A call that runs; `singly`: of one sample after the other, to find the one that it fails for.

    It is a daemon: one that hangs does not keep the process from ending.
    """

    def __init__(self, reward: Reward, samples: Sequence[Sample], *, singly: bool = False):
        super().__init__(name=f"reward {reward.name}", daemon=True)
        self.reward, self.samples, self.singly = reward, samples, singly
        self.result: Any = None
        self.error: BaseException | None = None
        self.at, self.since = 0, time.monotonic()  # the sample that it is at, and since when
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.start()

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a new thread begins with the first
            if not self.singly:
                self.result = self.reward(self.samples)
                return
            for self.at, sample in enumerate(self.samples):  # noqa: B020  others look where it is
                self.since = time.monotonic()
                self.reward([sample])
        except BaseException as error:  # SystemExit too: it would end this thread alone
            self.error = error

    def place(self) -> str:
        """Where it is, or where it raised."""
        if self.error is not None:
            return place_of(self.error.__traceback__, self.reward.file)
        return place_of(self.reward.frame(self.ident or 0), self.reward.file)


def score(rewards: Sequence[Reward], weights: Sequence[float], samples: Sequence[Sample], timeout: float) -> Scores:
    """Score completions. Where a function says None, the others' sum is the reward.

    timeout: seconds for each function; they run side by side. Raises RewardError for a function that raises, takes
    longer, or returns anything but a finite number or None for each sample. To find the sample that is the reason, a
    function is called again, with one sample at a time.
    """
    if not samples:
        return Scores(np.zeros(0), {reward.name: np.zeros(0) for reward in rewards})
    calls = [Call(reward, samples) for reward in rewards]
    deadline = time.monotonic() + timeout
    for call in calls:
        call.join(max(0.0, deadline - time.monotonic()))
        if call.is_alive():
            raise _late(call, timeout)
        if call.error is not None:
            raise _raised(call, timeout) from call.error
    by_function = {call.reward.name: call.reward.values(call.result, samples) for call in calls}
    values = np.stack(list(by_function.values()), axis=1)  # [samples, functions]
    sums = np.nansum(values * np.asarray(weights, np.float64), axis=1)
    return Scores(np.where(np.isnan(values).all(axis=1), np.nan, sums), by_function)


def _raised(call: Call, seconds: float) -> RewardError:
    """The error of a call that raised."""
    probe = Call(call.reward, call.samples, singly=True)
    probe.join(seconds)
    where = str(call.samples[probe.at]) if probe.error else f"{_all(call)}, and for none of them alone"
    return RewardError(
        f"--reward_funcs {call.reward.name} raised {type(call.error).__name__}: {call.error} ({call.place()}) for "
        f"{where}. Fix it, or return None for completions that it cannot score"
    )


def _late(call: Call, seconds: float) -> RewardError:
    """The error of a call that has not come back."""
    place = call.place()
    probe = Call(call.reward, call.samples, singly=True)
    probe.join(seconds)
    hangs = probe.is_alive() and time.monotonic() - probe.since > seconds / 2
    where = f"hangs for {call.samples[probe.at]}" if hangs else f"is slow, for {_all(call)}"
    return RewardError(
        f"--reward_funcs {call.reward.name} has not answered within {seconds:g} s (it is at {place}). It {where}. "
        "Fix it, or raise --reward_timeout"
    )


def _all(call: Call) -> str:
    return f"{plural(len(call.samples), 'completion')} together (the first is of {call.samples[0]})"
