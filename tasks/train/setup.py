"""Setup of a training run, from options to the trainer, the same for every task."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...bridge import parallel
from ...bridge.checkpoint.upload import upload_folder
from ...bridge.mapping.fp8 import load_as_bf16
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...bridge.model.vision_encoder import Normalization
from ...bridge.option_groups import flag_value
from ...templates.plural import plural
from ..distributed.collectives import broadcast_from_rank0, run_on_all_ranks
from ..distributed.signals import EXIT_STOPPED
from ..options import SftOptions
from ..plan.run_plan import tower_patches
from ..run.args_json import save_args
from ..run.context import Run, eval_batches, open_run, train_batches
from ..run.data_file import write_data_file
from ..run.environment import environment
from ..run.interrupt import interruptible
from ..run.load_weights import read_weights
from ..run.planning import ProcessLayout
from ..system.console import color_label
from ..system.memory import oom_hints
from .feature_cache import open_feature_cache
from .loss_spikes import SpikeFilter
from .objective import Objective
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism, wrap_tower
from .restore import last_step, restore, restore_data_position
from .step import TrainState
from .trainer import Trainer
from .tuner import choose_trained

# Returns the task's objective and notes for the user. Called after the weights are loaded, before the optimizer exists.
# The last two arguments are the training and evaluation data: Batches, or Prompts for a task that generates.
MakeObjective = Callable[[Run, Model, Any, Any], tuple[Objective, list[str]]]


def train(
    options: SftOptions,
    sources: dict[str, str],
    make_objective: MakeObjective,
    check_data: Callable[[Run], None] | None = None,
) -> int:
    """Train by the options, and return the exit code.

    sources: origin of each option's value, for args.json
    check_data: raises ValueError, before any model is loaded, for data that the task cannot use
    """
    with oom_hints(options), interruptible():
        return _train(options, sources, make_objective, check_data)


def _train(
    options: SftOptions,
    sources: dict[str, str],
    make_objective: MakeObjective,
    check_data: Callable[[Run], None] | None,
) -> int:
    run = open_run(options, sources)
    if check_data:
        check_data(run)
    train, val = train_batches(run), eval_batches(run)
    notes = restore_data_position(run, train)
    max_steps = last_step(run, train)
    if run.writes:
        print(*_describe_data(run, train, max_steps), sep="\n", flush=True)
    broadcast_from_rank0(lambda: write_data_file(run.folder, run.data))
    adapters = options.tuner.has_adapters
    model = run_on_all_ranks(
        lambda: build_model(run.hf_config, options.build, run.dtype, adapters=adapters, vision=run.builds_tower)
    )
    if model.vision and run.vision:
        model.vision.normalization = Normalization(*run.vision.normalization)
        model.vision.recomputes = options.vision.vit_gradient_checkpointing
        model.vision.kept_patches = broadcast_from_rank0(lambda: _kept_patches(options))
    with load_as_bf16(model.chunks):
        run_on_all_ranks(lambda: read_weights(model, run.hf_config, run.weights_folder, seed=options.training.seed))
    tuner_lines = choose_trained(model, run)
    feature_writer = open_feature_cache(run, model)
    objective, objective_notes = make_objective(run, model, train, val)
    gc.collect()  # models that only make_objective needed
    torch.cuda.empty_cache()
    chunks, tower = wrap_for_data_parallelism(model, options.build), wrap_tower(model, options.build)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule, options.vision, tower)
    updates = max(1, max_steps - flag_value(options, "critic_warmup", 0))
    schedule = build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, updates)
    spikes = SpikeFilter(options.optimizer.loss_spike_sigma) if options.optimizer.loss_spike_sigma else None
    training = TrainState(
        model, chunks, optimizer, schedule, options.optimizer.clip_grad, spikes, tower=tower and tower.module
    )
    notes += objective_notes + restore(run, training)
    layout = ProcessLayout.of(options.build, dist.get_world_size())
    facts = {"kernels": str(model.kernels), "layout": str(layout), **environment()}
    broadcast_from_rank0(lambda: save_args(run.folder / "args.json", options, sources, **facts))
    if run.writes:
        print(*tuner_lines, *notes, sep="\n")
        print(f"{model.kernels}; weights: {str(run.dtype).removeprefix('torch.')}")
        for warning in model.kernels.warnings:
            print(color_label(warning, sys.stdout))
        print(f"Run folder: {run.folder}", flush=True)
    trainer = Trainer(run, training, objective, train, val, max_steps)
    stop_reason, is_first = trainer.fit(), dist.get_rank() == 0
    if feature_writer:
        feature_writer.close()
    parallel.destroy()  # the other ranks need not wait for an upload
    if options.hub.push_to_hub and is_first and not stop_reason and trainer.last_checkpoint:
        address = upload_folder(trainer.last_checkpoint, options.hub, use_hf=options.use_hf, token=options.hub_token)
        print(f"Uploaded {trainer.last_checkpoint} to {address}", flush=True)
    return EXIT_STOPPED if stop_reason else 0


def _kept_patches(options: SftOptions) -> int:
    """Return the patches whose activations fit into a GPU's memory; 0: not known."""
    if not torch.cuda.is_available():
        return 0
    return tower_patches(options, dist.get_world_size(), torch.cuda.get_device_properties(0).total_memory)


def _describe_data(run: Run, train: Any, max_steps: int) -> list[str]:
    """Return lines for the user about the data, printed before the model is loaded."""
    batch = run.options.training.global_batch_size
    layout = ProcessLayout.of(run.options.build, dist.get_world_size())
    lines = [run.data.report, f"{layout}; {plural(max_steps, 'step')} of {plural(batch, 'sample')}"]
    if train.samples is not None and train.samples < batch:
        lines.append(
            f"--global_batch_size {batch}: the data has {plural(train.samples, 'sample')}, so a step sees some of them "
            "more than once"
        )
    if train.padding_share is not None:
        lines.append(f"Padding: {train.padding_share:.2%} of an epoch's tokens in this layout")
    return lines
