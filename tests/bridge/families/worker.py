"""Our model beside transformers', in the processes of one layout. Under torchrun: every job of one number of processes.

    torchrun --nproc-per-node 2 -m tests.bridge.families.worker jobs.json results.json

jobs.json: [{"name", "folder": one that reference.make has filled, "layout": its flags, "rounded": in bf16}, ...], in
the order of layouts.
results.json is written after each job. Where a job fails in a process the launch ends, since the others may be waiting
for it: whoever launched starts the rest again.
"""

import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model import build as builder
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import LastStage, Model
from megaswift.bridge.model.outputs import LogProbs
from megaswift.bridge.options import BuildOptions
from megaswift.tasks.train.optimizer import wrap_for_data_parallelism
from megaswift.tasks.train.step import run_schedule, sft_loss
from megaswift.templates.batching.collator import Batch, BatchLayout
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bridge.families import faults, reference
from tests.layouts.worker import close

SMALLEST_GRADIENT = 1e-6  # of the largest of all: less is rounding


def options_of(layout: dict[str, Any]) -> BuildOptions:
    return BuildOptions(use_distributed_optimizer=False, ddp_timeout=120, **layout)


def check(folder: Path, options: BuildOptions) -> dict[str, Any]:
    """How far a tiny model is from its reference in the layout that is set up, and what a round trip changes.

    To be called by every rank; the answer is the same on all. Distances are relative, see `distance`.
    """
    expected = torch.load(folder / "reference.pt")
    model = open_model(folder / "fp32", options, torch.float32)
    found: dict[str, Any] = {
        "packed": distance(model, options, expected["log_probs"], packed=True),
        "padded": distance(model, options, expected["log_probs"], packed=False),
    }
    found["fp32"] = round_trip(model, folder / "fp32", torch.float32, max_shard_bytes=10**9)
    other = open_model(folder / "bf16", options, torch.bfloat16)
    found["bf16"] = round_trip(other, folder / "bf16", torch.bfloat16, max_shard_bytes=30_000)
    found |= distances_of_gradients(model, options, folder, expected["gradients"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    largest = {name: torch.tensor([one[name] for one in everyone]).max().item() for name in ("packed", "padded")}
    return everyone[0] | largest


def check_rounded(folder: Path, options: BuildOptions) -> dict[str, Any]:
    """The same in bf16, by the mean difference of the log-probabilities. For GPUs, whose kernels are for bf16."""
    expected = torch.load(folder / "reference.pt")
    model = open_model(folder / "fp32", options, torch.bfloat16)
    found: dict[str, Any] = {
        name: distance(model, options, expected["log_probs"], packed=name == "packed", of=torch.mean)
        for name in ("packed", "padded")
    }
    found["kernels"] = str(model.kernels)
    found |= distances_of_gradients(model, options, folder, expected["gradients"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    largest = {name: max(one[name] for one in everyone) for name in ("packed", "padded")}
    return everyone[0] | largest


def check_faults(folder: Path, options: BuildOptions, planted: dict[str, Any]) -> dict[str, float]:
    """How far each fault takes the model from its reference. `planted` adds to what faults.of finds, or takes away."""
    expected = torch.load(folder / "reference.pt")["log_probs"]
    source, config = folder / "fp32", read_config(folder / "fp32")
    tensors = load_file(source / "model.safetensors")
    about = builder.family_of(config).describe(config)
    found, plain = {}, None
    for name, fault in (faults.of(tensors, about) | planted).items():
        if fault is None:
            continue
        damaged = source
        if fault.tensors:
            damaged = folder / "damaged"
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(source, damaged, ignore=shutil.ignore_patterns("*.safetensors"))
            save_file(fault.tensors(dict(tensors)), damaged / "model.safetensors")
        if fault.architecture or fault.model:
            model = open_model(damaged, options, torch.float32, fault.architecture)
            if fault.model:
                fault.model(model)
        elif plain is None:
            model = plain = open_model(damaged, options, torch.float32)
        else:
            model = fill(plain, config, damaged)
        # A few labels see what all do: each depends on all logits.
        found[name] = distance(model, options, expected, packed=True, every=4)
    return found


def open_model(source: Path, options: BuildOptions, dtype: torch.dtype, change: Callable | None = None) -> Model:
    """The model of `source`, as `fill` has it. `change` is made to what its family describes."""
    config = read_config(source)
    family = builder.family_of(config)
    described = family.architecture
    if change:
        family = replace(family, architecture=lambda config: change(described(config)))
    with mock.patch.object(builder, "family_of", return_value=family):
        model = build_model(config, options, dtype)
    return fill(model, config, source)


def fill(model: Model, config: dict[str, Any], source: Path) -> Model:
    """The model with the weights of `source`: what loading leaves out is NaN."""
    with torch.no_grad():
        for tensor in collect_params(model.chunks).values():
            tensor.fill_(torch.nan)
    load_weights(model.chunks, config, source)
    return model


def batches(options: BuildOptions, *, packed: bool, places: bool = False) -> list[Batch]:
    """This rank's micro batches. With `places`, a token is its number among all documents' tokens, from 1 on."""
    packs, number = reference.documents(), 1
    loss_tokens = float(sum(weights[1:].sum() for pack in packs for _, weights in pack))
    if places:
        for pack in packs:
            for at, (ids, weights) in enumerate(pack):
                pack[at] = (np.arange(number, number + len(ids)), weights)
                number += len(ids)
    mine = packs[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    samples = mine if packed else [[document] for pack in mine for document in pack]
    samples = samples or [[]]  # more ranks than packs: one of padding
    layout = BatchLayout(
        padding_free=packed,
        pack_length=reference.PACK if packed else None,
        length_multiple=options.tensor_model_parallel_size if options.sequence_parallel else 1,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
    rows, length = (1, None) if packed else (3, reference.LONGEST)
    return [layout.batch(samples[i : i + rows], loss_tokens, length) for i in range(0, len(samples), rows)]


@torch.no_grad()
def distance(
    model: Model,
    options: BuildOptions,
    expected: Tensor,
    *,
    packed: bool,
    of: Callable[[Tensor], Tensor] = torch.max,
    every: int = 1,
) -> float:
    """The largest difference of a log-probability to transformers' on this rank (or that `of` them), over their
    standard deviation. Of `every` label of LABELS, the first is taken."""
    remaining = iter(batches(options, packed=packed, places=True))
    wanted = range(model.architecture.vocab_size)[reference.LABELS][::every]
    expected = expected[:, ::every]
    differences = [torch.zeros(1)]

    def every_label(stage: LastStage) -> Tensor:
        """[sequence, rows, hidden_size] -> [rows, local length, LABELS]: through our own head, a row for each label."""
        rows, length = stage.inputs.tokens.shape
        labels = torch.tensor(wanted, device=stage.inputs.tokens.device).repeat(rows)[:, None].expand(-1, length)
        hidden = stage.hidden_states.repeat_interleave(len(wanted), dim=1)
        inputs = replace(stage.inputs, labels=labels, loss_weights=None)
        values = LogProbs()(replace(stage, inputs=inputs, hidden_states=hidden))
        return values.view(rows, len(wanted), length).mT

    def compare(_: Batch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        places = next(remaining).tokens.flatten()  # 0: padding
        here = places > 0
        if here.any():
            differences.append((log_probs.flatten(0, 1).cpu()[here] - expected[places[here] - 1]).abs().flatten())
        return log_probs.sum(), {}

    for chunk in model.chunks:
        chunk.eval()
    everywhere = mock.patch("megaswift.tasks.train.step.loss_positions", return_value=None)
    with everywhere:
        run_schedule(
            model,
            model.chunks,  # type: ignore[arg-type]
            batches(options, packed=packed),
            compare,
            forward_only=True,
            output=lambda batch: every_label,
        )
    return (of(torch.cat(differences)) / expected.std()).item()


def round_trip(model: Model, source: Path, dtype: torch.dtype, *, max_shard_bytes: int) -> str:
    """What differs between the files of `source` and what is saved of its model; empty where nothing does."""
    saved = save(model, source, source.parent / "saved", dtype, max_shard_bytes)
    before = tensors_of(source)
    if before.keys() != saved.keys():
        return f"names differ: {sorted(before.keys() ^ saved.keys())}"
    return ", ".join(
        f"{name} ({saved[name].dtype})"
        for name, tensor in before.items()
        if tensor.dtype != saved[name].dtype or not torch.equal(tensor, saved[name])
    )


def distances_of_gradients(
    model: Model, options: BuildOptions, folder: Path, expected: dict[str, Tensor]
) -> dict[str, Any]:
    """One step's gradients, put in the place of the weights and saved like them, beside transformers'."""
    chunks = wrap_for_data_parallelism(model, options)
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    run_schedule(model, chunks, batches(options, packed=True), sft_loss, forward_only=False)
    with torch.no_grad():
        for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
            parameter.copy_(parameter.main_grad if parameter.requires_grad else 0 * parameter)
    found = save(model, folder / "fp32", folder / "gradients", torch.float32, 10**9)
    differences = {name: (found[name] - gradient).abs().max().item() for name, gradient in expected.items()}
    sizes = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    # A gradient that is nothing but rounding (the router's, where the only expert weighs 1) has no relative difference.
    largest = max(sizes.values())
    scales = {name: size if size > SMALLEST_GRADIENT * largest else largest for name, size in sizes.items()}
    relative = {name: differences[name] / scales[name] for name in expected}
    worst = max(relative, key=lambda name: math.inf if math.isnan(relative[name]) else relative[name])
    whole = torch.cat([(found[name] - gradient).flatten() for name, gradient in expected.items()]).norm()
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    return {"gradients": relative[worst], "worst gradient": worst, "gradient as a whole": (whole / norm).item()}


def save(model: Model, source: Path, destination: Path, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, Tensor]:
    """The tensors that were saved, by name, on every rank."""
    if dist.get_rank() == 0:
        shutil.rmtree(destination, ignore_errors=True)
        destination.mkdir()
    parallel.barrier()
    config = read_config(source)
    with mock.patch.object(os, "fsync", return_value=None):  # no crash has to find these files
        save_weights(model.chunks, config, source, destination, dtype=dtype, max_shard_bytes=max_shard_bytes)
    tensors = tensors_of(destination)
    parallel.barrier()
    return tensors


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def main(jobs: list[dict[str, Any]], results: Path) -> None:
    done, layout = {}, None
    for job in jobs:
        try:
            options = options_of(job["layout"])
            if job["layout"] != layout:
                if layout is not None:
                    close()
                parallel.initialize(options, seed=1)
                layout = job["layout"]
            examine = check_rounded if job.get("rounded") else check
            done[job["name"]] = examine(Path(job["folder"]), options)
        except Exception:
            done[job["name"]] = {"error": f"rank {dist.get_rank()}:\n{traceback.format_exc()}"}
            results.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(done))
            os._exit(1)
        if dist.get_rank() == 0:
            results.write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
