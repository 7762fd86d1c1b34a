"""Run under torchrun: trains tiny models in many layouts, one launch per world size, and writes what each gave.

    torchrun --nproc-per-node 2 -m tests.layouts.worker jobs.json results.json

jobs.json: [{"name", "model": folder, "options": {flag: value}, "planted": optional fault}, ...]
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.mapping.fp8 import load_as_bf16
from megaswift.bridge.model.build import DTYPES, build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.model.trainable import count_parameters, freeze
from megaswift.bridge.option_groups import compose
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.options import SftOptions
from megaswift.tasks.run.planning import length_multiple
from megaswift.tasks.train.optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from megaswift.tasks.train.step import NonFiniteError, TrainState, sft_loss, sum_over_ranks, train_step
from megaswift.templates.batching.collator import Batch, BatchLayout
from megatron.core import parallel_state

from tests.layouts import reference as ref


def options_of(job: dict) -> SftOptions:
    settings = {
        "lr": ref.LR,
        "lr_decay_style": "constant",
        "weight_decay": ref.WEIGHT_DECAY,
        "adam_eps": ref.EPS,
        "clip_grad": ref.CLIP,
        "micro_batch_size": 1,
        "use_distributed_optimizer": False,
    }
    return compose(SftOptions, **settings | job["options"])


def open_model(job: dict, options: SftOptions) -> Model:
    folder = Path(job["model"])
    dtype = DTYPES[options.torch_dtype or "float32"]
    model = build_model(read_config(folder), options.build, dtype)
    with load_as_bf16(model.chunks):
        load_weights(model.chunks, read_config(folder), folder)
    freeze(model, read_config(folder), options.tuner)
    return model


def open_training(model: Model, options: SftOptions, bucket_size: int | None) -> TrainState:
    chunks = wrap_for_data_parallelism(model, options.build, bucket_size=bucket_size)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    schedule = build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, ref.STEPS)
    return TrainState(model, chunks, optimizer, schedule, options.optimizer.clip_grad)


def batches_of(step: int, options: SftOptions) -> list[Batch]:
    """This rank's share of a step's samples, laid out as the options say."""
    packs = ref.samples(step)
    loss_tokens = float(sum(weights[1:].sum() for pack in packs for _, weights in pack))
    mine = packs[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    if not options.data.padding_free:
        mine = [[document] for pack in mine for document in pack]  # a row each
    layout = BatchLayout(
        padding_free=options.data.padding_free,
        pack_length=ref.PACK if options.data.packing else None,
        length_multiple=length_multiple(options.build),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
    size = options.training.micro_batch_size
    length = None if options.data.padding_free else 40
    return [layout.batch(mine[i : i + size], loss_tokens, length) for i in range(0, len(mine), size)]


def plant(fault: str | None, model: Model) -> None:
    """A fault on purpose, which the comparison must see."""
    if fault == "leak":  # documents see the ones before them
        forward = model.forward
        model.forward = lambda chunk, inputs, output: forward(  # type: ignore[method-assign]
            chunk, replace(inputs, cu_seqlens=inputs.cu_seqlens[[0, -1]], max_seqlen=int(inputs.cu_seqlens[-1])), output
        )
    elif fault == "rope":
        for rope in model.ropes:
            rope.frequencies.zero_()
    elif fault == "norms":
        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                a, b = layer.input_layernorm.weight, layer.pre_mlp_layernorm.weight
                a.data, b.data = b.data.clone(), a.data.clone()
    elif fault == "scale":
        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                layer.self_attention.core_attention.softmax_scale = 0.2
    elif fault == "shard":  # one rank's columns out of place
        for chunk in model.chunks:
            for layer in chunk.decoder.layers:
                weight = layer.self_attention.linear_proj.weight
                weight.data = weight.data.roll(1, dims=1)
    elif fault == "infinite":  # on the last rank alone
        if dist.get_rank() == dist.get_world_size() - 1:
            seen = int(ref.samples(0)[-1][0][0][0])  # a token of this rank's
            model.chunks[0].embedding.word_embeddings.weight.data[seen] = torch.inf
    elif fault is not None:
        raise ValueError(fault)


def run(job: dict) -> dict:
    options = options_of(job)
    initialize(options.build, seed=7)
    model = open_model(job, options)
    plant(job.get("planted"), model)
    counts = count_parameters(model, read_config(Path(job["model"]))) if job.get("counts") else ()
    training = open_training(model, options, job.get("bucket_size"))
    before = [parameter.detach().clone() for chunk in model.chunks for parameter in chunk.parameters()]
    losses, norms, log_probs = [], [], []

    def loss(batch: Batch, values: torch.Tensor):
        kept = values[batch.loss_weights > 0] if job.get("log_probs") else values[:0]
        log_probs.extend(kept.flatten().tolist())
        return sft_loss(batch, values)

    for step in range(job.get("steps", ref.STEPS)):
        try:
            metrics, outcome = train_step(training, batches_of(step, options), loss, step)
            if not job.get("late"):
                norms.append(outcome.grad_norm)
        except NonFiniteError as error:
            after = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
            return {"stopped": str(error), "kept": all(torch.equal(*pair) for pair in zip(before, after, strict=True))}
        losses.append(sum_over_ranks(training.model.groups, metrics, ["loss"]).wait()[0])
    if job.get("unwatched"):
        batches = [batch.pin_memory() for batch in batches_of(step + 1, options)]
        torch.cuda.set_sync_debug_mode("error")
        train_step(training, batches, sft_loss, step + 1)
        torch.cuda.set_sync_debug_mode("default")
    if job.get("save"):
        from megaswift.bridge.checkpoint.save import save_weights

        destination = Path(job["save"])
        if dist.get_rank() == 0:
            destination.mkdir(parents=True)
        barrier()
        config = read_config(Path(job["model"]))
        with training.parameters_gathered():
            save_weights(
                model.chunks, config, Path(job["model"]), destination, dtype=torch.float32, max_shard_bytes=200_000
            )
    return {"losses": losses, "grad_norms": norms, "log_probs": log_probs, "counts": list(counts)}


def close() -> None:
    from megatron.core.tensor_parallel import random as parallel_random

    parallel_state.destroy_model_parallel()
    # megatron-core lets go of its groups without closing them: dozens of layouts would run out of file descriptors.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False


def main(run: Callable[[dict], dict]) -> None:
    """`run` every job of the file argv[1], and write what it returns, or an error, into the file argv[2]."""
    jobs, results = json.loads(Path(sys.argv[1]).read_text()), {}
    for job in jobs:
        try:
            results[job["name"]] = run(job)
        except Exception:
            results[job["name"]] = {"error": f"rank {dist.get_rank()}:\n{traceback.format_exc()}"}
        if "error" in results[job["name"]] and dist.get_world_size() > 1:
            # The other ranks wait in a collective: stop the launch here, with what the first to fail has.
            if not Path(sys.argv[2]).exists():
                Path(sys.argv[2]).write_text(json.dumps(results))
            os._exit(1)
        close()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run)
