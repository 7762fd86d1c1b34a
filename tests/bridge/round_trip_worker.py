"""HF -> megatron-core -> HF in one process group, in every layout of its size: `torchrun round_trip_worker.py FOLDER`.

FOLDER holds a model folder for each of tiny_models.MODELS. Rank 0 writes FOLDER/results-SIZE.json: layout and model to
the problem found, or null.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel, runtime
from megaswift.bridge.build import build_model
from megaswift.bridge.load import load_weights
from megaswift.bridge.options import KernelOptions, MoEOptions, ParallelOptions, RecomputeOptions
from megaswift.bridge.save import save_weights
from megatron.core import parallel_state
from safetensors.torch import load_file
from tiny_models import MODELS, config_of

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [
        {},
        {TP: 2},
        {CP: 2},
        {PP: 2},
        {PP: 2, VPP: 2},
        {PP: 2, "decoder_first_pipeline_num_layers": 3},
        {EP: 2},
        {TP: 2, ETP: 2},
    ],
    4: [
        {TP: 4, ETP: 4},
        {TP: 2, ETP: 2},
        {TP: 2, PP: 2},
        {TP: 2, PP: 2, VPP: 2},
        {PP: 4},
        {EP: 4},
        {EP: 2, PP: 2},
        {TP: 2, EP: 2},
        {TP: 2, EP: 2, ETP: 2},
    ],
}


@dataclass
class Options(ParallelOptions, RecomputeOptions, MoEOptions, KernelOptions):
    pass


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def round_trip(
    source: Path, destination: Path, options: Options, dtype: torch.dtype, max_shard_bytes: int
) -> str | None:
    """What differs between a model folder and what becomes of it; None where nothing does."""
    config = config_of(source)
    chunks = build_model(config, options, dtype).chunks
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    load_weights(chunks, config, source)
    if dist.get_rank() == 0:
        destination.mkdir()
    dist.barrier()
    save_weights(chunks, config, source, destination, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if dist.get_rank() != 0:
        return None
    before, after = tensors_of(source), tensors_of(destination)
    before = {name: tensor.to(dtype) for name, tensor in before.items()}
    if before.keys() != after.keys():
        return f"names differ: {sorted(before.keys() ^ after.keys())}"
    unequal = [name for name in before if not torch.equal(before[name], after[name])]
    return f"values differ: {unequal}" if unequal else None


def main(folder: Path) -> None:
    runtime.enable()
    world = int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {}
    for layout in LAYOUTS[world]:
        options = Options(**layout)  # type: ignore[arg-type]
        parallel.initialize(options, seed=1)
        for number, name in enumerate(MODELS):
            label = f"{layout or 'DP'} {name}"
            dtype = (torch.float32, torch.bfloat16)[number % 2]
            destination = folder / f"out-{world}-{len(results)}"
            try:
                results[label] = round_trip(folder / name, destination, options, dtype, (10**9, 30_000)[number % 2])
            except Exception as error:  # on every rank alike: the next layout can still be tried
                results[label] = repr(error)
            dist.barrier()
            if dist.get_rank() == 0 and results[label] is None and layout != LAYOUTS[world][-1]:
                shutil.rmtree(destination)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / f"results-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
