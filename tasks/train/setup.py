"""Setup of a training run, from options to the trainer, the same for every task."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...bridge import parallel
from ...bridge.mapping.fp8 import load_as_bf16
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...templates.plural import plural
from ..distributed.collectives import broadcast_from_rank0, run_on_all_ranks
from ..distributed.signals import EXIT_STOPPED
from ..options import SftOptions
from ..run.args_json import save_args
from ..run.context import Run, eval_batches, open_run, train_batches
from ..run.interrupt import interruptible
from ..run.load_weights import read_weights
from ..run.planning import ProcessLayout
from ..system.memory import oom_hints
from .loss_spikes import SpikeFilter
from .objective import Objective
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from .restore import place_data, restore, steps_left
from .step import TrainState
from .trainer import Trainer
from .tuner import choose_trained

# What a run trains for, with notes for the user: made when the model has its weights, and no optimizer yet.
# The last two: Batches to train and to evaluate on, of a task that generates Prompts.
Make = Callable[[Run, Model, Any, Any], tuple[Objective, list[str]]]


def train(options: SftOptions, sources: dict[str, str], make: Make) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    with oom_hints(options), interruptible():
        return _train(options, sources, make)


def _train(options: SftOptions, sources: dict[str, str], make: Make) -> int:
    opened = open_run(options, sources)
    train, val = train_batches(opened), eval_batches(opened)
    notes = place_data(opened, train)
    steps = steps_left(opened, train)
    if opened.writes:
        print(*_about_data(opened, train, steps), sep="\n", flush=True)
    adapters = options.tuner.tuner_type == "lora"
    model = run_on_all_ranks(lambda: build_model(opened.hf_config, options.build, opened.dtype, adapters=adapters))
    with load_as_bf16(model.chunks):
        run_on_all_ranks(
            lambda: read_weights(model, opened.hf_config, opened.weights_folder, seed=options.training.seed)
        )
    trained = choose_trained(model, opened)
    objective, about = make(opened, model, train, val)
    gc.collect()  # a model that was needed for it alone
    torch.cuda.empty_cache()
    chunks = wrap_for_data_parallelism(model, options.build)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    schedule = build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, steps)
    spikes = SpikeFilter(options.optimizer.loss_spike_sigma) if options.optimizer.loss_spike_sigma else None
    training = TrainState(model, chunks, optimizer, schedule, options.optimizer.clip_grad, spikes)
    notes += about + restore(opened, training)
    broadcast_from_rank0(lambda: save_args(opened.folder / "args.json", options, sources, kernels=str(model.kernels)))
    if opened.writes:
        print(*trained, *notes, sep="\n")
        print(f"{model.kernels}; weights: {str(opened.dtype).removeprefix('torch.')}")
        print(f"Run folder: {opened.folder}", flush=True)
    stopped = Trainer(opened, training, objective, train, val, steps).fit()
    parallel.destroy()
    return EXIT_STOPPED if stopped else 0


def _about_data(run: Run, train: Any, steps: int) -> list[str]:
    """Return what a user should know before the model is loaded, as lines."""
    batch = run.options.training.global_batch_size
    layout = ProcessLayout.of(run.options.build, dist.get_world_size())
    lines = [run.data.report, f"{layout}; {plural(steps, 'step')} of {plural(batch, 'sample')}"]
    if train.samples is not None and train.samples < batch:
        lines.append(
            f"--global_batch_size {batch}: the data has {plural(train.samples, 'sample')}, so a step sees some of them "
            "more than once"
        )
    if train.padding_share is not None:
        lines.append(f"Padding: {train.padding_share:.2%} of an epoch's tokens in this layout")
    return lines
