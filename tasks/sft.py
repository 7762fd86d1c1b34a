"""`megatron sft` and `megatron pt`: train on the next token."""

import torch.distributed as dist
from megatron.core import parallel_state

from ..bridge.build import Model, build_model
from ..bridge.distributed import load_distributed
from ..bridge.fp8 import reading_in_bf16
from ..bridge.hub import read_config
from ..bridge.load import load_weights
from ..bridge.safetensors_io import has_weights
from .args import save_args
from .loop import fit
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from .options import PtOptions, SftOptions
from .plan import Layout
from .ranks import on_every_rank, on_first_rank
from .restore import place_data, restore, steps_left
from .run import Run, eval_batches, open_run, train_batches
from .stop import EXIT_STOPPED
from .train import Training, sft_loss
from .tuner import choose_trained


def run(options: SftOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    opened = open_run(options, sources, stage="pt" if isinstance(options, PtOptions) else "sft")
    train, val = train_batches(opened), eval_batches(opened)
    notes = place_data(opened, train)
    adapters = options.tuner_type == "lora"
    model = on_every_rank(lambda: build_model(opened.hf_config, options, opened.dtype, adapters=adapters))
    with reading_in_bf16(model.chunks):
        on_every_rank(lambda: read_weights(model, opened))
    trained = choose_trained(model, opened)
    chunks = wrap_for_data_parallelism(model, options)
    optimizer = build_optimizer(model, chunks, options, options)
    steps = steps_left(opened, train)
    schedule = build_schedule(optimizer, options, options.weight_decay, steps)
    training = Training(model, chunks, optimizer, schedule, options.clip_grad)
    notes += restore(opened, training)
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
        print(*trained, *notes, sep="\n")
        print(f"{model.kernels}; weights: {opened.dtype}; run: {opened.folder}", flush=True)
    names = ["loss", "mtp_loss"] if model.architecture.predicting else ["loss"]
    stopped = fit(opened, training, sft_loss, names, train, val, steps)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return EXIT_STOPPED if stopped else 0


def read_weights(model: Model, run: Run) -> None:
    """The weights of the model, or of the checkpoint that the run goes on from, in either format."""
    folder = run.weights_folder
    if has_weights(folder):
        load_weights(model.chunks, read_config(folder), folder)
    else:
        load_distributed(model.chunks, run.hf_config, folder)
