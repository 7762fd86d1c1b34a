"""Heads, embeddings and choices beside transformers', in the processes of many layouts.

    torchrun --nproc-per-node 2 -m tests.tasks.supervised.worker jobs.json results.json

jobs.json: [{"name", "folder": one that reference.make has filled, "layout": its flags, "kind": one of reference.KINDS,
"planted": a fault, "saved": a new folder for what is saved, "lora": whether it has adapters}, ...].
results.json: {name: {"outputs", "gradients": distances, relative to the largest, "worst": of the gradients, "alike":
whether every rank of the last stage had the same outputs}}.
"""

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.adapter_files import load_adapter, save_adapter
from megaswift.bridge.checkpoint.distributed import load_distributed, save_distributed
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.layers import pooling
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model, ModelInputs, OutputProcessor
from megaswift.bridge.model.outputs import Choices, DocumentScores, Embeddings, LogProbs
from megaswift.bridge.model.score_head import add_score_head
from megaswift.bridge.model.trainable import freeze_output
from megaswift.bridge.options import BuildOptions
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.train.optimizer import wrap_for_data_parallelism
from megaswift.tasks.train.step import run_schedule
from megaswift.templates.batching.collator import Batch, BatchLayout
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from safetensors.torch import load_file
from torch import Tensor

from tests.bridge.checkpoint.distributed_worker import fill, trained
from tests.bridge.families.reference import documents
from tests.layouts.worker import main
from tests.tasks.supervised import reference as ref

SEED = 11
LORA = LoraSettings(
    rank=3, alpha=6, dropout=0.0, bias="none", dtype=None, rslora=False, dora=False, targets=("all-linear",),
    regex=None, modules_to_save=(),
)  # fmt: skip


def run(job: dict[str, Any]) -> dict[str, Any]:
    options = BuildOptions(ddp_timeout=120, use_distributed_optimizer=False, **job["layout"])
    initialize(options, seed=1)
    folder, kind = Path(job["folder"]), job["kind"]
    source = folder / ("scored" if kind == "scores" else "causal")
    if job.get("saved"):
        return save_all(folder, Path(job["saved"]), options, lora=bool(job.get("lora")))
    model = open_model(source, read_config(source), options)
    if kind in ("last", "mean"):
        freeze_output(model)
    expected = torch.load(folder / "reference.pt")[kind]
    with planted(job.get("planted")):
        chunks = wrap_for_data_parallelism(model, options)
        outputs = step(model, chunks, kind, job.get("planted"), backward=True)
    found = {"outputs": 0.0, "alike": same_everywhere(outputs)}
    if outputs is not None:
        wanted = expected["outputs"][parallel_state.get_data_parallel_rank() * 3 :][: len(outputs)]
        found["outputs"] = ((outputs - wanted).abs().max() / expected["outputs"].abs().max()).item()
    with torch.no_grad():
        for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
            parameter.copy_(parameter.main_grad) if parameter.requires_grad else parameter.zero_()
    gradients = saved(model, read_config(source), source, folder / "gradients")
    distances = {
        name: ((gradients[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-4)).item()
        for name, wanted in expected["gradients"].items()
    }
    worst = max(distances, key=lambda name: distances[name])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found["outputs"], found["alike"]))
    furthest, alike = zip(*everyone, strict=True)
    return {"outputs": max(furthest), "alike": all(alike), "gradients": distances[worst], "worst": worst}


def open_model(source: Path, config: dict[str, Any], options: BuildOptions, *, adapters: bool = False) -> Model:
    """What loading leaves out is NaN."""
    model = build_model(config, options, torch.float32, adapters=adapters)
    blank(model)
    load_weights(model.chunks, config, source, seed=SEED)
    return model


@torch.no_grad()
def blank(model: Model) -> None:
    for tensor in collect_params(model.chunks).values():
        tensor.fill_(torch.nan)


def packs() -> list[Any]:
    """This rank's: one for each rank of data parallelism, or all. Every second label counts."""
    every = [[(ids, (np.arange(len(ids)) % 2).astype(np.float32)) for ids, _ in pack] for pack in documents()]
    return every[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]


def batch_of(pack: list[Any], *, filler: bool = False) -> Batch:
    cp_rank, cp_size = (
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_world_size(),
    )
    layout = BatchLayout(length_multiple=4, context_parallel_rank=cp_rank, context_parallel_size=cp_size)
    return layout.batch([[] if filler else pack], 1.0, 112)


def grouped(batch: Batch) -> dict[str, Any]:
    """What is said of a batch's documents, found place by place."""
    assert batch.cu_seqlens is not None
    index = list(range(batch.tokens.shape[1])) if batch.cp_index is None else batch.cp_index.tolist()
    bounds = batch.cu_seqlens.tolist()
    last = [start + length - 1 for start, length in zip(bounds, batch.lengths, strict=False)]
    spans = [sum(start <= place < end for place in index) for start, end in pairwise(bounds)]
    return {
        "ends": torch.tensor([index.index(place) if place in index else -1 for place in last], dtype=torch.int64),
        "spans": torch.tensor(spans),
        "segments": torch.arange(len(batch.lengths)),
        "lengths": batch.lengths,
    }


def output(kind: str, fault: str | None, batch: Batch) -> OutputProcessor:
    about = grouped(batch)
    if fault == "place":  # the token before
        about["ends"] = torch.where(about["ends"] > 0, about["ends"] - 1, about["ends"])
    elif fault == "document":
        about["ends"] = about["ends"].roll(1)
    elif fault == "padding":
        about["lengths"] = [length + 2 for length in about["lengths"]]
    if kind == "sums":
        return LogProbs()
    if kind == "scores":
        return DocumentScores(about["ends"])
    if kind == "choices":
        return Choices(about["ends"], ref.CHOICES)
    return Embeddings(kind, **about)  # pyright: ignore[reportArgumentType]


def forward(model: Model, kind: str, batch: Batch) -> Tensor:
    inputs = ModelInputs(batch.tokens, batch.position_ids, batch.cu_seqlens, batch.max_seqlen, batch.labels)
    return model.forward(model.chunks[0], inputs, output(kind, None, batch))


def step(model: Model, chunks: Any, kind: str, fault: str | None = None, *, backward: bool) -> Tensor | None:
    """This rank's documents' outputs, where it is of the last stage. Behind them come as many micro batches of none."""
    found: list[Tensor] = []
    world = parallel_state.get_data_parallel_world_size()
    batches = [batch_of(pack) for pack in packs()]
    batches += [batch_of([], filler=True) for _ in batches]
    count = sum(map(len, documents()))

    def loss(batch: Batch, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if kind == "sums":
            about = grouped(batch)
            sums = pooling.sum_documents(outputs * batch.loss_weights, about["spans"], about["segments"])
            outputs = sums.unsqueeze(1)
        at = 3 * (parallel_state.get_data_parallel_rank() + world * len(found))
        times = ref.coefficients(outputs.shape[1])[at : at + len(outputs)]
        found.append(outputs.detach())
        return (outputs * times).sum() / count / parallel_state.get_context_parallel_world_size(), {}

    if backward:
        for chunk in chunks:
            chunk.train()
            chunk.zero_grad_buffer()
    with torch.set_grad_enabled(backward):
        run_schedule(model, chunks, batches, loss, forward_only=not backward, output=partial(output, kind, fault))
    return torch.cat(found) if found else None


def same_everywhere(outputs: Tensor | None) -> bool:
    """Whether the ranks that have the same documents found the same, bit for bit."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parallel_state.get_data_parallel_rank(), outputs))
    there = [values for rank, values in everyone if rank == parallel_state.get_data_parallel_rank()]
    there = [values for values in there if values is not None]
    return bool(there) and all(torch.equal(values, there[0]) for values in there)


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Faults in what is summed over ranks."""
    if fault == "share":  # gradients of context-parallel ranks are not summed
        alone = mock.patch.object(pooling.differentiable, "all_reduce", summed_forwards)
    elif fault == "twice":  # those of tensor-parallel ranks are
        alone = mock.patch.object(pooling, "reduce_from_tensor_model_parallel_region", summed_both_ways)
    else:
        alone = contextlib.nullcontext()
    with alone:
        yield


def summed_forwards(values: Tensor, group: Any) -> Tensor:
    whole = values.detach().clone()
    dist.all_reduce(whole, group=group)
    return values + (whole - values.detach())


def summed_both_ways(values: Tensor, group: Any) -> Tensor:
    gathered = gather_from_sequence_parallel_region(values[None], tensor_parallel_output_grad=True, group=group)
    return gathered.sum(0)


def saved(model: Model, config: dict[str, Any], source: Path, destination: Path, **settings: Any) -> dict[str, Tensor]:
    """The tensors that were saved, on every rank."""
    fresh(destination)
    save_weights(model.chunks, config, source, destination, dtype=torch.float32, max_shard_bytes=30_000, **settings)
    tensors = {name: tensor for file in destination.glob("*.safetensors") for name, tensor in load_file(file).items()}
    barrier()
    return tensors


def fresh(folder: Path) -> Path:
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    barrier()
    return folder


def save_all(folder: Path, destination: Path, options: BuildOptions, *, lora: bool) -> dict[str, Any]:
    """Into `destination`: scored, made of a model with a head; begun, of one without; both by way of megatron-core's
    format too, in mcore-...; with `lora`, an adapter beside a new head, and merged. Returns what our scores are."""
    config = read_config(folder / "causal")
    headed = add_score_head(config, ref.LABELS, "single_label_classification")
    if lora:
        return save_adapted(folder, destination, options, headed)
    made = {"scored": (folder / "scored", read_config(folder / "scored")), "begun": (folder / "causal", headed)}
    outputs = {}
    for name, (source, of) in made.items():
        model = open_model(source, of, options)
        outputs[name] = step(model, model.chunks, "scores", backward=False)
        saved(model, of, source, destination / name)
        save_distributed(model.chunks, of, source, fresh(destination / f"mcore-{name}"), dtype=torch.float32)
    causal = open_model(folder / "causal", config, options)
    save_distributed(causal.chunks, config, folder / "causal", fresh(destination / "mcore"), dtype=torch.float32)
    wanted = {}
    for name, of, there in (
        ("scored", made["scored"][1], "mcore-scored"),
        ("begun", headed, "mcore-begun"),
        ("begun", headed, "mcore"),
    ):
        model = build_model(of, options, torch.float32)
        blank(model)
        load_distributed(model.chunks, of, destination / there, seed=SEED)
        outputs[there] = step(model, model.chunks, "scores", backward=False)
        wanted[there] = outputs[name]
    same = all(
        outputs[there] is None or torch.equal(outputs[there], values)  # pyright: ignore[reportArgumentType]
        for there, values in wanted.items()
    )
    return {"alike": same} | {name: [] if found is None else found.tolist() for name, found in told(outputs).items()}


def save_adapted(folder: Path, destination: Path, options: BuildOptions, config: dict[str, Any]) -> dict[str, Any]:
    source = folder / "causal"
    model = open_model(source, config, options, adapters=True)
    attach_adapters(model, config, LORA, seed=SEED)
    fill(model)
    for tensor in trained(model).values():
        tensor.data.mul_(0.1)
    outputs = {"scores": step(model, model.chunks, "scores", backward=False)}
    adapter = fresh(destination / "adapter")
    save_adapter(model.chunks, config, model.lora, adapter, base=str(source))
    saved(model, config, source, destination / "merged", merge=True)
    again = open_model(source, config, options, adapters=True)
    attach_adapters(again, config, LORA, seed=SEED + 1)
    for tensor in trained(again).values():
        tensor.data.fill_(torch.nan)
    load_adapter(again.chunks, config, again.lora, adapter)
    outputs["again"] = step(again, again.chunks, "scores", backward=False)
    here = outputs["scores"]
    same = here is None or torch.equal(here, outputs["again"])  # pyright: ignore[reportArgumentType]
    return {"alike": same} | {name: found.tolist() for name, found in told(outputs).items() if found is not None}


def told(outputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Those of the last stage, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outputs)
    return everyone[-1]


if __name__ == "__main__":
    main(run)
