"""The training step, and its forward-only sibling, on megatron-core's pipeline schedules. Every task calls these two.

A task brings batches and a loss. The loss sees one micro batch and returns a scalar that is already divided by what
the *global* batch counts (`batch.loss_tokens`), with metrics to be summed over micro batches and ranks. Nothing here
divides by the number of ranks, of micro batches, or of tokens a second time.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.model import Model, ModelInputs, OutputProcessor
from ...bridge.model.outputs import LogProbs
from ...templates.batching.collator import Batch
from ..losses.tokens import cross_entropy
from ..run.vocabulary import check_tokens
from .loss_spikes import SpikeFilter
from .optimizer import update

# (micro batch, model output) -> (this micro batch's share of the loss, metrics)
Loss = Callable[[Batch, Tensor], tuple[Tensor, dict[str, Tensor]]]
# micro batch -> the output processor that computes what its loss takes
Output = Callable[[Batch], OutputProcessor]


@dataclasses.dataclass
class TrainState:
    """State that a step changes."""

    model: Model
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    clip_grad: float
    spikes: SpikeFilter | None = None  # --loss_spike_sigma
    outcome: "StepResult | None" = None  # of the last step
    batches: list[Batch] = dataclasses.field(default_factory=list)  # this rank's, of the last step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def synchronize(self) -> None:
        """Wait for the outcome of the last step. Raises NonFiniteError, on every rank."""
        if self.outcome is not None:
            _ = self.outcome.grad_norm

    @contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """Within, every rank's parameters are those after the last step, also where their gathering is overlapped with
        the next forward pass."""
        overlapped = self.chunks[0].ddp_config.overlap_param_gather
        if overlapped:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        yield
        if overlapped:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is not finite. The weights are those of the step before."""


class StepResult:
    """Result of a step: numbers on their way to the host, which waits for them only where it reads them."""

    def __init__(
        self,
        step: int,
        norms: tuple[Tensor, Tensor] | None,
        metrics: dict[str, Tensor],
        spike: Tensor | None = None,
        *,
        passed_over: bool = False,
    ):
        """spike: 1.0 where the weights stayed because loss or norm stood out. passed_over: they stayed in any case."""
        self.step, self.passed_over = step, passed_over
        self.skipped = norms is None  # fp16: too high a scale makes gradients infinite, and never the loss
        zero = torch.zeros((), device=runtime.device())
        losses = torch.stack([zero, *metrics.values()]).sum()
        self._numbers = AsyncScalars(torch.stack([*(norms or (zero, zero)), losses, zero if spike is None else spike]))
        self.arrival = self._numbers.arrival

    @cached_property
    def grad_norm(self) -> float | None:
        """Gradient norm before clipping; None where it is not finite and the weights stayed: fp16's loss scale was too
        high, or the step was passed over.

        Raises NonFiniteError. Every rank asks for it, and it is the same on all.
        """
        norm, rank_norm, losses, _ = self._numbers.wait()
        if not self.skipped and math.isfinite(norm):
            return norm
        if self.passed_over:
            return None
        ranks = {
            "loss": _ranks_where(not math.isfinite(losses)),
            "gradient": _ranks_where(not math.isfinite(rank_norm)),
        }
        if self.skipped and not ranks["loss"]:
            return None
        blamed = "; ".join(f"{name} of rank {numbers}" for name, numbers in ranks.items() if numbers)
        what = (
            f"the {blamed}" if self.skipped else f"the gradient norm {norm} ({blamed or 'no single rank stands out'})"
        )
        raise NonFiniteError(
            f"step {self.step}: {what} is not finite. The weights are those of the step before. Lower --lr, lengthen "
            "the warmup, or look at the data of this step"
        )

    @property
    def is_loss_finite(self) -> bool:
        """Return whether this rank's loss and metrics are finite. Waits as `grad_norm` does."""
        return math.isfinite(self._numbers.wait()[2])

    @property
    def is_spike(self) -> bool:
        """Return whether the weights stayed because loss or gradient norm stood out. Waits as `grad_norm` does."""
        return self._numbers.wait()[3] > 0


class AsyncScalars:
    """A tensor's numbers on their way from the device: the copy is in line behind what the device was given before."""

    def __init__(self, tensor: Tensor):
        self._numbers = tensor.to("cpu", non_blocking=True)  # of a GPU: into pinned memory
        self.arrival = recorded_event() if tensor.is_cuda else None

    def wait(self) -> list[float]:
        if self.arrival is not None:
            self.arrival.synchronize()
        return self._numbers.tolist()


class StepTimer:
    """Ends of steps on the device, in the host's time: the host itself runs ahead."""

    def __init__(self):
        runtime.synchronize()
        self._time = time.perf_counter()
        self._event = recorded_event() if runtime.device().type == "cuda" else None

    def end_of(self, outcome: StepResult) -> float:
        """Return when a step ended. Called for each step in turn."""
        if self._event is None or outcome.arrival is None:
            return time.perf_counter()
        self._time += self._event.elapsed_time(outcome.arrival) / 1000
        self._event = outcome.arrival
        return self._time


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def log_probs(batch: Batch) -> LogProbs:
    """Return the output of language models: log-probabilities of the labels."""
    return LogProbs()


def sft_loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross entropy over the tokens of the global batch that are trained on."""
    loss = cross_entropy(log_probs, batch.loss_weights) / max(batch.loss_tokens, 1.0)
    return loss, {"loss": loss.detach()}


def train_step(
    training: TrainState,
    batches: list[Batch],
    loss: Loss,
    step: int,
    output: Output = log_probs,
    *,
    passed_over: bool = False,
) -> tuple[dict[str, Tensor], StepResult]:
    """Return one optimizer step over this rank's micro batches, given to the device: nothing here waits for its end.

    passed_over: the weights stay as they are.

    Returns the metrics, summed over this rank's micro batches (empty but on the last pipeline stage), and the outcome.
    A step whose gradient is not finite changes no weight, on the device alone; the host learns of it when it looks at
    the outcome, at the latest before the next step's update.
    Raises NonFiniteError, on every rank, where the step before was such a one.
    """
    for chunk in training.chunks:
        if not chunk.training:  # after an evaluation
            chunk.train()
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    metrics = run_schedule(training.model, training.chunks, batches, loss, forward_only=False, output=output)
    training.synchronize()
    spike: Tensor | None = None

    def skips(norm: Tensor) -> Tensor:
        nonlocal spike
        if passed_over:
            return torch.ones_like(norm)
        assert training.spikes is not None
        spike = training.spikes.judge(_loss_of_all_ranks(training.model.groups, metrics), norm)
        return spike

    norms = update(training.optimizer, training.clip_grad, skips if passed_over or training.spikes else None)
    training.outcome, training.batches = StepResult(step, norms, metrics, spike, passed_over=passed_over), batches
    if norms is not None:
        training.schedule.step(1)
    return metrics, training.outcome


def _loss_of_all_ranks(groups: ProcessGroupCollection, metrics: dict[str, Tensor]) -> Tensor:
    """Return the loss of the global batch, fp32 [] on the device."""
    counts = "loss" in metrics and groups.tp.rank() == 0
    loss = metrics["loss"].float().clone() if counts else torch.zeros((), device=runtime.device())
    dist.all_reduce(loss)
    return loss


def run_again(training: TrainState, loss: Loss, output: Output = log_probs) -> str:
    """Compute the last step once more, which was not finite, and return what this tells of the cause.

    Its weights are still there. Every rank calls this; no weight changes.
    """
    assert training.outcome is not None
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    metrics = run_schedule(training.model, training.chunks, training.batches, loss, forward_only=False, output=output)
    norms = update(training.optimizer, training.clip_grad, torch.ones_like)
    outcome = StepResult(training.outcome.step, norms, metrics, passed_over=True)
    losses_finite = not _ranks_where(not outcome.is_loss_finite)
    if outcome.grad_norm is None or not losses_finite:
        return (
            "Computed once more, it is not finite either: the data or the weights are the cause, not a fault of a GPU."
        )
    return (
        "Computed once more, it is finite: a GPU or its memory may be faulty. Check those of the ranks above "
        "(nvidia-smi -q -d ECC, dcgmi diag), or run on others"
    )


@torch.no_grad()
def evaluate_step(
    training: TrainState, batches: list[Batch], loss: Loss, output: Output = log_probs
) -> dict[str, Tensor]:
    """Return the metrics of a global batch, by the same schedule without its backward half."""
    for chunk in training.chunks:
        chunk.eval()
    return run_schedule(training.model, training.chunks, batches, loss, forward_only=True, output=output)


def run_schedule(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    loss: Loss,
    *,
    forward_only: bool,
    output: Output = log_probs,
) -> dict[str, Tensor]:
    """Run the pipeline schedule over the micro batches: forward and (unless `forward_only`) backward.

    Returns the metrics, summed; empty but on the last pipeline stage.
    """
    metrics = through_pipeline(model, chunks, batches, loss, forward_only=forward_only, output=output)
    names = metrics[0].keys() if metrics else ()
    return {name: torch.stack([values[name] for values in metrics]).sum() for name in names}


def through_pipeline(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    loss: Loss,
    *,
    forward_only: bool,
    output: Output = log_probs,
    replays: bool = True,
) -> list[dict[str, Tensor]]:
    """Run the schedule and return the metrics of each micro batch. replays: routers repeat Batch.experts."""
    _check_vocabulary(batches, model.architecture.vocab_size)
    moved = [(_to_device(batch), loss_positions(batch.loss_weights)) for batch in batches]
    # megatron-core multiplies a loss by CP / micro batches, and averages gradients over DP x CP ranks: undo both.
    scale = len(batches) * model.groups.dp.size()

    def forward_step(micro_batches, chunk):
        batch, positions = next(micro_batches)
        inputs = _inputs(batch, positions, replays=replays)
        return model.forward(chunk, inputs, output(batch)), partial(scaled_loss, batch)

    def scaled_loss(batch: Batch, values: Tensor):
        if not model.architecture.mtp_depths:
            value, metrics = loss(batch, values)
            return value * scale, metrics
        value, metrics = loss(batch, values[0])
        depths_loss = -values[1:].sum() / len(values[1:]) / max(batch.loss_tokens, 1.0)
        value = value + model.mtp_loss_scale * depths_loss
        return value * scale, metrics | {"mtp_loss": depths_loss.detach()}

    rows, length = batches[0].tokens.shape
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(moved) for _ in chunks] if len(chunks) > 1 else iter(moved),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=length * model.config.context_parallel_size,
        micro_batch_size=rows,
        forward_only=forward_only,
    )


def _inputs(batch: Batch, positions: Tensor | None, *, replays: bool) -> ModelInputs:
    return ModelInputs(
        tokens=batch.tokens,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        labels=batch.labels,
        loss_weights=batch.loss_weights,
        loss_positions=positions,
        experts=batch.experts if replays else None,
    )


def loss_positions(weights: Tensor) -> Tensor | None:
    """Return the positions of a micro batch whose weights [rows, length] are not 0: [n], or None for all.

    Padded by further positions to a multiple of a sixteenth of all: with few sizes the allocator reuses its memory.
    """
    scored = weights.flatten() != 0
    step = -(-len(scored) // 16)
    more = -int(scored.sum()) % step or (0 if scored.any() else step)
    scored[(~scored).nonzero()[:more]] = True
    return None if scored.all() else scored.nonzero().squeeze(1)


def sum_over_ranks(
    groups: ProcessGroupCollection, values: dict[str, Tensor], names: Sequence[str], *local: float
) -> AsyncScalars:
    """Metrics that only the last pipeline stage has, and numbers of each data-parallel rank, summed over the job.

    Every rank calls this. The metrics in the order of `names`, then the numbers; nothing waits for the device.
    """
    first_of_tp = groups.tp.rank() == 0
    counts = first_of_tp and groups.cp.rank() == 0 and groups.pp.rank() == 0
    numbers = torch.tensor([0.0] * len(names) + [each * counts for each in local], dtype=torch.float64)
    vector = to_device(numbers, runtime.device())
    if values and first_of_tp:
        vector[: len(names)] = torch.stack([values[name] for name in names]).double()
    dist.all_reduce(vector)
    return AsyncScalars(vector)


def _check_vocabulary(batches: list[Batch], size: int) -> None:
    """A split embedding would take a token that it does not have for zeros, and say nothing."""
    check_tokens(max(int(batch.tokens.max()) for batch in batches), size)


def _to_device(batch: Batch) -> Batch:
    """Move the tensors of the computation to the device; document boundaries stay on the CPU, where they are read."""
    device = runtime.device()
    if device.type == "cpu":
        return batch
    names = "tokens", "labels", "loss_weights", "position_ids"
    moved = {name: getattr(batch, name).to(device, non_blocking=True) for name in names}
    return dataclasses.replace(batch, **moved)


def _ranks_where(condition: bool) -> str:
    """Return the numbers of the ranks on which `condition` holds, as text. Every rank calls this."""
    everyone = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, condition)
    return ", ".join(str(rank) for rank, holds in enumerate(everyone) if holds)
