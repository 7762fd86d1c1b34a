"""The rewards of completions: all functions at the same time, and an error that says which failed, and for what."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .call import Call, Reward, RewardError, Sample


@dataclass(frozen=True)
class Scores:
    rewards: np.ndarray  # float64 [samples]: the weighted sum
    by_function: dict[str, np.ndarray]  # name -> float64 [samples], NaN where it says nothing of a sample


def score(rewards: Sequence[Reward], weights: Sequence[float], samples: Sequence[Sample], timeout: float) -> Scores:
    """Score completions. Where a function says None, the others' sum is the reward.

    timeout: seconds for each function; they run side by side. Raises RewardError for a function that raises, takes
    longer, or returns anything but a finite number or None for each sample; and for a sample of which none says
    anything. To find the sample that is the reason, a function is called again, with one sample at a time.
    """
    if not samples:
        return Scores(np.zeros(0), {reward.name: np.zeros(0) for reward in rewards})
    columns = {name for sample in samples for name in sample.columns}
    for reward in rewards:
        reward.check_columns(columns)
    calls = [Call(reward, samples) for reward in rewards]
    deadline = time.monotonic() + timeout
    for call in calls:
        call.join(max(0.0, deadline - time.monotonic()))
        if call.error is not None:
            raise _raised(call, timeout) from call.error
        if call.is_alive():
            raise _late(call, timeout)
    by_function = {call.reward.name: call.reward.values(call.result, samples) for call in calls}
    values = np.stack(list(by_function.values()), axis=1)  # [samples, functions]
    silent = np.isnan(values).all(axis=1)
    if silent.any():
        sample = samples[int(silent.argmax())]
        raise RewardError(
            f"--reward_funcs {' '.join(by_function)}: no reward says anything of {sample}. Leave the "
            "row out, or add a reward that can judge it"
        )
    return Scores(np.nansum(values * np.asarray(weights, np.float64), axis=1), by_function)


def _raised(call: Call, seconds: float) -> RewardError:
    """The error of a call that raised."""
    probe = Call(call.reward, call.samples, singly=True)
    probe.join(seconds)
    where = str(call.samples[probe.at]) if probe.error else f"{_all(call)}, and for none of them alone"
    return RewardError(
        f"--reward_funcs {call.reward.name} raised {type(call.error).__name__}: {call.error} ({call.place()}) for "
        f"{where}. Mend it, or have it return None for what it cannot judge"
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
        "Mend it, or give it longer by --reward_timeout"
    )


def _all(call: Call) -> str:
    return f"{len(call.samples)} completions together (the first is of {call.samples[0]})"
