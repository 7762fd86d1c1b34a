"""`megatron sft` and `megatron pt`: train on the next token."""

import torch.distributed as dist
from megatron.core import parallel_state

from ..bridge.build import build_model
from ..bridge.load import load_weights
from .loop import fit, steps_of
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from .options import PtOptions, SftOptions
from .run import eval_batches, open_run, train_batches
from .train import Training, sft_loss


def run(options: SftOptions, sources: dict[str, str]) -> None:
    """Do what the options say. `sources`: where each option's value came from, for args.json."""
    opened = open_run(options, sources, stage="pt" if isinstance(options, PtOptions) else "sft")
    train, val = train_batches(opened), eval_batches(opened)
    model = build_model(opened.hf_config, options, opened.dtype)
    load_weights(model.chunks, opened.hf_config, opened.model_folder)
    chunks = wrap_for_data_parallelism(model, options)
    optimizer = build_optimizer(model, chunks, options, options)
    schedule = build_schedule(optimizer, options, options.weight_decay, steps_of(opened, train))
    if opened.writes:
        print(opened.data.report)
        print(f"{model.kernels}; weights: {opened.dtype}; run: {opened.folder}", flush=True)
    training = Training(model, chunks, optimizer, schedule, options.clip_grad)
    fit(opened, training, sft_loss, ["loss"], train, val)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
