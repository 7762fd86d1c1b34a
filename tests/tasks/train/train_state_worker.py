"""Runs that stop after two steps and go on in other processes, in the same layout or another.

    torchrun --nproc-per-node 2 -m tests.tasks.train.train_state_worker jobs.json results.json

jobs.json: [{"name", "model": folder, "options": {flag: value}, "lora": whether it has adapters, "bucket_size",
"folder": a new one for weights and state after two steps, "from": such a folder to go on from, "same": whether that was
the same layout, "planted": whether what is read is one row off}, ...].
results.json: {name: {"losses", "grad_norms"}}, of the third and fourth step.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megaswift.bridge.checkpoint import shard_regions
from megaswift.bridge.checkpoint.adapter_files import save_adapter
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.safetensors_io import TensorSpec, write_shard
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.train import train_state
from megaswift.tasks.train.step import TrainState, sft_loss, sum_over_ranks, train_step

from tests.bridge.lora import worker as with_adapters
from tests.layouts import worker

STEPS = 2


def run(job: dict[str, Any]) -> dict[str, Any]:
    options = worker.options_of(job)
    initialize(options.build, seed=7)
    source, folder = Path(job["model"]), Path(job["folder"])
    begun = Path(job["from"]) if job.get("from") else None
    config = read_config(source)
    if job.get("lora"):
        model = with_adapters.open_model(source, options, str(begun / "weights") if begun else None)
    else:
        model = worker.open_model(job | ({"model": str(begun / "weights")} if begun else {}), options)
    training = worker.open_training(model, options, job.get("bucket_size"))
    if begun:
        load(training, config, begun, same=job.get("same", False), planted=job.get("planted", False))
    else:
        train(training, range(STEPS), options)
    save(training, config, source, folder)
    return train(training, range(STEPS, 2 * STEPS), options)


def train(training: TrainState, steps: range, options: Any) -> dict[str, Any]:
    losses, norms = [], []
    for step in steps:
        metrics, outcome = train_step(training, worker.batches_of(step, options), sft_loss, step)
        norms.append(outcome.grad_norm)
        losses.append(sum_over_ranks(training.model.groups, metrics, ["loss"]).wait()[0])
    return {"losses": losses, "grad_norms": norms}


def save(training: TrainState, config: dict, source: Path, folder: Path) -> None:
    """Write folder/weights and folder/state."""
    if dist.get_rank() == 0:
        for each in ("weights", "state"):
            (folder / each).mkdir(parents=True)
    barrier()
    model = training.model
    with training.parameters_gathered():
        if model.lora:
            save_adapter(model.chunks, config, model.lora, folder / "weights", base=str(source))
        else:
            dtype = model.config.params_dtype
            save_weights(model.chunks, config, source, folder / "weights", dtype=dtype, max_shard_bytes=200_000)
    tensors = train_state.rank_tensors(training, config, optimizer=True, rng=True)
    forms = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_shard(folder / "state" / train_state.rank_file(dist.get_rank()), forms, tensors.items())
    if dist.get_rank() == 0:
        (folder / "numbers.json").write_text(json.dumps(train_state.optimizer_numbers(training)))
    barrier()


def load(training: TrainState, config: dict, folder: Path, *, same: bool, planted: bool) -> None:
    read = shard_regions._read
    if planted:
        shard_regions._read = lambda *place: read(*place).roll(1, 0)
    try:
        numbers = json.loads((folder / "numbers.json").read_text())
        train_state.load_optimizer(training, config, folder / "state", numbers, same_layout=same)
    finally:
        shard_regions._read = read
    if same:
        train_state.load_rng(folder / "state", dist.get_rank())


if __name__ == "__main__":
    worker.main(run)
