"""The interface of a task to the trainer: output of the model, loss, metrics, and a loop of its own if it generates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge.model.model import Model
from ...templates.batching.collator import Batch, Grouping
from ..observability.flops import Flops
from .reference_sync import Follower
from .step import Loss, Output, TrainState, log_probs, sft_loss


def means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Return means of metrics from their sums over micro batches, ranks, and steps (or evaluated batches) of a total
    weight."""
    return {name: value / max(weight, 1e-12) for name, value in sums.items()}


def _tokens(batch: Batch) -> float:
    return batch.loss_tokens


def samples(batch: Batch) -> float:
    """Return the number of samples of the global batch."""
    return grouping_of(batch).loss_samples


def no_flops(batches: list[Batch]) -> float:
    return 0.0


class Data(Protocol):
    """Training or evaluation data: Batches, or Prompts of tasks that generate."""

    loss_tokens_are_local: bool  # of a stream: each rank counts its own

    @property
    def samples(self) -> int | None: ...
    @property
    def padding_share(self) -> float | None: ...
    @property
    def epoch(self) -> int: ...
    def samples_until(self, epochs: float) -> int | None: ...
    def position(self) -> dict[str, Any]: ...
    def cursors(self) -> dict[str, np.ndarray]: ...
    def resume(self, position: dict[str, Any], cursors: dict[str, np.ndarray]) -> list[str]: ...


class StepRunner(Protocol):
    """The trainer (trainer.py), as the loop of a task sees it."""

    state: TrainState
    max_steps: int

    def steps(self) -> Iterator[int]: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def step(self, batches: list[Batch]) -> None: ...


class Loop(Protocol):
    """The loop of a task that makes its data while it trains. Every rank calls these alike."""

    def train(self, trainer: StepRunner) -> None:
        """Call trainer.step once for each of trainer.steps()."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics for the log beside the loss's, of the steps since this was last called."""
        ...

    def evaluate(self, state: TrainState, val: Any, most: int, tick: Callable[[], None]) -> dict[str, float]:
        """Evaluate on `most` global batches (-1: all), calling `tick` for each; return `eval_<name>`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs of it, the same on every rank; names begin with `rollout/`."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Resume from what `tensors` returned."""
        ...

    def close(self) -> None:
        """Close engines and files, after the last step."""
        ...

    def release(self) -> None:
        """Free servers for the next run, where this one fails: in seconds, waiting for no other rank."""
        ...


@dataclass(frozen=True)
class Objective:
    """A task: `output` selects what the model computes of a micro batch, `loss` reduces it."""

    loss: Loss
    names: Sequence[str]  # of the metrics that `loss` returns, each divided by what the global batch counts
    output: Output = log_probs
    # Called with a step's micro batches before training's own pass, and with an evaluation's (True): sets Batch.extras.
    prepare: Callable[[TrainState, list[Batch], bool], list[Batch]] = lambda state, batches, evaluates: batches
    means: Callable[[dict[str, float], float], dict[str, float]] = means
    weight: Callable[[Batch], float] = _tokens  # of a global batch among others, in an evaluation
    scores_tokens: bool = True  # whether the output layer is a part of its work
    extra_flops: Callable[[list[Batch]], float] = no_flops  # of passes beside training's, on this rank
    loop: Loop | None = None  # None: the steps are those of the data
    follower: Follower | None = None  # of a reference that follows the policy: called after each step


def sft(model: Model) -> Objective:
    """Return the objective of language models: the next token, and those of multi-token prediction."""
    return Objective(sft_loss, ["loss", "mtp_loss"] if model.architecture.mtp_depths else ["loss"])


def grouping_of(batch: Batch) -> Grouping:
    """Return the batch's grouping, of a stage that has one."""
    assert batch.grouping is not None
    return batch.grouping


def extras_of[T](batch: Batch, kind: type[T]) -> T:
    """Return the batch's extras, which are of this class."""
    assert isinstance(batch.extras, kind)
    return batch.extras


def mean_share(values: Tensor, batch: Batch, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's share of a mean over the samples of the global batch, from the values of its samples."""
    return copied(values.sum(), groups) / max(samples(batch), 1.0)


def copied(value: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's share of a value that every rank of a context-parallel group has."""
    return value / groups.cp.size()


def detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}


def forward_flops(flops: Flops, groups: ProcessGroupCollection, batches: Sequence[Batch]) -> float:
    """Return the FLOPs of a forward pass over these micro batches, of this rank's context-parallel group."""
    lengths = [length for batch in batches for length in batch.lengths]
    return flops.forward(lengths, scored_tokens(batches, groups))


def scored_tokens(batches: Sequence[Batch], groups: ProcessGroupCollection) -> int:
    """Return how many labels have a loss: this rank's times the context-parallel ranks, which have about as many."""
    return groups.cp.size() * sum(int(batch.loss_weights.count_nonzero()) for batch in batches)
