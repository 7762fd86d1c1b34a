"""Training step and evaluation step of all tasks, on megatron-core's pipeline schedules.

A task's loss takes one micro batch, and returns a scalar that is already normalized by the *global* batch
(`batch.loss_tokens`), and metrics to sum over micro batches and ranks. This module does not divide by the number of
ranks, micro batches or tokens again.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.deepstack import MediaFeatures
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.model import Model, ModelInputs, OutputProcessor
from ...bridge.model.outputs import LogProbs
from ...templates.batching.collator import Batch
from ..losses.tokens import cross_entropy, weigh_by_probability
from ..run.vocabulary import check_tokens
from .loss_spikes import SpikeFilter
from .media_features import media_inputs, release_features
from .media_windows import media_windows, part_of_step
from .optimizer import update

# (micro batch, model output) -> (this micro batch's share of the loss, metrics)
Loss = Callable[[Batch, Tensor], tuple[Tensor, dict[str, Tensor]]]
# micro batch -> output processor that computes the input of its loss
Output = Callable[[Batch], OutputProcessor]


@dataclasses.dataclass
class TrainState:
    """Model, optimizer and schedule, which a step updates."""

    model: Model
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    clip_grad: float
    spikes: SpikeFilter | None = None  # --loss_spike_sigma
    last_result: "StepResult | None" = None
    last_batches: list[Batch] = dataclasses.field(default_factory=list)  # this rank's
    tower: DistributedDataParallel | None = None  # trained parameters of the vision tower

    @property
    def modules(self) -> list[DistributedDataParallel]:
        """All trained modules: the chunks and the vision tower."""
        return [*self.chunks, *([self.tower] if self.tower else [])]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: that of --lr, where some parameters have another."""
        groups = self.optimizer.param_groups
        return next((group for group in groups if group.get("default_config", True)), groups[0])["lr"]

    def synchronize(self) -> None:
        """Wait for the result of the last step. Raises NonFiniteError on every rank."""
        if self.last_result is not None:
            _ = self.last_result.grad_norm

    @contextmanager
    def parameters_gathered(self) -> Iterator[None]:
        """Ensure that all parameters are up to date within the context, also with --overlap_param_gather."""
        is_overlapped = self.chunks[0].ddp_config.overlap_param_gather
        if is_overlapped:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook()
        yield
        if is_overlapped:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()


class NonFiniteError(RuntimeError):
    """Raised for a step with a non-finite loss or gradient. The step has not changed the weights."""


class StepResult:
    """Result of a step: scalars in an asynchronous copy to the host, which waits for them when it reads them."""

    def __init__(
        self,
        step: int,
        norms: tuple[Tensor, Tensor] | None,
        metrics: dict[str, Tensor],
        spike: Tensor | None = None,
        *,
        skips_update: bool = False,
    ):
        """spike: 1.0 if the update was skipped as a loss spike. skips_update: the update was skipped in any case."""
        self.step, self.skips_update = step, skips_update
        self.is_overflow = norms is None  # fp16 gradients overflow if the loss scale is too high; the loss does not
        zero = torch.zeros((), device=runtime.device())
        losses = torch.stack([zero, *metrics.values()]).sum()
        self._numbers = AsyncScalars(torch.stack([*(norms or (zero, zero)), losses, zero if spike is None else spike]))
        self.event = self._numbers.event

    @cached_property
    def grad_norm(self) -> float | None:
        """Gradient norm before clipping, equal on all ranks. Every rank reads it.

        None if it is not finite because fp16 gradients overflow or the update was skipped; otherwise raises
        NonFiniteError.
        """
        norm, rank_norm, losses, _ = self._numbers.wait()
        if not self.is_overflow and math.isfinite(norm):
            return norm
        if self.skips_update:
            return None
        ranks = {
            "loss": _ranks_where(not math.isfinite(losses)),
            "gradient": _ranks_where(not math.isfinite(rank_norm)),
        }
        if self.is_overflow and not ranks["loss"]:
            return None
        causes = "; ".join(f"{name} of rank {numbers}" for name, numbers in ranks.items() if numbers)
        subject = (
            f"the {causes}"
            if self.is_overflow
            else f"the gradient norm {norm} ({causes or 'no single rank stands out'})"
        )
        raise NonFiniteError(
            f"step {self.step}: {subject} is not finite. The weights are those of the step before. Lower --lr, "
            "lengthen the warmup, or look at the data of this step"
        )

    @property
    def is_loss_finite(self) -> bool:
        """Return whether this rank's loss and metrics are finite. Waits as `grad_norm` does."""
        return math.isfinite(self._numbers.wait()[2])

    @property
    def is_spike(self) -> bool:
        """Return whether the update was skipped as a loss spike. Waits as `grad_norm` does."""
        return self._numbers.wait()[3] > 0


class AsyncScalars:
    """Asynchronous copy of a tensor's numbers to the host, in the order of the device's stream."""

    def __init__(self, tensor: Tensor):
        self._numbers = tensor.to("cpu", non_blocking=True)  # pinned memory for a GPU tensor
        self.event = recorded_event() if tensor.is_cuda else None

    def wait(self) -> list[float]:
        if self.event is not None:
            self.event.synchronize()
        return self._numbers.tolist()


class StepTimer:
    """Timer of the ends of steps on the device, by the host's clock. The host itself runs ahead."""

    def __init__(self):
        runtime.synchronize()
        self._time = time.perf_counter()
        self._event = recorded_event() if runtime.device().type == "cuda" else None

    def end_of(self, result: StepResult) -> float:
        """Return the time at which a step ended. Must be called for each step in order."""
        if self._event is None or result.event is None:
            return time.perf_counter()
        self._time += self._event.elapsed_time(result.event) / 1000
        self._event = result.event
        return self._time


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def log_probs(batch: Batch) -> LogProbs:
    """Return the output processor of language models: log-probabilities of the labels."""
    return LogProbs()


def sft_loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross entropy over the trained tokens of the global batch."""
    loss = cross_entropy(log_probs, batch.loss_weights) / max(batch.loss_tokens, 1.0)
    return loss, {"loss": loss.detach()}


def dynamic_loss(batch: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of dynamic fine-tuning over the trained tokens of the global batch: --enable_dft_loss."""
    return sft_loss(batch, weigh_by_probability(log_probs))


def train_step(
    training: TrainState,
    batches: list[Batch],
    loss: Loss,
    step: int,
    output: Output = log_probs,
    *,
    skips_update: bool = False,
) -> tuple[dict[str, Tensor], StepResult]:
    """Launch one optimizer step over this rank's micro batches, without waiting for its end.

    skips_update: leave the weights unchanged.

    Returns the metrics, summed over this rank's micro batches (empty except on the last pipeline stage), and the
    result. A non-finite gradient skips the update on the device. The host learns of it when it reads the result, at the
    latest before the next update: raises NonFiniteError on every rank if the previous step was not finite.
    """
    _clear_gradients(training)
    metrics = run_schedule(training.model, training.chunks, batches, loss, forward_only=False, output=output)
    if training.tower:
        training.tower.finish_grad_sync()
    training.synchronize()
    spike: Tensor | None = None

    def should_skip(norm: Tensor) -> Tensor:
        nonlocal spike
        if skips_update:
            return torch.ones_like(norm)
        assert training.spikes is not None
        spike = training.spikes.judge(_loss_of_all_ranks(training.model.groups, metrics), norm)
        return spike

    norms = update(training.optimizer, training.clip_grad, should_skip if skips_update or training.spikes else None)
    training.last_result, training.last_batches = (
        StepResult(step, norms, metrics, spike, skips_update=skips_update),
        batches,
    )
    if norms is not None:
        training.schedule.step(1)
    return metrics, training.last_result


def step_without_update(
    training: TrainState, batches: list[Batch], loss: Loss, step: int, output: Output = log_probs
) -> tuple[dict[str, Tensor], StepResult]:
    """Launch the forward passes of a step. Returns what `train_step` does, with a gradient norm of 0."""
    metrics = evaluate_step(training, batches, loss, output)
    training.synchronize()
    zero = torch.zeros((), device=runtime.device())
    training.last_result, training.last_batches = StepResult(step, (zero, zero), metrics), batches
    return metrics, training.last_result


def _clear_gradients(training: TrainState) -> None:
    for module in training.modules:
        if not module.training:  # after an evaluation
            module.train()
        module.zero_grad_buffer()
    training.optimizer.zero_grad()


def _loss_of_all_ranks(groups: ProcessGroupCollection, metrics: dict[str, Tensor]) -> Tensor:
    """Return the loss of the global batch, fp32 [] on the device."""
    is_counted = "loss" in metrics and groups.tp.rank() == 0
    loss = metrics["loss"].float().clone() if is_counted else torch.zeros((), device=runtime.device())
    dist.all_reduce(loss)
    return loss


def rerun_step(training: TrainState, loss: Loss, output: Output = log_probs) -> str:
    """Repeat the last step, which was not finite, and return a text about the likely cause.

    Every rank calls this. Weights do not change.
    """
    assert training.last_result is not None
    _clear_gradients(training)
    metrics = run_schedule(
        training.model, training.chunks, training.last_batches, loss, forward_only=False, output=output
    )
    if training.tower:
        training.tower.finish_grad_sync()
    norms = update(training.optimizer, training.clip_grad, torch.ones_like)
    result = StepResult(training.last_result.step, norms, metrics, skips_update=True)
    is_loss_finite = not _ranks_where(not result.is_loss_finite)
    if result.grad_norm is None or not is_loss_finite:
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
    """Return the metrics of a global batch, from forward passes only."""
    for module in training.modules:
        module.eval()
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

    Returns the metrics summed over micro batches; empty except on the last pipeline stage.
    """
    metrics = run_micro_batches(model, chunks, batches, loss, forward_only=forward_only, output=output)
    names = metrics[0].keys() if metrics else ()
    return {name: torch.stack([values[name] for values in metrics]).sum() for name in names}


def run_micro_batches(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[Batch],
    loss: Loss,
    *,
    forward_only: bool,
    output: Output = log_probs,
    replays: bool = True,
) -> list[dict[str, Tensor]]:
    """Run the schedule and return the metrics of each micro batch. replays: routers reuse Batch.experts."""
    _check_vocabulary(batches, model.architecture.vocab_size)
    device_batches = [(_to_device(batch), loss_positions(batch.loss_weights)) for batch in batches]
    # Undo megatron-core's scaling of a loss by CP / micro batches, and its average of gradients over DP x CP ranks.
    scale = len(batches) * model.groups.dp.size()

    def forward_step(micro_batches, chunk):
        number, (batch, positions) = next(micro_batches)
        media = model.vision.features(number) if model.vision else None
        inputs = _inputs(batch, positions, media, replays=replays)
        processor = output(batch)
        predicts = model.architecture.mtp_depths > 0 and isinstance(processor, LogProbs)
        return model.forward(chunk, inputs, processor), partial(scaled_loss, batch, predicts)

    def scaled_loss(batch: Batch, predicts: bool, values: Tensor):
        if not predicts:
            value, metrics = loss(batch, values)
            return value * scale, metrics
        value, metrics = loss(batch, values[0])
        depths_loss = -values[1:].sum() / len(values[1:]) / max(batch.loss_tokens, 1.0)
        value = value + model.mtp_loss_scale * depths_loss
        return value * scale, metrics | {"mtp_loss": depths_loss.detach()}

    rows, length = batches[0].tokens.shape
    metrics: list[dict[str, Tensor]] = []
    for window in media_windows(model, batches):
        _begin_encoding(model, batches[window], forward_only=forward_only)
        iterators: list[Iterator[Any]] = [enumerate(device_batches[window]) for _ in chunks]
        with part_of_step(model.config, chunks, window, len(batches), forward_only=forward_only):
            metrics += get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=list(chunks) if len(chunks) > 1 else chunks[0],
                num_microbatches=window.stop - window.start,
                seq_length=length * model.config.context_parallel_size,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        if model.vision:
            model.vision.end()
    if model.vision and not forward_only:
        release_features(batches)
    return metrics


def _begin_encoding(model: Model, batches: list[Batch], *, forward_only: bool) -> None:
    if model.vision:
        model.vision.begin([media_inputs(batch) for batch in batches], forward_only=forward_only)
    elif any(batch.media for batch in batches):
        raise RuntimeError("the data has images, and the model was built without its vision tower")


def _inputs(batch: Batch, positions: Tensor | None, media: MediaFeatures | None, *, replays: bool) -> ModelInputs:
    return ModelInputs(
        tokens=batch.tokens,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        labels=batch.labels,
        loss_weights=batch.loss_weights,
        token_shares=batch.token_shares,
        loss_positions=positions,
        experts=batch.experts if replays else None,
        rope_positions=batch.rope_positions,
        media=media,
        prefixes=batch.prefixes,
        blocks=batch.blocks,
    )


def loss_positions(weights: Tensor) -> Tensor | None:
    """Return the positions with a loss, where the weights [rows, length] are not 0: [n], or None for all.

    Padded with other positions to a multiple of 1/16 of all, because few distinct sizes let the allocator reuse memory.
    """
    scored = weights.flatten() != 0
    step = -(-len(scored) // 16)
    padding = -int(scored.sum()) % step or (0 if scored.any() else step)
    scored[(~scored).nonzero()[:padding]] = True
    return None if scored.all() else scored.nonzero().squeeze(1)


def sum_over_ranks(
    groups: ProcessGroupCollection,
    values: dict[str, Tensor],
    names: Sequence[str],
    *local: float,
    of_every_rank: Sequence[float] = (),
) -> AsyncScalars:
    """Sum metrics of the last pipeline stage, and `local` numbers of each data-parallel rank, over all ranks.

    of_every_rank: numbers in which the ranks of a replica differ
    Every rank calls this. Returns the metrics in the order of `names`, then the numbers. Does not wait for the device.
    """
    is_first_of_tp = groups.tp.rank() == 0
    is_counted = is_first_of_tp and groups.cp.rank() == 0 and groups.pp.rank() == 0
    counted = [0.0] * len(names) + [value * is_counted for value in local]
    numbers = torch.tensor([*counted, *of_every_rank], dtype=torch.float64)
    vector = to_device(numbers, runtime.device())
    if values and is_first_of_tp:
        vector[: len(names)] = torch.stack([values[name] for name in names]).double()
    dist.all_reduce(vector)
    return AsyncScalars(vector)


def _check_vocabulary(batches: list[Batch], size: int) -> None:
    """Raise ValueError for tokens beyond the vocabulary, which a vocabulary-parallel embedding silently maps to 0."""
    check_tokens(max(int(batch.tokens.max()) for batch in batches), size)


def _to_device(batch: Batch) -> Batch:
    """Copy a batch's tensors to the device, except document boundaries, which are read on the CPU."""
    device = runtime.device()
    if device.type == "cpu":
        return batch
    names = "tokens", "labels", "loss_weights", "token_shares", "position_ids", "rope_positions", "channels"
    tensors = {name: tensor for name in names if (tensor := getattr(batch, name)) is not None}
    device_batches = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return dataclasses.replace(batch, **device_batches)


def _ranks_where(condition: bool) -> str:
    """Return the numbers of the ranks on which `condition` holds, as text. Every rank calls this."""
    conditions = [False] * dist.get_world_size()
    dist.all_gather_object(conditions, condition)
    return ", ".join(str(rank) for rank, is_true in enumerate(conditions) if is_true)
