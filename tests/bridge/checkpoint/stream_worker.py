"""What stream_weights, stream_adapter and DirectWeights give in many layouts: one launch for all.

    torchrun --nproc-per-node 2 -m tests.bridge.checkpoint.stream_worker jobs.json results.json

jobs.json: [{"name", "model": folder, "options": {flag: value}, "dtype", "lora": whether there are adapters, "folder":
a new one, for what is saved, "planted": a fault}, ...]. results.json: {name: a list of what is wrong, for rank 0 and
the last rank}.
"""

from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint import save, stream
from megaswift.bridge.checkpoint.adapter_files import save_adapter
from megaswift.bridge.checkpoint.direct_weights import DirectWeights
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.checkpoint.stream import stream_adapter, stream_weights
from megaswift.bridge.checkpoint.strided_copy import StridedCopy, WeightLayout
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import DTYPES, build_model
from megaswift.bridge.parallel import barrier, initialize
from safetensors.torch import load_file

from tests.layouts.worker import main, options_of

FEW = 20_000  # bytes of a bucket: many, and tensors that are larger than one


def run(job: dict[str, Any]) -> dict[str, Any]:
    options = options_of(job)
    initialize(options.build, seed=3)
    source, dtype = Path(job["model"]), DTYPES[job.get("dtype", "float32")]
    config, lora = read_config(source), bool(job.get("lora"))
    model = build_model(config, options.build, torch.float32, adapters=lora)
    load_weights(model.chunks, config, source)
    if lora:
        attach_adapters(model, config, LoraSettings.from_options(options.lora), seed=5)
        with torch.no_grad():
            for tensor in collect_params(model.chunks, adapters=True).values():  # B begins as zeros
                tensor += 0.1
    before = {key: tensor.clone() for key, tensor in collect_params(model.chunks).items()}
    expected, wrong = tensors_of(source), []
    if lora:
        expected = saved(model, config, source, Path(job["folder"]))
        found = dict(stream_adapter(model.chunks, config, model.lora, bucket_bytes=FEW))
        wrong += differences(found, tensors_of(Path(job["folder"]) / "adapter"), None)
    planted_fault = job.get("planted")
    with planted(planted_fault), mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        found = list(stream_weights(model.chunks, config, source, dtype=dtype, merge=lora, bucket_bytes=FEW))
    wrong += differences(dict(found), expected, dtype)
    wrong += (
        differences(direct(model, config, source, dtype, dict(found)), dict(found), None) if not planted_fault else []
    )
    wrong += ["a name came twice"] * (len(found) != len(dict(found)))
    layers = [name.split(".")[2] for name, _ in found if ".experts." in name]
    arrivals = [layer for layer, _ in groupby(layers)]
    wrong += [f"the experts of layer {layer} come in pieces" for layer in arrivals if arrivals.count(layer) > 1]
    after = collect_params(model.chunks)
    wrong += [f"{key} has changed" for key, tensor in before.items() if not torch.equal(tensor, after[key])]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (wrong, [name for name, _ in found]))
    orders = {tuple(names) for _, names in everyone}
    wrong = [what for all_wrong, _ in everyone for what in all_wrong]
    return {"wrong": wrong, "orders": len(orders), "broadcasts": broadcast.call_count}


def direct(
    model, config, source: Path, dtype: torch.dtype, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors that are copied directly to an engine of two halves, which differ between ranks.

    Each half has the rows, or on the last rank the columns, of all tensors with a dimension.
    """
    dim = -1 if dist.get_rank() == dist.get_world_size() - 1 else 0
    halves: dict[str, list[torch.Tensor]] = {}
    copies: dict[str, list[tuple[str, StridedCopy]]] = {}
    targets: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = tensor.chunk(2, dim) if tensor.dim() else (tensor,)
        halves[name] = [torch.full_like(part, torch.nan).contiguous() for part in parts]
        for number, (part, half) in enumerate(zip(parts, halves[name], strict=True)):
            offset = part.storage_offset() - tensor.storage_offset()
            copy = StridedCopy(tuple(part.shape), offset, part.stride(), 0, half.stride())
            targets[f"{name} {number}"] = half
            copies.setdefault(name, []).append((f"{name} {number}", copy))
    layout = WeightLayout(targets, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, copies)
    weights = DirectWeights(
        model.chunks, config, source, layout, dtype=dtype, merge=model.lora is not None, bucket_bytes=FEW
    )
    for _ in range(2):  # the plan serves each sync
        for target in targets.values():
            target.fill_(torch.nan)
        for from_source, blocks in weights.sources():
            for name, copy in blocks:
                copy.target_view(targets[name]).copy_(copy.source_view(from_source))
    return {name: torch.cat(parts, dim) if tensors[name].dim() else parts[0] for name, parts in halves.items()}


def saved(model, config, source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The merged model as save_weights writes it, the adapter beside it."""
    if dist.get_rank() == 0:
        for name in ("merged", "adapter"):
            (folder / name).mkdir(parents=True)
    barrier()
    save_weights(
        model.chunks, config, source, folder / "merged", dtype=torch.float32, max_shard_bytes=10**6, merge=True
    )
    save_adapter(model.chunks, config, model.lora, folder / "adapter", base=str(source))
    return tensors_of(folder / "merged")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def differences(found: dict, expected: dict, dtype: torch.dtype | None) -> list[str]:
    if found.keys() != expected.keys():
        return [f"other names: {sorted(found.keys() ^ expected.keys())[:5]}"]
    wanted = {name: tensor.to(dtype or tensor.dtype) for name, tensor in expected.items()}
    return [
        f"{name} differs"
        for name, tensor in found.items()
        if tensor.dtype != wanted[name].dtype or not torch.equal(tensor, wanted[name])
    ]


def planted(fault: str | None):
    """A fault that the comparison must see: shards in the wrong order, or a tensor of each bucket left out."""
    if fault == "shards":
        gather = save._gather
        return mock.patch.object(save, "_gather", lambda *arguments: gather(*arguments)[::-1])
    if fault == "first":
        send = stream._send
        return mock.patch.object(stream, "_send", lambda bucket: send(bucket._replace(jobs=bucket.jobs[1:])))
    return nullcontext()


if __name__ == "__main__":
    main(run)
