"""Loading and saving in TP2: what is read, what is written, and what a user is told where that fails.

torchrun --nproc-per-node 2 -m tests.bridge.checkpoint.round_trip_worker FOLDER

FOLDER has a model folder for each of models.MODELS. Rank 0 writes what it found to FOLDER/results.json. That weights
come back as they were, in every layout, is tested in tests/bridge/families.
"""

import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel, runtime
from megaswift.bridge.checkpoint import safetensors_io, save, writer
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from safetensors.torch import load_file, save_file

from tests.bridge.checkpoint.models import MODELS


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def build(source: Path, options: BuildOptions, dtype: torch.dtype):
    """A model whose every parameter comes from `source`: what loading leaves out stays NaN."""
    config = config_of(source)
    model = build_model(config, options, dtype)
    with torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    load_weights(model.chunks, config, source)
    return model


def saved(folder: Path, options: BuildOptions) -> None:
    """Each model as this layout saves it, in another dtype and in other shards than it came in."""
    for name in MODELS:
        chunks, destination = build(folder / name, options, torch.float32).chunks, folder / f"{name} saved"
        if dist.get_rank() == 0:
            destination.mkdir()
        dist.barrier()
        arguments = (chunks, config_of(folder / name), folder / name, destination)
        save.save_weights(*arguments, dtype=torch.bfloat16, max_shard_bytes=30_000)


def message_on_wrong_shape(folder: Path, options: BuildOptions) -> str:
    """What a user reads where a tensor has the transposed shape of the model's."""
    source, damaged = folder / "qwen2", folder / "damaged-shape"
    shutil.copytree(source, damaged, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = tensors_of(source)
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.2.mlp.down_proj.weight"].t().contiguous()
    save_file(tensors, damaged / "model.safetensors")
    return message(build, damaged, options, torch.float32)


def message_on_full_disk(folder: Path, options: BuildOptions) -> str:
    """What every rank raises where one of them cannot write: none is left waiting for another."""
    chunks = build(folder / "qwen2", options, torch.float32).chunks
    real = writer.write_shard

    def full(*arguments):
        if dist.get_rank() == 1:
            next(iter(arguments[-1]))  # the first tensor is written, then the disk is full
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    writer.write_shard = full
    source, destination = folder / "qwen2", folder / "full"
    destination.mkdir(exist_ok=True)
    arguments = (chunks, config_of(source), source, destination)
    answer = message(save.save_weights, *arguments, dtype=torch.float32, max_shard_bytes=50_000)
    writer.write_shard = real
    answers: list[Any] = [None, None]
    dist.all_gather_object(answers, answer)
    return answers[0] if answers[0] == answers[1] else f"the ranks differ: {answers}"


def message(function, *arguments, **keywords) -> str:
    try:
        function(*arguments, **keywords)
    except (ValueError, OSError) as error:
        return str(error)
    return "no error"


def share_read(folder: Path, options: BuildOptions) -> float:
    """The share of a model's bytes that this rank reads."""
    source, counted = folder / "qwen2", 0
    read, shortest = safetensors_io.read_runs, safetensors_io.MIN_SLICE

    def counting(*arguments):
        nonlocal counted
        tensor = read(*arguments)
        counted += tensor.nbytes
        return tensor

    safetensors_io.read_runs, safetensors_io.MIN_SLICE = counting, 0  # a tiny model's rows are all short
    build(source, options, torch.float32)
    safetensors_io.read_runs, safetensors_io.MIN_SLICE = read, shortest
    return counted / sum(tensor.nbytes for tensor in tensors_of(source).values())


def main(folder: Path) -> None:
    runtime.enable()
    options = BuildOptions(tensor_model_parallel_size=2)
    parallel.initialize(options, seed=1)
    results = {"share read": share_read(folder, options), "full disk": message_on_full_disk(folder, options)}
    saved(folder, options)
    if dist.get_rank() == 0:
        results["wrong shape"] = message_on_wrong_shape(folder, options)
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
