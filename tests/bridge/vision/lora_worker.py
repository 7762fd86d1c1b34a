"""Adapters of a vision-language model, with random values: its loss, and the adapter in PEFT's format.

    torchrun --nproc-per-node 2 -m tests.bridge.vision.lora_worker FOLDER JSON

FOLDER: one that reference.make has filled; the adapter goes into its subfolder `adapter`. JSON: {"layout": its flags,
"vision": options of the vision tower, "settings": of LoraOptions, "whole": names of fully trained modules}. Writes
FOLDER/loss.json.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.adapter_files import load_adapter, read_settings, save_adapter
from megaswift.bridge.checkpoint.hub import read_adapter_config, read_config
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.model import Model
from megaswift.bridge.options import BuildOptions, LoraOptions, VisionOptions
from megaswift.tasks.train.step import run_schedule, sft_loss

from tests.bridge.vision.worker import batches, open_model


def main(folder: Path, job: dict) -> None:
    options = BuildOptions(use_distributed_optimizer=False, ddp_timeout=120, **job["layout"])
    parallel.initialize(options, seed=1)
    config = read_config(folder / "fp32")
    packs = torch.load(folder / "reference.pt", weights_only=False)["packs"]
    settings = LoraSettings.from_options(LoraOptions(lora_dropout=0.0, lora_rank=4, **job.get("settings", {})))
    settings = replace(settings, modules_to_save=tuple(job.get("whole", ())))
    model = open_model(folder / "fp32", options)
    attach_adapters(model, config, settings, seed=0, vision=VisionOptions(**job["vision"]))
    assert model.lora is not None
    torch.manual_seed(2)
    with torch.no_grad():  # of whole tensors: the same values in every layout
        for key, tensor in collect_params(model.parts, adapters=True).items():
            if not key.name.endswith("lora_A"):
                tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(str(key))))
        for key, tensor in collect_params(model.parts).items():
            if key in model.lora.plan.modules_to_save:
                tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(str(key))))
    adapter = folder / "adapter"
    if dist.get_rank() == 0:
        shutil.rmtree(adapter, ignore_errors=True)
        adapter.mkdir()
    parallel.barrier()
    save_adapter(model.parts, config, model.lora, adapter, base=str(folder / "fp32"))
    parallel.barrier()
    other = open_model(folder / "fp32", options)
    attach_adapters(other, config, read_settings(adapter, read_adapter_config(adapter)), seed=0)
    load_adapter(other.parts, config, other.lora, adapter)
    losses = [loss(each, packs, options) for each in (model, other)]
    if dist.get_rank() == 0:
        (folder / "loss.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


@torch.no_grad()
def loss(model: Model, packs: list, options: BuildOptions) -> float:
    """The mean loss of all documents."""
    for part in model.parts:
        part.eval()
    metrics = run_schedule(model, model.chunks, batches(packs, options), sft_loss, forward_only=True)
    total = metrics["loss"].clone()
    dist.all_reduce(total)
    return total.item() / options.tensor_model_parallel_size


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
