"""`megatron sft` and `megatron pt`: train on the next token."""

import torch.distributed as dist
from megatron.core import parallel_state

from ..bridge.build import build_model
from ..bridge.distributed import load_distributed
from ..bridge.fp8 import reading_in_bf16
from ..bridge.load import load_weights
from ..bridge.parallel import barrier
from .args import save_args
from .loop import fit
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from .options import PtOptions, SftOptions
from .plan import Layout, steps_of
from .run import eval_batches, on_every_rank, on_first_rank, open_run, train_batches
from .train import Training, sft_loss
from .tuner import choose_trained


def run(options: SftOptions, sources: dict[str, str]) -> None:
    """Do what the options say. `sources`: where each option's value came from, for args.json."""
    opened = open_run(options, sources, stage="pt" if isinstance(options, PtOptions) else "sft")
    train, val = train_batches(opened), eval_batches(opened)
    adapters = options.tuner_type == "lora"
    model = on_every_rank(lambda: build_model(opened.hf_config, options, opened.dtype, adapters=adapters))
    read = load_distributed if options.mcore_model else load_weights
    with reading_in_bf16(model.chunks):
        on_every_rank(lambda: read(model.chunks, opened.hf_config, opened.model_folder))
    trained = choose_trained(model, opened)
    chunks = wrap_for_data_parallelism(model, options)
    optimizer = build_optimizer(model, chunks, options, options)
    steps = steps_of(options, train.samples)
    schedule = build_schedule(optimizer, options, options.weight_decay, steps)
    on_first_rank(lambda: save_args(opened.folder / "args.json", options, sources, kernels=str(model.kernels)))
    if opened.writes:
        print(opened.data.report)
        print(f"{Layout.of(options, dist.get_world_size())}; {steps} steps of {options.global_batch_size} samples")
        if train.samples is not None and train.samples < options.global_batch_size:
            print(
                f"{train.samples} samples are fewer than --global_batch_size: a step sees some of them more than once"
            )
        if train.padding_share is not None:
            print(f"padding: {train.padding_share:.2%} of the tokens of an epoch, as this layout lays them out")
        print(*trained, sep="\n")
        print(f"{model.kernels}; weights: {opened.dtype}; run: {opened.folder}", flush=True)
    training = Training(model, chunks, optimizer, schedule, options.clip_grad)
    names = ["loss", "mtp_loss"] if model.architecture.predicting else ["loss"]
    fit(opened, training, sft_loss, names, train, val)
    barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
