"""Scores of completions. Reward functions run concurrently; errors name the function and the sample."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...templates.plural import plural
from ..system.plugins import line_of
from .reward_fn import Reward, RewardError, RewardSample


@dataclass(frozen=True)
class Scores:
    """Rewards of completions, and the values of each function."""

    rewards: np.ndarray  # float64 [samples]: weighted sums, NaN where all are None
    by_function: dict[str, np.ndarray]  # name -> float64 [samples], NaN for None


class RewardCall(threading.Thread):
    """Call of a reward in a daemon thread, which does not block the exit of the process.

    `per_sample`: call it with one sample at a time, to find the one that fails.
    """

    def __init__(self, reward: Reward, samples: Sequence[RewardSample], *, per_sample: bool = False):
        super().__init__(name=f"reward {reward.name}", daemon=True)
        self.reward, self.samples, self.per_sample = reward, samples, per_sample
        self.result: object = None
        self.error: BaseException | None = None
        self.index, self.sample_started = 0, time.monotonic()  # current sample, and its start
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.start()

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a new thread starts with device 0
            if not self.per_sample:
                self.result = self.reward(self.samples)
                return
            for self.index, sample in enumerate(self.samples):  # noqa: B020  read by other threads
                self.sample_started = time.monotonic()
                self.reward([sample])
        except BaseException as error:  # also SystemExit, which would end only this thread
            self.error = error

    def line(self) -> str:
        """Return the line where the call is, or where it raised."""
        if self.error is not None:
            return line_of(self.error.__traceback__, self.reward.file)
        return line_of(self.reward.frame(self.ident or 0), self.reward.file)


def score(
    rewards: Sequence[Reward], weights: Sequence[float], samples: Sequence[RewardSample], timeout: float
) -> Scores:
    """Score completions. If a function returns None, the reward is the sum of the other functions.

    timeout: seconds for each function. Raises RewardError for a function that raises, exceeds the timeout, or returns
    anything but a finite number or None per sample. To find the sample that fails, the function is called again with
    one sample at a time.
    """
    if not samples:
        return Scores(np.zeros(0), {reward.name: np.zeros(0) for reward in rewards})
    calls = [RewardCall(reward, samples) for reward in rewards]
    deadline = time.monotonic() + timeout
    for call in calls:
        call.join(max(0.0, deadline - time.monotonic()))
        if call.is_alive():
            raise _timeout_error(call, timeout)
        if isinstance(call.error, RewardError):  # its message says it all
            raise call.error
        if call.error is not None:
            raise _exception_error(call, timeout) from call.error
    by_function = {call.reward.name: call.reward.values(call.result, samples) for call in calls}
    values = np.stack(list(by_function.values()), axis=1)  # [samples, functions]
    sums = np.nansum(values * np.asarray(weights, np.float64), axis=1)
    return Scores(np.where(np.isnan(values).all(axis=1), np.nan, sums), by_function)


def _exception_error(call: RewardCall, seconds: float) -> RewardError:
    """Return the error of a call that raised."""
    probe = RewardCall(call.reward, call.samples, per_sample=True)
    probe.join(seconds)
    samples = str(call.samples[probe.index]) if probe.error else f"{_describe_all(call)}, but for none of them alone"
    return RewardError(
        f"--reward_funcs {call.reward.name} raised {type(call.error).__name__}: {call.error} ({call.line()}) for "
        f"{samples}. Fix it, or return None for completions that it cannot score"
    )


def _timeout_error(call: RewardCall, seconds: float) -> RewardError:
    """Return the error of a call that has not returned."""
    line = call.line()
    probe = RewardCall(call.reward, call.samples, per_sample=True)
    probe.join(seconds)
    hangs = probe.is_alive() and time.monotonic() - probe.sample_started > seconds / 2
    problem = f"hangs for {call.samples[probe.index]}" if hangs else f"is slow, for {_describe_all(call)}"
    return RewardError(
        f"--reward_funcs {call.reward.name} did not return within {seconds:g} s (it is at {line}). It {problem}. "
        "Fix it, or raise --reward_timeout"
    )


def _describe_all(call: RewardCall) -> str:
    return f"{plural(len(call.samples), 'completion')} together (the first is of {call.samples[0]})"
