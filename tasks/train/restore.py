"""Restore of a resumed run: data position, optimizer, schedule, random number generators."""

import math
from typing import Any

import numpy as np
import torch.distributed as dist

from ...bridge.option_groups import flag_value
from ...bridge.parallel import seed_ranks
from ...templates.batching.dataloader import Batches
from ..distributed.collectives import run_on_all_ranks
from ..run.context import Run
from ..run.planning import steps_of
from ..run.resume import Resumed
from .step import TrainState
from .train_state import load_optimizer, load_rng, read_prefixed


def restore_data_position(run: Run, train: Batches) -> list[str]:
    """Move `train` to the checkpoint's position, in any layout. Return notes for the user.

    Every rank calls this. Raises ValueError on every rank if the data differs.
    """
    if run.resumed is None:
        return []
    notes = [f"resumed from {run.resumed.checkpoint}, at step {run.resumed.step}", *run.resumed.notes]
    if run.options.resume.ignore_data_skip:
        return [*notes, "the data begins anew (--ignore_data_skip true)"]
    position, cursors = run.resumed.state["data"], _cursors(run.resumed)
    try:
        return notes + run_on_all_ranks(lambda: train.resume(position, cursors))
    except ValueError as error:
        raise ValueError(
            f"{run.resumed.checkpoint}: {error}. Give the --dataset that it was, or --ignore_data_skip true to have "
            "the data begin anew"
        ) from None


def last_step(run: Run, train: Batches) -> int:
    """Return the number of the run's last step."""
    options = run.options
    # With --dynamic_sample, the sample count does not determine the steps, because some prompts are replaced.
    counts_samples = not flag_value(options, "dynamic_sample", False)
    if (
        run.resumed is None
        or options.training.train_iters is not None
        or options.training.num_train_epochs is None
        or not counts_samples
    ):
        return steps_of(options.training, train.samples)
    samples = train.samples_until(options.training.num_train_epochs)
    if samples is None:  # a stream
        return steps_of(options.training, None)
    return run.resumed.step + math.ceil(samples / options.training.global_batch_size - 1e-9)


def restore(run: Run, training: TrainState) -> list[str]:
    """Restore optimizer, schedule and random number generators, in any layout. Return notes for the user.

    Every rank calls this right before the first step. Raises ValueError on every rank if the files are incomplete.
    """
    if run.resumed is None:
        return []
    options, resumed, notes = run.options, run.resumed, []
    is_same_layout = resumed.state["layout"] == run.layout
    optimizer_state: dict[str, Any] | None = resumed.state["optimizer"]
    if options.resume.no_load_optim or optimizer_state is None:
        critic_warmup = flag_value(options, "critic_warmup", 0)  # steps without an update of the policy
        training.schedule.step(max(0, resumed.step - critic_warmup))
        notes.append("the optimizer begins anew (--no_load_optim true)")
    else:
        load_optimizer(training, run.hf_config, resumed.folder, optimizer_state, same_layout=is_same_layout)
    if is_same_layout and resumed.state["rng"] and not options.resume.no_load_rng:
        load_rng(resumed.folder, dist.get_rank())
    else:
        seed_ranks(options.build, options.training.seed + resumed.step)
        reason = "--no_load_rng true" if is_same_layout else "the layout is another"
        notes.append(f"random numbers (of dropout) begin anew: {reason}")
    return notes


def _cursors(resumed: Resumed) -> dict[str, np.ndarray]:
    """Return the positions of a stream's readers on all ranks of the saved run."""
    files = sorted(resumed.folder.glob("*.safetensors"))
    return {name: tensor.numpy() for file in files for name, tensor in read_prefixed(file, "data/").items()}
