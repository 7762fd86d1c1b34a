"""What is generated for the steps to come, while those at hand are trained on: --async_generate.

A thread of each rank does it, and the ranks' threads find each other in a group of their own: nothing of it meets
training's collectives. Completions are drawn by servers, whose weights nobody changes meanwhile.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime
from ..distributed.collectives import grouped_apart, new_patient_group, on_every_rank, patient_group
from ..rollout.server_connection import WeightsLost
from .episode import Episode, from_tensors, to_tensors
from .rollout_metrics import RolloutLog


@dataclass
class Drawn:
    """What was generated at a time."""

    episodes: list[Episode]
    log: RolloutLog  # of it
    given: int = 0  # prompts taken
    asked: int = 0  # completions asked for

    def numbers(self) -> dict[str, Any]:
        """What is logged of it, for a checkpoint, as JSON; without the seconds, which were another process's."""
        return {name: sums for name, sums in self.log.state().items() if not name.startswith("seconds/")}

    def tensors(self) -> dict[str, Tensor]:
        """The episodes, for a checkpoint."""
        return {f"ahead/{name}": value for name, value in to_tensors(self.episodes).items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> "Drawn":
        """As `tensors` and `numbers` gave it."""
        own = {name.removeprefix("ahead/"): value for name, value in tensors.items() if name.startswith("ahead/")}
        found = cls(from_tensors(own), RolloutLog())
        found.log.load(numbers)
        return found


class Ahead:
    """One piece of such work at a time. Every rank has one, and every method is called by all alike."""

    def __init__(self):
        self._group = new_patient_group()
        self._thread: threading.Thread | None = None
        self._found: Drawn | None = None
        self._error: Exception | None = None

    def start(self, source: Any) -> None:
        """Have a copy of `source` (a Grpo) generate and score, by the weights that the servers have."""
        own = copy.copy(source)
        own.log, own.prompts, own.complete = RolloutLog(), copy.copy(source.prompts), source.complete.without_weights()
        own.rollout = own.complete.rollout

        def draw() -> Drawn:
            episodes = own.generate_and_score()
            return Drawn(episodes, own.log, own.prompts.consumed, own.complete.asked)

        self._found = None
        self._thread = threading.Thread(target=self._run, args=(draw,), name="ahead", daemon=True)
        self._thread.start()

    def _run(self, draw: Callable[[], Drawn]) -> None:
        if torch.cuda.is_available():  # which each thread chooses for itself
            torch.cuda.set_device(runtime.device())
        try:
            with grouped_apart(self._group):
                self._found = draw()
        except WeightsLost:  # and those that they had are not there any more
            pass
        except Exception as error:
            self._error = error

    @property
    def under_way(self) -> bool:
        return self._thread is not None

    def look(self) -> None:
        """Raise, on every rank, what the work has met so far; does not wait for it."""
        on_every_rank(self._raise, patient_group())

    def wait(self) -> Drawn | None:
        """What was drawn, once; None where a server was lost meanwhile, which is back by now and has no weights."""
        if self._thread is not None:
            self._thread.join()
        self._raise()
        self._thread = None
        return self._found

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
