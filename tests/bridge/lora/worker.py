"""Adapters in many layouts, one launch per world size: what they begin as, learn and leave in files.

    torchrun --nproc-per-node 2 -m tests.bridge.lora.worker jobs.json results.json

jobs.json: [{"name", "model": folder, "options": {flag: value}, "folder": a new one, with what is saved in it,
"adapter": a folder to start from, unless "new" is true, "steps", "merges": how often all is saved, "planted": a fault,
"unwatched": whether there is one more step, in which the host must not wait for a GPU}, ...]. In "folder": adapter,
merged.
results.json: {name: {"losses", "grad_norms", "log_probs", "kernels": what ran, "base": whether the base's weights are
as they were, bit for bit, "alike": whether what tensor parallelism does not split is the same on every rank}}.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.adapter_files import load_adapter, save_adapter
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.layers import ExpertsAdapter
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import DTYPES, build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.options import SftOptions
from megaswift.tasks.train.step import TrainState, evaluate_step, sft_loss, sum_over_ranks, train_step
from megaswift.templates.batching.collator import Batch
from megatron.core import parallel_state
from torch import Tensor

from tests.layouts.reference import STEPS
from tests.layouts.worker import batches_of, main, open_training, options_of


def run(job: dict[str, Any]) -> dict[str, Any]:
    options = options_of(job)
    initialize(options.build, seed=7)
    source, folder = Path(job["model"]), Path(job["folder"])
    model = open_model(source, options, None if job.get("new") else job["adapter"])
    plant(job.get("planted"), model)
    training = open_training(model, options, bucket_size=None)
    before = copies(model)
    losses, norms = [], []
    for step in range(job.get("steps", STEPS)):
        metrics, outcome = train_step(training, batches_of(step, options), sft_loss, step)
        norms.append(outcome.grad_norm)
        losses.append(sum_over_ranks(training.model.groups, metrics, ["loss"]).wait()[0])
    log_probs = log_probs_of(training, options) if options.build.context_parallel_size == 1 else []
    with training.parameters_gathered():
        for _ in range(job.get("merges", 1)):
            save(model, source, folder)
    if job.get("unwatched"):
        batches = [batch.pin_memory() for batch in batches_of(0, options)]
        torch.cuda.set_sync_debug_mode("error")
        train_step(training, batches, sft_loss, 0)
        torch.cuda.set_sync_debug_mode("default")
    after = copies(model)
    base = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (base, alike(model)))
    kept, same = (all(answers) for answers in zip(*everyone, strict=True))
    found = {"losses": losses, "grad_norms": norms, "log_probs": log_probs, "kernels": str(model.kernels)}
    return found | {"base": kept, "alike": same}


def open_model(source: Path, options: SftOptions, adapter: str | None) -> Model:
    """The model of a folder with adapters: new ones, or those of another folder."""
    config = read_config(source)
    model = build_model(config, options.build, DTYPES[options.torch_dtype or "float32"], adapters=True)
    load_weights(model.chunks, config, source)
    attach_adapters(model, config, LoraSettings.from_options(options.lora), seed=5)
    if adapter:
        load_adapter(model.chunks, config, model.lora, adapter)
    return model


def plant(fault: str | None, model: Model) -> None:
    """A fault on purpose, which the comparison must see: in the adapters of attention or experts, or in biases."""
    for chunk in model.chunks if fault else ():
        if fault in ("doubled", "lost"):  # gradients of biases, as if build.py's heed_frozen were wrong
            times = {"doubled": 2, "lost": 0}[fault]
            for layer in chunk.decoder.layers:
                layer.self_attention.linear_qkv.bias.register_hook(lambda gradient, times=times: times * gradient)
        elif fault == "experts":  # each has its neighbour's A
            for module in chunk.modules():
                if isinstance(module, ExpertsAdapter):
                    module.lora_A.data = module.lora_A.data.roll(1, dims=0)
        else:
            _plant_in_attention(fault, chunk)


@torch.no_grad()
def _plant_in_attention(fault: str | None, chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        qkv, projection = layer.self_attention.linear_qkv.adapter, layer.self_attention.linear_proj.adapter
        if fault == "scaling":
            qkv.mask.mul_(1.5)
        elif fault == "swapped":  # the A of q, k and v
            qkv.lora_A.copy_(qkv.lora_A.roll(len(qkv.lora_A) // 3, dims=0))
        elif fault == "shard":  # columns out of place
            projection.lora_A.copy_(projection.lora_A.roll(1, dims=1))
        else:
            raise ValueError(fault)


def copies(model: Model) -> dict[Any, Tensor]:
    """Of the weights that are not trained."""
    trained = model.lora.plan.modules_to_save
    return {key: tensor.detach().clone() for key, tensor in collect_params(model.chunks).items() if key not in trained}


def alike(model: Model) -> bool:
    """Whether the ranks of this one's tensor-parallel group have the same where they ought to."""
    for key, tensor in collect_params(model.chunks, adapters=True).items():
        if model.lora.plan.entries[key].kind.dim is None and key.expert is None:
            group = parallel_state.get_tensor_model_parallel_group()
            others = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(others, tensor.detach().contiguous(), group=group)
            if not all(torch.equal(other, tensor) for other in others):
                return False
    return True


def log_probs_of(training: TrainState, options: SftOptions) -> list[float]:
    """Of the trained tokens of the step after the last, in the order of its samples. The same on every rank."""
    found: list[list[float]] = []

    def loss(batch: Batch, values: Tensor):
        found.append(values[batch.loss_weights > 0].tolist())
        return sft_loss(batch, values)

    evaluate_step(training, batches_of(STEPS, options), loss)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parallel_state.get_data_parallel_rank(), found))
    shares = {rank: samples for rank, samples in everyone if samples}  # not of stages before the last
    samples = [sample for several in zip(*(shares[rank] for rank in sorted(shares)), strict=True) for sample in several]
    return [value for sample in samples for value in sample]


def save(model: Model, source: Path, folder: Path) -> None:
    """Write folder/adapter and folder/merged, in place of those that are there."""
    adapter, merged = folder / "adapter", folder / "merged"
    if dist.get_rank() == 0:
        for each in (adapter, merged):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)
    barrier()
    config = read_config(source)
    save_adapter(model.chunks, config, model.lora, adapter, base=str(source))
    save_weights(model.chunks, config, source, merged, dtype=torch.float32, max_shard_bytes=10**6, merge=True)


if __name__ == "__main__":
    main(run)
