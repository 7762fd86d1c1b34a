"""The loop around the training step: data in, log lines out, evaluations and checkpoints in between."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
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
from .checkpoint import Checkpoints
from .flops import Flops, peak_flops
from .log import RunLog, Start
from .profile import Profile
from .restore import rank_file
from .resume import layout_of
from .run import Run, streamed
from .stop import Stop
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
from .training_state import optimizer_numbers, rank_tensors
from .watchdog import Watchdog

Sums = Callable[[], tuple[dict[str, float], float, float]]  # means of metrics, tokens, FLOPs: waits for the device


def fit(
    run: Run, training: Training, loss: Loss, names: list[str], train: Batches, val: Batches | None, max_steps: int
) -> str | None:
    """Train to the last step, or until there is a reason to stop, which is returned: the run is saved then.

    `names`: the metrics that `loss` returns; they are logged under these names.
    """
    options, model = run.options, training.model
    flops = Flops.of(model.config, model.architecture.vocab_size, trained=model.trained_share)
    window = _Window(names)
    start = _start(run, window)
    log = RunLog(
        run.folder if run.writes else None,
        options,
        max_steps,
        peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None,
        dist.get_world_size(),
        start=start,
        six_n=flops.six_n_d(1) if model.trained_share == 1 else None,
        settings={name: value for name, value in vars(options).items() if name not in SECRET},
    )
    profile = Profile(options, run.folder, max_steps, log.note if run.writes else print, log.meter.paused)
    stop, watchdog = Stop(options.exit_duration_in_mins), Watchdog(options.ddp_timeout, run.folder)
    checkpoints = Checkpoints(run, training, watchdog)
    steps = train.steps()
    if train.loss_tokens_are_local:
        steps = streamed(steps, options.ddp_timeout)
    saved: dict[str, Path] = {}  # the last checkpoint
    record: Callable[[], None] | None = None  # of the last step, whose end the host has not seen
    reason: str | None = None
    clock = Clock()
    gc.collect()
    gc.freeze()  # collections during training need not go through all that was imported and built
    try:
        for step in range(start.step + 1, max_steps + 1):
            stop.exchange()
            profile.before(step)
            watchdog.phase(f"data of step {step}")
            began, epoch = time.perf_counter(), train.epoch
            batches = next(steps)
            data_wait = time.perf_counter() - began
            watchdog.phase(f"step {step}")
            learning_rate = training.learning_rate
            metrics, outcome = train_step(training, batches, loss, step)
            record = record and record()  # of the step before, whose numbers have come; the device has this one to do
            if outcome.skipped:
                log.note(f"step {step}: no update, fp16's gradients overflow; their scale is lowered")
            window.add(batches, metrics, flops, _balancing(training))
            sums = window.close(training) if log.due(step) else None
            record = partial(_record, log, step, sums, outcome, clock, log.meter.excluded, learning_rate, data_wait)
            reason = stop.reason()
            evaluates = val is not None and _falls_on(step, options.eval_steps or options.save_steps, max_steps)
            saves = _saves(run, step, max_steps, epoch_ends=train.epoch != epoch) or reason is not None
            if evaluates or saves or not torch.cuda.is_available():
                training.look()
                record = record and record()
            profile.after(step)
            with log.meter.paused():
                evaluated: dict[str, float] = {}
                if val is not None and evaluates:
                    collect = options.manual_gc and options.manual_gc_eval
                    if collect:
                        gc.collect()
                    with watchdog.phase(f"evaluation at step {step}"):
                        evaluated = evaluate(training, val, loss, names, options.eval_iters, watchdog.tick)
                    log.evaluation(step, evaluated)
                    if collect:
                        gc.collect()
                if saves:
                    began = time.perf_counter()
                    saved = checkpoints.save(
                        step,
                        _state(run, training, train, log, window, evaluated),
                        _rank_state(run, training, train, window),
                    )
                    waited = time.perf_counter() - began
                    log.saved(step, waited)
                    where = "; ".join(f"{what.replace('_', ' ')}: {path}" for what, path in saved.items())
                    log.note(f"{where} (training waited {waited:.2f} s)")
                    log.draw()  # which fails where the checkpoint has filled the disk
            if reason is not None:
                break
            if options.manual_gc and options.manual_gc_steps and step % options.manual_gc_steps == 0:
                gc.collect()
        checkpoints.settle()
    except NonFiniteError as error:
        with suppress(OSError):
            checkpoints.settle()
        log.close({"stopped": str(error), "last_checkpoint": None} | _last(saved))
        raise
    watchdog.close()
    if reason is None:
        stop.close()
    else:
        log.note(
            f"stopped after step {step} of {max_steps}: {reason}. --resume_from_checkpoint auto goes on from there"
        )
    log.close(({"stopped": reason} if reason else {}) | {"last_checkpoint": None} | _last(saved))
    return reason


def _start(run: Run, window: "_Window") -> Start:
    """Where the log goes on."""
    if run.resumed is None:
        return Start()
    state = run.resumed.state
    if run.resumed.is_in(run.options, dist.get_world_size()):
        window.load(rank_file(run.resumed.folder, dist.get_rank()))
        waiting = 0
    else:  # the shares of other ranks than there are now
        waiting = state["window_tokens"]
    return Start(run.resumed.step, state["tokens"] + waiting, state["elapsed"])


def _state(
    run: Run, training: Training, train: Batches, log: RunLog, window: "_Window", evaluated: dict[str, float]
) -> dict[str, Any]:
    """What of a run is the same on every rank."""
    options = run.options
    return {
        "tokens": log.meter.tokens,
        "window_tokens": int(sum_over_ranks({}, [], window.tokens).wait()[0]),
        "elapsed": log.elapsed(),
        "layout": layout_of(options, dist.get_world_size()),
        "optimizer": None if options.no_save_optim else optimizer_numbers(training),
        "rng": not options.no_save_rng,
        "data": train.position(),
        "metrics": evaluated,
    }


def _rank_state(run: Run, training: Training, train: Batches, window: "_Window") -> dict[str, Tensor]:
    """What of a run this rank alone has."""
    options = run.options
    tensors = rank_tensors(training, run.hf_config, optimizer=not options.no_save_optim, rng=not options.no_save_rng)
    tensors |= window.tensors()
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    if first and parallel_state.is_pipeline_first_stage():
        tensors |= {name: torch.from_numpy(array) for name, array in train.cursors().items()}
    return tensors


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


def evaluate(
    training: Training, val: Batches, loss: Loss, names: list[str], most: int, tick: Callable[[], None]
) -> dict[str, float]:
    """Means over the evaluation data by trained tokens, as `eval_<name>`; over `most` global batches, or all (-1).

    Calls `tick` for each global batch.
    """
    totals, weight = {}, 0.0
    for batches in islice(val.once(), most if most >= 0 else None):
        tick()
        tokens = batches[0].loss_tokens
        for name, value in evaluate_step(training, batches, loss).items():
            totals[name] = totals.get(name, 0.0) + value.double() * tokens
        weight += tokens
    sums = sum_over_ranks(totals, names).wait()
    return {f"eval_{name}": value / max(weight, 1.0) for name, value in zip(names, sums, strict=True)}


def _falls_on(step: int, every: int, max_steps: int) -> bool:
    return step % every == 0 or step == max_steps


def _saves(run: Run, step: int, max_steps: int, *, epoch_ends: bool) -> bool:
    if run.options.save_strategy == "steps":
        return _falls_on(step, run.options.save_steps, max_steps)
    return step == max_steps or epoch_ends


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

    def tensors(self) -> dict[str, Tensor]:
        """What this rank has of it, by names for its file."""
        sums = {f"window/metrics/{name}": value for name, value in self.metrics.items()}
        sums |= {f"window/balancing/{name}": value for name, value in self.balancing.items()}
        numbers = [self.steps, self.micro_batches, self.tokens, self.flops]
        return sums | {"window/numbers": torch.tensor(numbers, dtype=torch.float64)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for name, value in tensors.items():
            kind, _, metric = name.removeprefix("window/").partition("/")
            if name == "window/numbers":
                steps, micro_batches, tokens, self.flops = value.tolist()
                self.steps, self.micro_batches, self.tokens = int(steps), int(micro_batches), int(tokens)
            elif name.startswith("window/"):
                getattr(self, kind)[metric] = value.to(runtime.device())

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
