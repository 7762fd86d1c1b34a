"""Adjustment of options that are redundant beside others."""

from collections.abc import Iterator

from ...tasks.options import SftOptions
from ...templates.formats.schemas import UNGROUPED
from .muon import is_muon
from .tasks import task_flag


def adjust_options(options: SftOptions) -> Iterator[str]:
    """Replace redundant options, and yield a note for each."""
    training = options.training
    build = options.build
    if build.sequence_parallel and build.tensor_model_parallel_size == 1:
        build.sequence_parallel = False
        yield "--sequence_parallel true is disabled: it needs --tensor_model_parallel_size > 1."
    if training.train_iters is not None and training.num_train_epochs is not None:
        epochs, steps = training.num_train_epochs, training.train_iters
        yield f"--num_train_epochs {epochs:g} is ignored: --train_iters {steps} is set."
        training.num_train_epochs = None
    if build.virtual_pipeline_model_parallel_size == 1 and build.pipeline_model_parallel_layout is None:
        build.virtual_pipeline_model_parallel_size = None  # one chunk per stage is plain pipelining
    if options.optimizer.optimizer == "sgd" and build.use_distributed_optimizer:
        build.use_distributed_optimizer = False
        yield "--use_distributed_optimizer true is disabled: --optimizer sgd has no state to shard."
    if is_muon(options.optimizer) and build.use_distributed_optimizer:
        build.use_distributed_optimizer = False
        cure = "" if options.optimizer.optimizer == "dist_muon" else " (dist_muon divides its state)"
        yield f"--use_distributed_optimizer true is disabled: Muon needs whole matrices{cure}."
    data = options.data
    if data.group_by_length and (reason := _even_lengths(options)):
        data.group_by_length = False
        yield f"--group_by_length true is ignored: {reason}."
    if not data.padding_free and (data.packing or options.stage not in UNGROUPED):
        data.padding_free = True
        reason = "--packing true is set" if data.packing else f"{task_flag(options)} has packed rows only"
        yield f"--padding_free false is ignored: {reason}, and padding changes no number."


def _even_lengths(options: SftOptions) -> str:
    """Return the reason why batches cannot be made of samples of similar length; "" if they can."""
    if options.data.packing:
        return "--packing true is set, and packs are about equally long"
    if options.data.streaming:
        return "--streaming true is set, and lengths are unknown"
    if options.generates:
        return f"{task_flag(options)} has the lengths of generated completions"
    if not options.data.train_dataloader_shuffle:
        return "--train_dataloader_shuffle false keeps the order"
    return ""
