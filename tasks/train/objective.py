"""What a task trains for: the one thing in which tasks differ, as the loop and the step see them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core import parallel_state
from torch import Tensor

from ...bridge.model.build import Model
from ...templates.batching.collator import Batch, Grouping
from ..observability.flops import Flops
from .reference_sync import Follower
from .step import Forward, Loss, Training, log_probs, sft_loss


def means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Metrics of which these are the sums over micro batches and ranks, and over steps (or evaluated batches) of
    `weight` together."""
    return {name: value / max(weight, 1e-12) for name, value in sums.items()}


def _tokens(batch: Batch) -> float:
    return batch.loss_tokens


def samples(batch: Batch) -> float:
    """Of the global batch."""
    return grouping_of(batch).loss_samples


def nothing(batches: list[Batch]) -> float:
    return 0.0


class Source(Protocol):
    """Where the steps of a task come from that makes its data while it trains. Every rank calls these alike."""

    def steps(self, training: Training, most: int) -> Iterator[list[Batch]]:
        """This rank's micro batches of one step after the other, of so many."""
        ...

    def metrics(self) -> dict[str, float]:
        """What is to be in the log beside the loss's metrics, of the steps since this was last asked."""
        ...

    def evaluate(self, training: Training, val: Any, most: int, tick: Callable[[], None]) -> dict[str, float]:
        """As `evaluate` in trainer.py."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs of it, the same on every rank; names begin with `rollout/`."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        ...

    def close(self) -> None:
        """After the last step."""
        ...

    def let_go(self) -> None:
        """Where the run fails: free what is not its own, in seconds, for the next run. Waits for no other rank."""
        ...


@dataclass(frozen=True)
class Objective:
    """`forward` says what is asked of the model for a micro batch, `loss` what is made of it."""

    loss: Loss
    names: Sequence[str]  # of the metrics that `loss` returns, each divided by what the global batch counts
    forward: Forward = log_probs
    # What is to be known of a step's micro batches before training's own pass (Batch.known), of an evaluation's too.
    prepare: Callable[[Training, list[Batch], bool], list[Batch]] = lambda training, batches, evaluates: batches
    means: Callable[[dict[str, float], float], dict[str, float]] = means
    weight: Callable[[Batch], float] = _tokens  # of a global batch among others, in an evaluation
    scores_tokens: bool = True  # whether the output layer is a part of its work
    more_flops: Callable[[list[Batch]], float] = nothing  # of what `prepare` does on this rank
    source: Source | None = None  # None: the steps are those of the data
    follower: Follower | None = None  # of a reference that follows the policy: called after each step


def sft(model: Model) -> Objective:
    """The next token, and those that layers of multi-token prediction see further ahead."""
    return Objective(sft_loss, ["loss", "mtp_loss"] if model.architecture.mtp_depths else ["loss"])


def grouping_of(batch: Batch) -> Grouping:
    """Of a stage whose samples have one document or several."""
    assert batch.grouping is not None
    return batch.grouping


def share(values: Tensor, batch: Batch) -> Tensor:
    """This rank's share of a mean over the samples of the global batch, of whose samples here these are the values."""
    return copied(values.sum()) / max(samples(batch), 1.0)


def copied(value: Tensor) -> Tensor:
    """The share of a value that each rank of a context-parallel group has whole."""
    return value / parallel_state.get_context_parallel_world_size()


def detached(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in metrics.items()}


def forward_flops(flops: Flops, batches: Sequence[Batch]) -> float:
    """Of a forward pass over these micro batches, whose context-parallel group this rank counts for."""
    lengths = [length for batch in batches for length in batch.lengths]
    return flops.forward(lengths, scored_tokens(batches))


def scored_tokens(batches: Sequence[Batch]) -> int:
    """How many labels are scored. Of a context-parallel group each rank holds a share, about as many of them."""
    shares = parallel_state.get_context_parallel_world_size()
    return shares * sum(int(batch.loss_weights.count_nonzero()) for batch in batches)
