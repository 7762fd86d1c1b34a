"""Our vision-language model beside transformers', in the processes of one layout. Under torchrun:

    torchrun --nproc-per-node 2 -m tests.bridge.vision.worker jobs.json results.json

jobs.json: [{"name", "folder": one that reference.make has filled, "layout": its flags}, ...].
"""

import json
import math
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.model.vision_encoder import Normalization
from megaswift.bridge.options import BuildOptions
from megaswift.tasks.train.optimizer import wrap_for_data_parallelism, wrap_tower
from megaswift.tasks.train.step import run_schedule, sft_loss
from megaswift.templates.batching.collator import Batch, BatchLayout
from megaswift.templates.batching.media_batch import MediaBatch
from megatron.core import parallel_state
from torch import Tensor

from tests.bridge.families.worker import SMALLEST_GRADIENT, tensors_of
from tests.bridge.vision.reference import PACK, MediaDocument, visual_tokens
from tests.layouts.worker import close

NORMALIZATION = Normalization((0.5,) * 3, (0.5,) * 3)


def batches(packs: list[list[MediaDocument]], options: BuildOptions, *, packed: bool = True) -> list[Batch]:
    """This rank's micro batches, with its share of the pixels."""
    loss_tokens = float(sum(document.weights[1:].sum() for pack in packs for document in pack))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = packs[rank::ranks] + [[]] * (len(packs[::ranks]) - len(packs[rank::ranks]))
    samples = mine if packed else [[document] for pack in mine for document in pack]
    rows = 1 if packed else 2
    found = [_batch(samples[i : i + rows], options, loss_tokens, packed=packed) for i in range(0, len(samples), rows)]
    longest = max(batch.tokens.shape[1] for batch in found)
    assert packed or all(batch.tokens.shape[1] == longest for batch in found)
    return found


def _batch(samples: list[list[MediaDocument]], options: BuildOptions, loss_tokens: float, *, packed: bool) -> Batch:
    size = parallel_state.get_context_parallel_world_size()
    layouts = [
        BatchLayout(
            padding_free=packed,
            pack_length=PACK if packed else None,
            length_multiple=options.tensor_model_parallel_size if options.sequence_parallel else 1,
            context_parallel_rank=rank,
            context_parallel_size=size,
        )
        for rank in range(size)
    ]
    plain = [[(document.ids, document.weights) for document in sample] for sample in samples]
    length = None if packed else PACK
    by_rank = [layout.batch(plain, loss_tokens, length) for layout in layouts]
    full = BatchLayout(padding_free=packed, pack_length=PACK if packed else None)
    starts = replace(full, context_parallel_size=size)._starts(plain) if packed else [0] * len(plain)
    positions = np.zeros((3, len(plain), PACK), np.int64) + np.arange(PACK)
    tokens: list[np.ndarray] = []  # of each medium, in rows * PACK
    media: list[tuple[Any, Tensor]] = []
    documents = [document for sample in samples for document in sample]
    for number, (document, start) in enumerate(zip(documents, starts, strict=True)):
        row = 0 if packed else number
        positions[:, row, start : start + len(document.ids)] = document.positions
        tokens += [row * PACK + start + places for places in visual_tokens(document)]
        media += zip(document.grids, document.pixels, strict=True)
    mine = by_rank[parallel_state.get_context_parallel_rank()]
    index = slice(None) if mine.cp_index is None else mine.cp_index
    batch = replace(mine, rope_positions=torch.from_numpy(positions)[:, :, index])
    if not media:
        return replace(mine, rope_positions=None)
    order = sorted(range(len(media)), key=lambda number: media[number][0][0] > 1)  # images before videos
    media, tokens = [media[number] for number in order], [tokens[number] for number in order]
    context_ranks, local = np.zeros(PACK, np.int64), np.arange(PACK)
    for rank, other in enumerate(by_rank):
        if other.cp_index is not None:
            context_ranks[other.cp_index], local[other.cp_index] = rank, np.arange(len(other.cp_index))
    rows, columns = np.divmod(np.concatenate(tokens), PACK)
    replica = dist.get_world_size() // parallel_state.get_data_parallel_world_size()
    encoders = torch.arange(1, len(media) + 1) % replica
    own = _replica_rank(options)
    empty = torch.empty(0, dtype=torch.uint8)
    pixels = {
        kind: [
            pixels
            for encoder, (grid, pixels) in zip(encoders, media, strict=True)
            if encoder == own and (grid[0] > 1) == kind
        ]
        for kind in (False, True)
    }
    return replace(
        batch,
        media=MediaBatch(
            grids=torch.tensor([grid for grid, _ in media]),
            encoders=encoders,
            image_pixels=torch.cat(pixels[False]) if pixels[False] else empty,
            video_pixels=torch.cat(pixels[True]) if pixels[True] else empty,
            context_ranks=torch.from_numpy(context_ranks[columns]),
            positions=torch.from_numpy(rows * mine.tokens.shape[1] + local[columns]),
        ),
    )


def _replica_rank(options: BuildOptions) -> int:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    context = parallel_state.get_context_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return parallel_state.get_tensor_model_parallel_rank() + tensor * (
        context + parallel_state.get_context_parallel_world_size() * stage
    )


def open_model(source: Path, options: BuildOptions, dtype: torch.dtype = torch.float32) -> Model:
    """The model of `source`: what loading leaves out is NaN."""
    config = read_config(source)
    model = build_model(config, options, dtype, vision=NORMALIZATION)
    with torch.no_grad():
        for tensor in collect_params(model.parts).values():
            tensor.fill_(torch.nan)
    load_weights(model.parts, config, source)
    return model


def check(folder: Path, options: BuildOptions, *, recomputes: bool = True) -> dict[str, Any]:
    """Relative distances of gradients, and what a round trip changes. Every rank calls this."""
    expected = torch.load(folder / "reference.pt", weights_only=False)
    model = open_model(folder / "fp32", options)
    assert model.vision is not None
    model.vision.recomputes = recomputes
    saved = save(model, folder / "fp32", folder / "saved")
    before = tensors_of(folder / "fp32")
    found: dict[str, Any] = {
        "saved": sorted(before.keys() ^ saved.keys()) or [n for n in before if not torch.equal(before[n], saved[n])]
    }
    chunks, tower = wrap_for_data_parallelism(model, options), wrap_tower(model, options)
    assert tower is not None
    for chunk in (*chunks, tower.module):
        chunk.train()
        chunk.zero_grad_buffer()
    metrics = run_schedule(model, chunks, batches(expected["packs"], options), sft_loss, forward_only=False)
    tower.module.finish_grad_sync()
    with torch.no_grad():
        for parameter in (parameter for part in model.parts for parameter in part.parameters()):
            parameter.copy_(parameter.main_grad)
    loss = torch.tensor([metrics["loss"].item() if metrics else 0.0])
    gradients = save(model, folder / "fp32", folder / "gradients")
    return found | {"loss": loss.item()} | compare(gradients, expected["gradients"])


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    sizes = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    largest = max(sizes.values())
    scales = {name: size if size > SMALLEST_GRADIENT * largest else largest for name, size in sizes.items()}
    relative = {name: (found[name] - gradient).abs().max().item() / scales[name] for name, gradient in expected.items()}
    worst = max(relative, key=lambda name: math.inf if math.isnan(relative[name]) else relative[name])
    return {"gradients": relative[worst], "worst gradient": worst}


def save(model: Model, source: Path, destination: Path) -> dict[str, Tensor]:
    import shutil

    if dist.get_rank() == 0:
        shutil.rmtree(destination, ignore_errors=True)
        destination.mkdir()
    parallel.barrier()
    config = read_config(source)
    save_weights(model.parts, config, source, destination, dtype=torch.float32, max_shard_bytes=10**9)
    tensors = tensors_of(destination)
    parallel.barrier()
    return tensors


def main(jobs: list[dict[str, Any]], results: Path) -> None:
    done, layout = {}, None
    for job in jobs:
        try:
            options = BuildOptions(use_distributed_optimizer=False, ddp_timeout=120, **job["layout"])
            if job["layout"] != layout:
                if layout is not None:
                    close()
                parallel.initialize(options, seed=1)
                layout = job["layout"]
            done[job["name"]] = check(Path(job["folder"]), options, **job.get("settings", {}))
        except Exception:
            done[job["name"]] = {"error": f"rank {dist.get_rank()}:\n{traceback.format_exc()}"}
            results.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(done))
            os._exit(1)
        if dist.get_rank() == 0:
            results.write_text(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
