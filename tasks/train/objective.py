"""Interface of a task to the trainer: model output, loss, metrics, and a training loop for tasks that generate."""

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
from .reference_sync import ReferenceSync
from .step import Loss, Output, TrainState, dynamic_loss, log_probs, sft_loss
from .trained_role import TrainedRole


def means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Return means of metrics from their sums over micro batches and ranks.

    weight: the number of steps, or the total weight of the evaluated batches.
    """
    return {name: value / max(weight, 1e-12) for name, value in sums.items()}


def _loss_tokens(batch: Batch) -> float:
    return batch.loss_tokens


def samples(batch: Batch) -> float:
    """Return the number of samples of the global batch."""
    return grouping_of(batch).loss_samples


def no_flops(batches: list[Batch]) -> float:
    return 0.0


class Data(Protocol):
    """Training or evaluation data: Batches, or Prompts for tasks that generate."""

    loss_tokens_are_local: bool  # true for streams: each rank counts only its own tokens

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
    """The part of the Trainer (trainer.py) that a task's loop uses."""

    state: TrainState
    max_steps: int

    def steps(self) -> Iterator[int]: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def step(self, batches: list[Batch], *, updates: bool = True) -> None: ...


class Loop(Protocol):
    """Training loop of a task that generates its data. Every rank calls every method in the same order."""

    def train(self, trainer: StepRunner) -> None:
        """Call trainer.step once for each of trainer.steps()."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """Return further metrics for the log, of the steps since the last call."""
        ...

    def evaluate(self, state: TrainState, val: Any, max_batches: int, tick: Callable[[], None]) -> dict[str, float]:
        """Return `eval_<name>` over at most `max_batches` global batches (-1: all). Calls `tick` for each."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the loop's state for a checkpoint, equal on every rank, under names that begin with `rollout/`."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        ...

    def close(self) -> None:
        """Close engines and files, after the last step."""
        ...

    def release(self) -> None:
        """Free the rollout servers after a failure, within seconds and without waiting for other ranks."""
        ...


@dataclass(frozen=True)
class Objective:
    """Task as the trainer sees it: `output` selects what the model computes of a micro batch, `loss` reduces it."""

    loss: Loss
    names: Sequence[str]  # metrics that `loss` returns, normalized by the global batch
    output: Output = log_probs
    # Sets Batch.extras of the micro batches of a step (False) or an evaluation (True), before the model's pass.
    prepare: Callable[[TrainState, list[Batch], bool], list[Batch]] = lambda state, batches, is_evaluation: batches
    means: Callable[[dict[str, float], float], dict[str, float]] = means
    weight: Callable[[Batch], float] = _loss_tokens  # weight of a global batch in the means of an evaluation
    scores_tokens: bool = True  # whether the task uses the output layer
    extra_flops: Callable[[list[Batch]], float] = no_flops  # FLOPs of this rank's passes besides training
    loop: Loop | None = None  # None: train on the data loader's batches
    reference_sync: ReferenceSync | None = None  # updates the reference after each step
    role: TrainedRole | None = None  # another model that the loop trains


def sft(model: Model, *, is_dynamic: bool = False) -> Objective:
    """Return the objective of language modeling: next-token loss, and multi-token prediction if the model has it.

    is_dynamic: --enable_dft_loss
    """
    names = ["loss", "mtp_loss"] if model.architecture.mtp_depths else ["loss"]
    return Objective(dynamic_loss if is_dynamic else sft_loss, names)


def grouping_of(batch: Batch) -> Grouping:
    """Return the batch's grouping, which must be set."""
    assert batch.grouping is not None
    return batch.grouping


def extras_of[T](batch: Batch, kind: type[T]) -> T:
    """Return the batch's extras, which must be of class `kind`."""
    assert isinstance(batch.extras, kind)
    return batch.extras


def mean_share(values: Tensor, batch: Batch, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's share of the global batch's mean over samples, from the values of the local samples."""
    return context_parallel_share(values.sum(), groups) / max(samples(batch), 1.0)


def context_parallel_share(value: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Return this rank's share of a value that all ranks of a context-parallel group have computed."""
    return value / groups.cp.size()


def detach_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}


def forward_flops(flops: Flops, groups: ProcessGroupCollection, batches: Sequence[Batch]) -> float:
    """Return the FLOPs of a forward pass over these micro batches on this rank's context-parallel group."""
    lengths = [length for batch in batches for length in batch.lengths]
    tower = sum(sum(flops.of_media(batch.media, trains=False)) for batch in batches)
    reused = [length for batch in batches for length in batch.reused_lengths]
    return flops.forward(lengths, scored_tokens(batches, groups), reused) + tower


def scored_tokens(batches: Sequence[Batch], groups: ProcessGroupCollection) -> int:
    """Return the approximate number of labels with a loss: this rank's count times the context-parallel size."""
    return groups.cp.size() * sum(int(batch.loss_weights.count_nonzero()) for batch in batches)
