"""The loop around the training step: data in, log lines out, evaluations and checkpoints in between."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...bridge.checkpoint.writer import ShardWriter
from ...bridge.parallel import barrier
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..distributed.signals import Stop
from ..distributed.watchdog import Watchdog
from ..observability.flops import Flops, peak_flops
from ..observability.profiler import Profile
from ..observability.run_logger import RunLog, Start, Waiting
from ..options import SftOptions
from ..run.args_json import SECRET
from ..run.context import Run, streamed
from ..run.interrupt import Progress, report
from .checkpointer import Checkpoints
from .metrics import Sums, Window, balancing
from .objective import Objective
from .step import (
    Clock,
    Fetched,
    NonFiniteError,
    Outcome,
    Training,
    evaluate_step,
    run_again,
    sum_over_ranks,
    train_step,
)
from .step_times import StepTimes
from .train_state import optimizer_numbers, rank_tensors, read_own


def fit(
    run: Run, training: Training, objective: Objective, train: Batches, val: Batches | None, max_steps: int
) -> str | None:
    """Train to the last step, or until there is a reason to stop, which is returned: the run is saved then."""
    options, model = run.options, training.model
    flops = Flops.of_model(model, scores_tokens=objective.scores_tokens)
    window, times = Window(objective), StepTimes(training)
    start = _start(run, window, objective)
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
    profile = Profile(
        options, run.folder, max_steps, log.note if run.writes else print, log.meter.paused, first=start.step + 1
    )
    stop = Stop(options.exit_duration_in_mins)
    watchdog = Watchdog(options.ddp_timeout, run.folder, lambda: ShardWriter.taken_in_all)
    following = objective.follower and objective.follower.reference
    checkpoints = Checkpoints(run, training, watchdog, log.note, following, log.written)
    source = objective.source
    steps = source.steps(training, max_steps - start.step) if source else train.steps()
    if train.loss_tokens_are_local:
        steps = streamed(steps)
    if start.step >= max_steps:
        log.note(f"The checkpoint is of step {start.step}, the run's last: nothing is left to train.")
    record: Callable[[], None] | None = None  # of the last step, whose end the host has not seen
    reason: str | None = None
    clock = Clock()
    gc.collect()
    gc.freeze()  # collections during training need not go through all that was imported and built
    try:
        for step in range(start.step + 1, max_steps + 1):
            stop.exchange()
            report(Progress(run.folder, step, max_steps, run.resumed.checkpoint if run.resumed else None))
            profile.before(step)
            watchdog.phase(f"data of step {step}")
            began, epoch = time.perf_counter(), train.epoch
            batches = next(steps)
            data_wait = time.perf_counter() - began
            watchdog.phase(f"step {step}", learn=True)
            learning_rate = training.learning_rate
            batches = objective.prepare(training, batches, False)
            times.begin(data_wait)
            passed_over = step in options.iterations_to_skip
            metrics, outcome = train_step(
                training, batches, objective.loss, step, objective.forward, passed_over=passed_over
            )
            if objective.follower:
                objective.follower(training, step)
            record = record and record()  # of the step before, whose numbers have come; the device has this one to do
            if passed_over:
                log.note(f"step {step}: no update (--iterations_to_skip)")
            if outcome.skipped:
                log.note(f"step {step}: no update, fp16's gradients overflow; their scale is lowered")
            window.add(batches, metrics, flops, balancing(training))
            sums = window.close(training) if log.due(step) else None
            slow = times.close() if sums else None
            more = source.metrics() if source and sums else {}
            first = sums is None and step == start.step + 1  # which is in no rate, as are the ones of its line before
            waiting = sum_over_ranks({}, [], window.tokens, window.flops) if first else None
            record = partial(
                _record,
                log,
                step,
                sums,
                more,
                slow,
                outcome,
                clock,
                log.meter.excluded,
                learning_rate,
                data_wait,
                waiting,
            )
            reason = stop.reason() if step < max_steps else None
            saves = _saves(run, step, max_steps, epoch_ends=train.epoch != epoch)
            evaluates = _falls_on(step, options.eval_steps, max_steps) if options.eval_steps else saves
            saves = saves or reason is not None
            evaluates = evaluates and val is not None
            if evaluates or saves or not torch.cuda.is_available():
                training.look()
                record = record and record()
            profile.after(step)
            with log.meter.paused():
                evaluated: dict[str, float] = {}
                if val is not None and evaluates:
                    with watchdog.phase(f"evaluation at step {step}"), _collected(options):
                        how = source.evaluate if source else partial(evaluate, objective=objective)
                        evaluated = how(training, val, most=options.eval_iters, tick=watchdog.tick)
                    log.evaluation(step, evaluated)
                if saves:
                    began = time.perf_counter()
                    tensors = _rank_state(run, training, objective, train, window)
                    state = _state(run, training, train, log, window, evaluated)  # after what the tensors waited for
                    paths = checkpoints.save(step, state, tensors)
                    log.saved(step, paths, time.perf_counter() - began, being_written=options.async_save)
                    log.draw(overview_only=True)
            if reason is not None:
                break
            if options.manual_gc and options.manual_gc_steps and step % options.manual_gc_steps == 0:
                gc.collect()
        checkpoints.settle()
    except Exception as error:
        if isinstance(error, NonFiniteError):
            with suppress(Exception), watchdog.phase("the step that was not finite, once more"):
                error.args = (f"{error}. {run_again(training, objective.loss, objective.forward)}",)
        with suppress(Exception):  # which is not to hide the error
            if source:
                source.let_go()
        with suppress(OSError, RuntimeError):
            checkpoints.settle()  # what is being written needs no rank's main thread
        if isinstance(error, NonFiniteError):
            log.close({"stopped": str(error)} | _last(checkpoints))
        raise
    watchdog.phase("the end of training")
    if source:
        source.close()
    barrier()
    watchdog.close()
    if reason is None:
        stop.close()
    else:
        log.note(f"Stopped after step {step} of {max_steps}: {reason}. Set --resume_from_checkpoint auto to resume.")
    log.close(({"stopped": reason} if reason else {}) | _last(checkpoints))
    return reason


def _start(run: Run, window: Window, objective: Objective) -> Start:
    """Where the log goes on, and what makes the steps."""
    if run.resumed is None:
        return Start()
    state = run.resumed.state
    if objective.source and not run.options.ignore_data_skip:
        objective.source.load(read_own(run.resumed.folder, 0, "rollout/"))
    tokens = state["tokens"]
    if state["layout"] == run.layout:
        window.load(read_own(run.resumed.folder, dist.get_rank(), "window/"))
    else:  # the shares of other ranks than there are now
        tokens += state["window_tokens"]
    waiting = Waiting(*sum_over_ranks({}, [], window.tokens, window.flops).wait())
    return Start(run.resumed.step, tokens, state["elapsed"], waiting, state.get("spikes", 0))


def _state(
    run: Run, training: Training, train: Batches, log: RunLog, window: Window, evaluated: dict[str, float]
) -> dict[str, Any]:
    """What of a run is the same on every rank."""
    options = run.options
    return {
        "tokens": log.meter.tokens,
        "spikes": log.spikes,
        "window_tokens": int(sum_over_ranks({}, [], window.tokens).wait()[0]),
        "elapsed": log.elapsed(),
        "layout": run.layout,
        "began_from": run.began_from,
        "optimizer": None if options.no_save_optim else optimizer_numbers(training),
        "rng": not options.no_save_rng,
        "data": train.position(),
        "metrics": evaluated,
    }


def _rank_state(
    run: Run, training: Training, objective: Objective, train: Batches, window: Window
) -> dict[str, Tensor]:
    """What of a run this rank alone has."""
    options = run.options
    tensors = rank_tensors(training, run.hf_config, optimizer=not options.no_save_optim, rng=not options.no_save_rng)
    tensors |= window.tensors()
    if objective.source:
        ours = objective.source.tensors()
        tensors |= ours if dist.get_rank() == 0 else {}
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    if first and parallel_state.is_pipeline_first_stage():
        tensors |= {name: torch.from_numpy(array) for name, array in train.cursors().items()}
    return tensors


@contextmanager
def _collected(options: SftOptions) -> Iterator[None]:
    """--manual_gc_eval: garbage is collected before and after."""
    collect = options.manual_gc and options.manual_gc_eval
    if collect:
        gc.collect()
    yield
    if collect:
        gc.collect()


def _last(checkpoints: Checkpoints) -> dict[str, str | None]:
    return {"last_checkpoint": None} | {f"last_{what}": str(path) for what, path in checkpoints.last.items()}


def _record(
    log: RunLog,
    step: int,
    sums: Sums | None,
    more: dict[str, float],
    slow: Callable[[], str] | None,
    outcome: Outcome,
    clock: Clock,
    excluded: float,
    learning_rate: float,
    data_wait: float,
    waiting: Fetched | None,
) -> None:
    """Record a step that has ended, and write its line where that is due."""
    ended = clock.end_of(outcome) - excluded
    if outcome.is_spike:
        log.spike(step)
    if sums is None:
        log.step(0, 0.0, data_wait, ended, Waiting(*waiting.wait()) if waiting else None)
        return
    means, tokens, cost = sums()
    log.step(int(tokens), cost, data_wait, ended)
    norm = {} if outcome.grad_norm is None else {"grad_norm": outcome.grad_norm}
    log.train(step, means | more | norm | {"learning_rate": learning_rate})
    if slow and (ranks := slow()):
        log.note(f"step {step}: slow: {ranks}")


def evaluate(
    training: Training, val: Batches, *, objective: Objective, most: int, tick: Callable[[], None]
) -> dict[str, float]:
    """Means over the evaluation data, as `eval_<name>`; over `most` global batches, or all (-1).

    Calls `tick` for each global batch.
    """
    return evaluate_on(training, islice(val.once(), most if most >= 0 else None), objective, tick)


def evaluate_on(
    training: Training, steps: Iterable[list[Batch]], objective: Objective, tick: Callable[[], None]
) -> dict[str, float]:
    """Likewise over these global batches."""
    totals, whole = {}, 0.0
    for batches in steps:
        tick()
        batches, weight = objective.prepare(training, batches, True), objective.weight(batches[0])
        for name, value in evaluate_step(training, batches, objective.loss, objective.forward).items():
            totals[name] = totals.get(name, 0.0) + value.double() * weight
        whole += weight
    sums = sum_over_ranks(totals, objective.names).wait()
    found = objective.means(dict(zip(objective.names, sums, strict=True)), whole)
    return {f"eval_{name}": value for name, value in found.items()}


def _falls_on(step: int, every: int, max_steps: int) -> bool:
    return step % every == 0 or step == max_steps


def _saves(run: Run, step: int, max_steps: int, *, epoch_ends: bool) -> bool:
    if run.options.save_strategy == "steps":
        return _falls_on(step, run.options.save_steps, max_steps)
    return step == max_steps or epoch_ends
