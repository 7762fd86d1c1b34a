"""The loop around the training step: data in, log lines out, evaluations and checkpoints in between."""

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import Tensor

from ..bridge import runtime
from ..templates.batches import Batches
from ..templates.layout import Batch
from .args import SECRET
from .checkpoint import save_checkpoint
from .flops import Flops, peak_flops
from .log import RunLog
from .plan import steps_of
from .profile import Profile
from .run import Run, streamed
from .train import (
    Clock,
    Fetched,
    Loss,
    NonFiniteError,
    Outcome,
    Training,
    evaluate_step,
    sum_over_ranks,
    train_step,
)

Sums = Callable[[], tuple[dict[str, float], float, float]]  # means of metrics, tokens, FLOPs: waits for the device


def fit(run: Run, training: Training, loss: Loss, names: list[str], train: Batches, val: Batches | None) -> None:
    """Train for the whole run. `names`: the metrics that `loss` returns; they are logged under these names."""
    options, model = run.options, training.model
    max_steps = steps_of(options, train.samples)
    flops = Flops.of(model.config, model.architecture.vocab_size, trained=model.trained_share)
    log = RunLog(
        run.folder if run.writes else None,
        options,
        max_steps,
        peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None,
        dist.get_world_size(),
        six_n=flops.six_n_d(1) if model.trained_share == 1 else None,
        settings={name: value for name, value in vars(options).items() if name not in SECRET},
    )
    profile = Profile(options, run.folder, max_steps, log.note if run.writes else print, log.meter.paused)
    window = _Window(names)
    steps = train.steps()
    if train.loss_tokens_are_local:
        steps = streamed(steps, options.ddp_timeout)
    saved: dict[str, Path] = {}  # the last checkpoint
    record: Callable[[], None] | None = None  # of the last step, whose end the host has not seen
    clock = Clock()
    gc.collect()
    gc.freeze()  # collections during training need not go through all that was imported and built
    try:
        for step in range(1, max_steps + 1):
            profile.before(step)
            start = time.perf_counter()
            batches = next(steps)
            data_wait = time.perf_counter() - start
            learning_rate = training.learning_rate
            metrics, outcome = train_step(training, batches, loss, step)
            record = record and record()  # of the step before, whose numbers have come; the device has this one to do
            if outcome.skipped:
                log.note(f"step {step}: no update, fp16's gradients overflow; their scale is lowered")
            window.add(batches, metrics, flops, _balancing(training))
            sums = window.close(training) if log.due(step) else None
            record = partial(_record, log, step, sums, outcome, clock, log.meter.excluded, learning_rate, data_wait)
            evaluates = val is not None and _falls_on(step, options.eval_steps or options.save_steps, max_steps)
            saves = _saves(run, train, step, max_steps)
            if evaluates or saves or not torch.cuda.is_available():
                training.look()
                record = record and record()
            profile.after(step)
            with log.meter.paused():
                if val is not None and evaluates:
                    collect = options.manual_gc and options.manual_gc_eval
                    if collect:
                        gc.collect()
                    log.evaluation(step, evaluate(training, val, loss, names, options.eval_iters))
                    if collect:
                        gc.collect()
                if saves:
                    saved = save_checkpoint(run, training, step)
                    log.note("; ".join(f"{what.replace('_', ' ')}: {path}" for what, path in saved.items()))
                    log.draw()  # which fails where the checkpoint has filled the disk
            if options.manual_gc and options.manual_gc_steps and step % options.manual_gc_steps == 0:
                gc.collect()
    except NonFiniteError as error:
        log.close({"stopped": str(error), "last_checkpoint": None} | _last(saved))
        raise
    log.close(_last(saved))


def _last(saved: dict[str, Path]) -> dict[str, str]:
    return {f"last_{what}": str(path) for what, path in saved.items()}


def _record(
    log: RunLog,
    step: int,
    sums: Sums | None,
    outcome: Outcome,
    clock: Clock,
    excluded: float,
    learning_rate: float,
    data_wait: float,
) -> None:
    """Record a step that has ended, and write its line where that is due."""
    ended = clock.end_of(outcome) - excluded
    if sums is None:
        log.step(0, 0.0, data_wait, ended)
        return
    means, tokens, cost = sums()
    log.step(int(tokens), cost, data_wait, ended)
    norm = {} if outcome.grad_norm is None else {"grad_norm": outcome.grad_norm}
    log.train(step, means | norm | {"learning_rate": learning_rate})


def evaluate(training: Training, val: Batches, loss: Loss, names: list[str], most: int) -> dict[str, float]:
    """Means over the evaluation data by trained tokens, as `eval_<name>`; over `most` global batches, or all (-1)."""
    totals, weight = {}, 0.0
    for batches in islice(val.once(), most if most >= 0 else None):
        tokens = batches[0].loss_tokens
        for name, value in evaluate_step(training, batches, loss).items():
            totals[name] = totals.get(name, 0.0) + value.double() * tokens
        weight += tokens
    sums = sum_over_ranks(totals, names).wait()
    return {f"eval_{name}": value / max(weight, 1.0) for name, value in zip(names, sums, strict=True)}


def _falls_on(step: int, every: int, max_steps: int) -> bool:
    return step % every == 0 or step == max_steps


def _saves(run: Run, train: Batches, step: int, max_steps: int) -> bool:
    options = run.options
    if options.save_strategy == "steps" or train.samples is None:
        return _falls_on(step, options.save_steps, max_steps)
    seen = options.global_batch_size * step
    return step == max_steps or seen // train.samples > (seen - options.global_batch_size) // train.samples


def _balancing(training: Training) -> dict[str, Tensor]:
    """MoE: the router's auxiliary losses of the step, summed over this rank's layers and micro batches."""
    if training.model.config.num_moe_experts is None:
        return {}
    tracker, data_parallel = get_moe_metrics_tracker(), parallel_state.get_data_parallel_world_size()
    sums = {}
    for name, entry in tracker.metrics.items():
        # What _Window sums over all ranks and divides by the data-parallel ones is to be this entry's own mean.
        share = data_parallel / entry.avg_group.size() if entry.avg_group is not None else 1.0
        sums[name] = entry.values.sum() * (share if entry.needs_dp_avg else data_parallel)
    tracker.clear()
    return sums


class _Window:
    """Sums since the last log line, on the device."""

    def __init__(self, names: list[str]):
        self.names = names
        self.balancing_names: list[str] = []  # those of all ranks, found at the first line
        self.asked = False
        self._reset()

    def _reset(self) -> None:
        self.steps, self.micro_batches, self.tokens, self.flops = 0, 0, 0, 0.0
        self.metrics: dict[str, Any] = {}
        self.balancing: dict[str, Any] = {}

    def add(self, batches: list[Batch], metrics: dict[str, Tensor], flops: Flops, balancing: dict[str, Tensor]) -> None:
        lengths = [length for batch in batches for length in batch.lengths]
        self.steps += 1
        self.micro_batches += len(batches)
        self.tokens += sum(lengths)
        # Of a context-parallel group each rank holds a share of the weights, about as many of them trained on.
        shares = parallel_state.get_context_parallel_world_size()
        scored = shares * sum(int(batch.loss_weights.count_nonzero()) for batch in batches)
        self.flops += flops.training(lengths, scored)
        for sums, values in ((self.metrics, metrics), (self.balancing, balancing)):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value

    def close(self, training: Training) -> Sums:
        """Means of the metrics over the steps, then tokens and FLOPs, all over all ranks. Every rank calls this; only
        what it returns waits for the device."""
        steps, sums = self.steps, sum_over_ranks(self.metrics, self.names, self.tokens, self.flops)
        balancing = self._balancing_means(training)
        self._reset()

        def wait() -> tuple[dict[str, float], float, float]:
            *metrics, tokens, flops = sums.wait()
            means = {name: value / steps for name, value in zip(self.names, metrics, strict=True)}
            if balancing is not None:
                means |= zip(self.balancing_names, balancing.wait(), strict=True)
            return means, tokens, flops

        return wait

    def _balancing_means(self, training: Training) -> Fetched | None:
        config = training.model.config
        if config.num_moe_experts is None:
            return None
        if not self.asked:  # a rank has its own layers (pipeline)
            names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(names, sorted(self.balancing))
            self.balancing_names, self.asked = sorted({name for some in names for name in some}), True
        if not self.balancing_names:
            return None
        frequency = config.moe_layer_freq
        pattern = frequency if isinstance(frequency, list) else [n % frequency == 0 for n in range(config.num_layers)]
        # A rank has a share of each value (tensor and context parallelism); data-parallel ranks have their own.
        parts = sum(map(bool, pattern)) * self.micro_batches * parallel_state.get_data_parallel_world_size()
        vector = torch.zeros(len(self.balancing_names), dtype=torch.float64, device=runtime.device())
        for place, name in enumerate(self.balancing_names):
            vector[place] = self.balancing.get(name, 0.0)
        dist.all_reduce(vector)
        return Fetched(vector / parts)
