"""Multi-token prediction in the layouts of one number of processes: what test_prediction.py compares.

torchrun --nproc-per-node 2 -m tests.bridge.families.worker_prediction FOLDER
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.adapter_files import save_adapter
from megaswift.bridge.checkpoint.distributed import load_distributed, save_distributed
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.stream import stream_weights
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.model.trainable import count_parameters
from megaswift.bridge.option_groups import compose
from megaswift.bridge.options import BuildOptions, LoraOptions
from megaswift.tasks.options import SftOptions
from megaswift.tasks.train.optimizer import shards, wrap_for_data_parallelism
from megaswift.tasks.train.step import run_schedule, sft_loss, sum_over_ranks, train_step

from tests.bridge.families import CP, EP, LAYOUT, PP, RECOMPUTE_LAYERS, SP, TP, VPP, test_prediction, worker
from tests.layouts.worker import close, open_training

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
# "{m}": as many letters as there are layers.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "TP2 SP": {TP: 2, SP: True},
        "CP2": {CP: 2},
        "EP2": {EP: 2},
        "PP2": {PP: 2},
        "PP2 VPP2 recompute": {PP: 2, VPP: 2} | RECOMPUTE_LAYERS,
        "PP2 prediction apart": {PP: 2, LAYOUT: "Et|tt|t|{m}L"},
        "PP2 VPP2 ZeRO-1 overlapped": {PP: 2, VPP: 2} | OVERLAP,
    },
    4: {
        "TP2 SP PP2": {TP: 2, SP: True, PP: 2},
        "PP2 VPP2 CP2": {PP: 2, VPP: 2, CP: 2},
        "PP2 EP2": {PP: 2, EP: 2} | OVERLAP,
        "PP2 ZeRO-1 overlapped": {PP: 2} | OVERLAP,
    },
}


def compute(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Both losses, what a round trip changes, and the distances to reference.pt of gradients and after training."""
    expected = torch.load(folder / "reference.pt")
    layout = {"use_distributed_optimizer": False, "ddp_timeout": 120} | layout
    options = BuildOptions(**layout)
    model = worker.open_model(folder / "fp32", options, torch.float32)
    changed = worker.round_trip(model, folder / "fp32", torch.float32, max_shard_bytes=100_000)
    losses = []
    for packed in (True, False):
        with torch.no_grad():
            batches = worker.batches(options, packed=packed)
            metrics = run_schedule(model, model.chunks, batches, sft_loss, forward_only=True)
        names = ["loss", "mtp_loss"]
        losses.append(dict(zip(names, sum_over_ranks(model.groups, metrics, names).wait(), strict=True)))
    result: dict[str, Any] = {"packed": losses[0], "padded": losses[1]}
    result["parameters"] = count_parameters(model, read_config(folder / "fp32"))[1]
    result["changed"] = changed + through_other_forms(model, options, folder)
    if not options.use_distributed_optimizer:  # else each rank has a part of the sums
        result |= worker.distances_of_gradients(model, options, folder, expected["gradients"])
        result["adapters"] = adapters(folder, options, expected)
    result["training"] = train(folder, layout, expected)
    return {"gradients": 0.0, "worst gradient": "", "adapters": {}} | result


def through_other_forms(model: Model, options: BuildOptions, folder: Path) -> str:
    """Return what differs after megatron-core's format, and in the stream of weights to engines."""
    source, config = folder / "fp32", read_config(folder / "fp32")
    before, wrong = worker.tensors_of(source), []
    streamed = dict(stream_weights(model.chunks, config, source, dtype=torch.float32))
    wrong += [f"{name} of the stream" for name, tensor in streamed.items() if not torch.equal(tensor, before[name])]
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "mcore", ignore_errors=True)
        (folder / "mcore").mkdir()
    parallel.barrier()
    save_distributed(model.chunks, config, source, folder / "mcore", dtype=torch.float32, converted=True)
    read = build_model(config, options, torch.float32)
    with torch.no_grad():
        for tensor in collect_params(read.chunks).values():
            tensor.fill_(torch.nan)
    load_distributed(read.chunks, config, folder / "mcore")
    ours, theirs = collect_params(model.chunks), collect_params(read.chunks)
    wrong += [
        f"{key} of megatron-core's format" for key, tensor in ours.items() if not torch.equal(tensor, theirs[key])
    ]
    return ", ".join(wrong)


def train(folder: Path, layout: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and the largest distance of a weight afterwards."""
    settings = {
        "lr": test_prediction.LR,
        "lr_decay_style": "constant",
        "weight_decay": test_prediction.WEIGHT_DECAY,
        "adam_eps": test_prediction.EPS,
        "clip_grad": test_prediction.CLIP,
    }
    options = compose(SftOptions, **layout | settings)
    stale = stale_weights(folder, options) if options.build.use_distributed_optimizer else []
    model = worker.open_model(folder / "fp32", options.build, torch.float32)
    training = open_training(model, options, None)
    result: dict[str, Any] = {"losses": [], "mtp_losses": [], "norms": [], "stale": stale}
    for step in range(test_prediction.STEPS):
        metrics, outcome = train_step(training, worker.batches(options.build, packed=True), sft_loss, step)
        result["norms"].append(outcome.grad_norm)
        losses = sum_over_ranks(model.groups, metrics, ["loss", "mtp_loss"]).wait()
        for name, value in zip(("losses", "mtp_losses"), losses, strict=True):
            result[name].append(value)
    with training.parameters_gathered():
        saved = worker.save(model, folder / "fp32", folder / "trained", torch.float32, 100_000)
        embedding = next((chunk.embedding for chunk in model.chunks if hasattr(chunk, "embedding")), None)
        weights: list[Any] = [None] * model.groups.pp.size()
        weight = None if embedding is None else embedding.word_embeddings.weight.detach().clone()
        dist.all_gather_object(weights, weight, group=model.groups.pp)
    # One on the first stage, and its copy on the last.
    result["copies are equal"] = len(weights) == 1 or bool(torch.equal(weights[0], weights[-1]))
    distances = {
        name: ((saved[name] - tensor).abs().max() / tensor.abs().max()).item()
        for name, tensor in expected["trained"].items()
    }
    result["of"] = max(distances, key=lambda name: distances[name])
    return result | {"largest change": distances[result["of"]]}


def stale_weights(folder: Path, options: SftOptions) -> list[str]:
    """Return the weights of all ranks that are not their masters in bf16, after a step.

    Some models have weights in bf16 and in fp32 in a chunk, which are gathered together.
    """
    model = worker.open_model(folder / "fp32", options.build, torch.bfloat16)
    training = open_training(model, options, None)
    train_step(training, worker.batches(options.build, packed=True), sft_loss, 0)
    names = {id(parameter): name for chunk in model.chunks for name, parameter in chunk.named_parameters()}
    with training.parameters_gathered():
        stale = [
            names[id(shard.parameter)]
            for shard in shards(training.optimizer)
            if (master := shard.state.get("param")) is not None
            and not torch.equal(shard.parameter.flatten()[shard.start :][: len(master)], master.bfloat16())
        ]
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, stale)
    return [f"{name} of rank {rank}" for rank, own in enumerate(everyone) for name in own]


def adapters(folder: Path, options: BuildOptions, expected: dict[str, Any]) -> dict[str, float]:
    """Distances of the gradients of factors that are 0: they are the weight's times the other factor.

    The layers of multi-token prediction have no adapters.
    """
    model, config = worker.open_model(folder / "fp32", options, torch.float32), read_config(folder / "fp32")
    targets = ["all-linear"] + ["all-embedding"] * (not model.architecture.tied)
    flags = LoraOptions(lora_rank=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets)
    attach_adapters(model, config, LoraSettings.from_options(flags), seed=3)
    chunks = wrap_for_data_parallelism(model, options)
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    run_schedule(model, chunks, worker.batches(options, packed=True), sft_loss, forward_only=False)
    for name, parameter in (named for chunk in model.chunks for named in chunk.named_parameters()):
        assert not (name.startswith("mtp.") and parameter.requires_grad)
        if name.endswith("word_embeddings.adapter.lora_A" if "word_embeddings" in name else ".lora_B"):
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        (folder / "adapter").mkdir()
    parallel.barrier()
    save_adapter(model.chunks, config, model.lora, folder / "adapter", base="the base")  # type: ignore[arg-type]
    parallel.barrier()
    saved, gradients, scaling = worker.tensors_of(folder / "adapter"), expected["gradients"], 2.0
    module = "base_model.model." + expected["output"].removesuffix(".weight")
    pairs = {
        "linear": (
            saved[f"{module}.lora_B.weight"],
            scaling * gradients[expected["output"]] @ saved[f"{module}.lora_A.weight"].T,
        )
    }
    if not model.architecture.tied:
        module = "base_model.model.model.embed_tokens"
        factor = saved[f"{module}.lora_embedding_B"]
        wanted = scaling * (gradients["model.embed_tokens.weight"] @ factor).T
        pairs["embedding"] = saved[f"{module}.lora_embedding_A"], wanted
    return {name: ((got - wanted).abs().max() / wanted.abs().max()).item() for name, (got, wanted) in pairs.items()}


def main(folder: Path) -> None:
    results = {}
    flags = json.loads((folder / "flags.json").read_text())
    for name, layout in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        layout = {key: value.format(m="m" * flags["mtp_num_layers"]) if key == LAYOUT else value
                  for key, value in layout.items()}  # fmt: skip
        parallel.initialize(BuildOptions(ddp_timeout=120, **layout), seed=1)
        results[name] = compute(folder, layout | flags)
        close()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
