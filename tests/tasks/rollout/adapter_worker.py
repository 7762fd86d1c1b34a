"""Adapters alone to vLLM in the processes of a trainer, run by .venv-vllm's Python under its torchrun.

    torchrun --nproc-per-node 2 -m tests.tasks.rollout.adapter_worker job.json results.json

job.json: {"model": folder, "options": {flag: value}, "lora": {flag: value}, "ranks": of an engine}. results.json:
{what: what each rank found}.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.checkpoint.stream import stream_adapter, stream_weights
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.options import BuildOptions, LoraOptions
from megaswift.bridge.parallel import initialize
from megaswift.tasks.options.rollout import EngineOptions
from megaswift.tasks.rollout.engine import Sampling
from megaswift.tasks.rollout.vllm_engine import VllmEngine
from megaswift.tasks.rollout.weight_sync import BaseWeightsCheck, scaled, sync

from tests.tasks.rollout.vllm_worker import FILTERED, distance, greedy_is_transformers, requests


def run(job: dict[str, Any], place: Path) -> dict[str, Any]:
    options, folder = BuildOptions(**job["options"]), Path(job["model"])
    initialize(options, seed=3)
    config = read_config(folder)
    model = build_model(config, options, torch.float32, adapters=True)
    load_weights(model.chunks, config, folder)
    attach_adapters(model, config, LoraSettings.from_options(LoraOptions(**job["lora"])), seed=1)
    settings = EngineOptions(
        vllm_max_model_len=128, vllm_max_num_seqs=8, vllm_tensor_parallel_size=job["ranks"], vllm_enable_lora=True
    )
    engine = VllmEngine(folder, settings, dtype=torch.float32, adapter_rank=job["lora"]["lora_rank"])
    engine.eos_ids = set()  # by chance any token would come
    asked = requests(dist.get_rank() // job["ranks"])
    found: dict[str, Any] = {name: [] for name in ("greedy", "log_probs", "bytes", "compared")}
    beneath = sync(
        BaseWeightsCheck(engine),
        stream_weights(model.chunks, config, folder, dtype=torch.float32),
        dtype=torch.float32,
        compare=10_000,
    )  # type: ignore[arg-type]
    found["beneath"], found["whole"] = beneath.compared, beneath.bytes
    for seed in (7, 8):  # the second adapter takes the first one's place
        randomise(model, seed)
        done = sync(engine, adapter_weights(model, config), dtype=torch.float32, compare=10_000)
        found["bytes"].append(done.bytes)
        found["compared"].append(done.compared)
        merged = place / f"merged-{seed}"
        merged.mkdir(exist_ok=True)
        save_weights(model.chunks, config, folder, merged, merge=True, dtype=torch.float32, max_shard_bytes=10**9)
        found["greedy"].append(greedy_is_transformers(engine, asked, merged))
        found["log_probs"].append(
            max(distance(engine, asked, merged, FILTERED), distance(engine, asked, merged, Sampling()))
        )
    found["spoilt"] = spoilt(engine, model, config, folder)
    found["homeless"] = refused(engine, "model.norm", 4)
    found["high"] = refused(engine, "model.layers.0.self_attn.q_proj", 9)
    engine.close()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: [one[name] for one in everyone] for name in found}


def randomise(model: Model, seed: int) -> None:
    """Adapters that change what is said, alike in every layout whose ranks hold them whole; ranks that hold the same
    give the same."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in model.chunks:
            for name, parameter in chunk.named_parameters():
                if ".adapter." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def adapter_weights(model: Model, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    assert model.lora is not None
    return scaled(stream_adapter(model.chunks, config, model.lora), model.lora.settings.scaling, torch.float32)


def spoilt(engine: VllmEngine, model: Model, config: dict[str, Any], folder: Path) -> str:
    """Return the errors for a changed adapter, and for changed base weights."""

    class Spoilt:
        checksums = engine.checksums

        def update(self, weights: Any) -> None:
            engine.update((name, tensor + 1 if "lora_B" in name else tensor) for name, tensor in weights)

    try:
        sync(
            Spoilt(),
            adapter_weights(model, config),
            dtype=torch.float32,
            compare=10_000,
        )  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return ""


def refused(engine: VllmEngine, module: str, rank: int) -> str:
    """Return the error for an adapter of a module."""
    name, size = f"base_model.model.{module}", 64
    try:
        engine.update(
            [(f"{name}.lora_A.weight", torch.ones(rank, size)), (f"{name}.lora_B.weight", torch.ones(size, rank))]
        )
    except ValueError as error:
        return str(error)
    return ""


def main(job: Path, results: Path) -> None:
    found = run(json.loads(job.read_text()), results.parent)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
