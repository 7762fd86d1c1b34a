"""Our vision-language model beside transformers', in the processes of one layout. Under torchrun:

    torchrun --nproc-per-node 2 -m tests.bridge.vision.worker jobs.json results.json

jobs.json: [{"name", "folder": one that reference.make has filled, "layout": its flags}, ...].
"""

import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.layers import packed_seqs
from megaswift.bridge.layers.audio_plan import AudioPlan, plan_audios
from megaswift.bridge.layers.clipped_linear import ClippedLinear
from megaswift.bridge.layers.deepstack import MediaFeatures
from megaswift.bridge.layers.patch_plan import Blocks, PatchPlan, plan_patches
from megaswift.bridge.layers.tile_features import plan_features
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model, enable_grads_through_frozen
from megaswift.bridge.model.model import Model
from megaswift.bridge.model.vision_encoder import Normalization, VisionEncoder
from megaswift.bridge.options import BuildOptions
from megaswift.tasks.train import media_windows
from megaswift.tasks.train.optimizer import wrap_for_data_parallelism, wrap_tower
from megaswift.tasks.train.step import run_schedule, sft_loss
from megaswift.templates.batching.collator import Batch, BatchLayout
from megaswift.templates.batching.media_batch import MediaBatch
from megatron.core import parallel_state
from torch import Tensor

from tests.bridge.families.worker import SMALLEST_GRADIENT, tensors_of
from tests.bridge.vision.reference import PACK, MediaDocument, audio_tokens, visual_tokens
from tests.layouts.worker import close

NORMALIZATION = Normalization((0.5,) * 3, (0.5,) * 3)


def batches(packs: list[list[MediaDocument]], options: BuildOptions, *, packed: bool = True) -> list[Batch]:
    """This rank's micro batches, with its share of the pixels."""
    loss_tokens = float(sum(document.weights[1:].sum() for pack in packs for document in pack))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = packs[rank::ranks] + [[]] * (len(packs[::ranks]) - len(packs[rank::ranks]))
    samples = mine if packed else [[document] for pack in mine for document in pack]
    rows = 1 if packed else 2
    batches = [_batch(samples[i : i + rows], options, loss_tokens, packed=packed) for i in range(0, len(samples), rows)]
    longest = max(batch.tokens.shape[1] for batch in batches)
    assert packed or all(batch.tokens.shape[1] == longest for batch in batches)
    return batches


class _Medium(NamedTuple):
    """An image (0), video (1) or audio (2) of a micro batch."""

    kind: int
    size: Any  # grid, or number of frames
    values: Tensor  # pixels or spectrogram
    tokens: np.ndarray  # positions in rows * PACK
    layout: tuple[int, int, int, int] | None = None


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
    media: list[_Medium] = []
    documents = [document for sample in samples for document in sample]
    for number, (document, start) in enumerate(zip(documents, starts, strict=True)):
        row = 0 if packed else number
        if document.positions is not None:
            positions[:, row, start : start + len(document.ids)] = document.positions
        has_videos = document.positions is not None  # a grid of several frames is otherwise one of tiles
        first = row * PACK + start
        layouts = document.layouts or [None] * len(document.grids)
        visual = zip(document.grids, document.pixels, visual_tokens(document), layouts, strict=True)
        for grid, pixels, places, layout in visual:
            is_video = has_videos and grid[0] > 1 if layout is None else layout[0] < 0
            media.append(_Medium(int(is_video), grid, pixels, first + places, layout))
        for spectrogram, places in zip(document.spectrograms, audio_tokens(document), strict=True):
            media.append(_Medium(2, len(spectrogram), spectrogram, first + places))
    mine = by_rank[parallel_state.get_context_parallel_rank()]
    index = slice(None) if mine.cp_index is None else mine.cp_index
    has_axes = all(document.positions is not None for document in documents)
    batch = replace(mine, rope_positions=torch.from_numpy(positions)[:, :, index] if has_axes else None)
    if not media:
        return replace(mine, rope_positions=None)
    media.sort(key=lambda medium: medium.kind)  # stable
    blocks = None
    if documents[0].has_blocks:
        places = [(*divmod(int(medium.tokens[0]), PACK), len(medium.tokens)) for medium in media]
        blocks = torch.tensor([(row, first, first + count) for row, first, count in places])
    context_ranks, local = np.zeros(PACK, np.int64), np.arange(PACK)
    for rank, other in enumerate(by_rank):
        if other.cp_index is not None:
            context_ranks[other.cp_index], local[other.cp_index] = rank, np.arange(len(other.cp_index))
    rows, columns = np.divmod(np.concatenate([medium.tokens for medium in media]), PACK)
    replica = dist.get_world_size() // parallel_state.get_data_parallel_world_size()
    encoders = torch.arange(1, len(media) + 1) % replica
    own = _replica_rank(options)
    values = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), torch.empty(0, 0)]
    for kind in range(3):
        parts = [medium.values for medium, at in zip(media, encoders, strict=True) if at == own and medium.kind == kind]
        values[kind] = torch.cat(parts) if parts else values[kind]
    return replace(
        batch,
        blocks=blocks,
        media=MediaBatch(
            grids=torch.tensor([medium.size for medium in media if medium.kind < 2]).view(-1, 3),
            frames=torch.tensor([medium.size for medium in media if medium.kind == 2], dtype=torch.int64),
            counts=torch.tensor([len(medium.tokens) for medium in media]),
            encoders=encoders,
            image_pixels=values[0],
            video_pixels=values[1],
            spectrograms=values[2],
            layouts=torch.tensor([medium.layout for medium in media]) if media[0].layout else None,
            uses=torch.arange(len(media)),
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
    model = build_model(config, options, dtype, vision=True)
    assert model.vision is not None
    model.vision.normalization = NORMALIZATION
    with torch.no_grad():
        for tensor in collect_params(model.parts).values():
            tensor.fill_(torch.nan)
    load_weights(model.parts, config, source)
    return model


def check(
    folder: Path,
    options: BuildOptions,
    *,
    recomputes: bool | None = True,
    kept_share: float = 0.0,
    frozen: str = "",
    fault: str = "",
    feature_bytes: int = media_windows.FEATURE_BYTES,
    repeats: int = 1,
) -> dict[str, Any]:
    """Relative distances of gradients, and what a round trip changes. Every rank calls this.

    recomputes: of the encoder. kept_share: of a replica's patches, whose activations fit into memory. frozen: a regular
    expression of names of parameters. fault: of FAULTS. repeats: of all documents, whose mean loss stays the same.
    """
    expected = torch.load(folder / "reference.pt", weights_only=False)
    expected["packs"] *= repeats
    model = open_model(folder / "fp32", options)
    assert model.vision is not None
    model.vision.recomputes = recomputes
    documents = [document for pack in expected["packs"] for document in pack]
    patches = sum(math.prod(grid) for document in documents for grid in document.grids)
    patches += sum(len(spectrogram) for document in documents for spectrogram in document.spectrograms)
    model.vision.kept_patches = math.ceil(kept_share * patches / dist.get_world_size())
    media_windows.FEATURE_BYTES = feature_bytes
    encoded, begun = count_encoded(model.vision), mock.Mock(wraps=model.vision.begin)
    trained = mock.Mock(wraps=model.vision._encode_trained)
    model.vision.begin, model.vision._encode_trained = begun, trained
    found: dict[str, Any] = {}
    if not fault:
        saved, before = save(model, folder / "fp32", folder / "saved"), tensors_of(folder / "fp32")
        names = sorted(before.keys() ^ saved.keys())
        found["saved"] = names or [name for name in before if not torch.equal(before[name], saved[name])]
    for part in model.parts:
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(not (frozen and re.search(frozen, name)))
    for chunk in model.chunks:
        enable_grads_through_frozen(chunk, has_trained_input=model.vision.trains)
    with FAULTS[fault](model) if fault else nullcontext():
        found |= _gradients(folder, model, options, expected, frozen=bool(frozen))
        keeps_graph = [call.args[1] for call in trained.call_args_list]
        counts = {"keeps_graph": keeps_graph, "encoded": sum_of(encoded), "encodings": len(encoded), "patches": patches}
        return found | counts | {"schedules": begun.call_count}


def sum_of(counts: list[int]) -> int:
    total = torch.tensor(sum(counts))
    dist.all_reduce(total)
    return int(total)


def count_encoded(encoder: VisionEncoder) -> list[int]:
    """The patches and frames of each forward pass of the towers that is for the language model, from now on."""
    counts: list[int] = []
    passes = encoder._passes

    def counted(media: Any, limit: int) -> Any:
        counts.append(len(media.patches) + len(media.spectrograms))
        return passes(media, limit)

    encoder._passes = counted
    return counts


def _gradients(
    folder: Path, model: Model, options: BuildOptions, expected: dict[str, Any], *, frozen: bool
) -> dict[str, Any]:
    chunks, tower = wrap_for_data_parallelism(model, options), wrap_tower(model, options)
    modules = [*chunks, *([tower.module] if tower else [])]
    for chunk in modules:
        chunk.train()
        chunk.zero_grad_buffer()
    run_schedule(model, chunks, batches(expected["packs"], options), sft_loss, forward_only=False)
    if tower:
        tower.module.finish_grad_sync()
    with torch.no_grad():
        for parameter in (parameter for part in model.parts for parameter in part.parameters()):
            assert parameter.requires_grad or not hasattr(parameter, "main_grad")
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.full_like(parameter, torch.nan))
    gradients = save(model, folder / "fp32", folder / "gradients")
    gradients = {name: gradient for name, gradient in gradients.items() if name in expected["gradients"]}
    trained = {name: gradient for name, gradient in gradients.items() if not gradient.isnan().all()}
    norm = torch.stack([gradient.double().square().sum() for gradient in trained.values()]).sum().sqrt().item()
    assert frozen or trained.keys() == gradients.keys()
    expected = {name: gradient for name, gradient in expected["gradients"].items() if name in trained}
    return compare(trained, expected) | {"trained": len(trained), "of": len(gradients), "norm": norm}


def _swap_deep_levels(model: Model) -> Any:
    """Features of the deep layers in each other's place."""
    add = MediaFeatures.add_to
    swapped = {1: 2, 2: 1}
    return mock.patch.object(MediaFeatures, "add_to", lambda self, x, level: add(self, x, swapped.get(level, level)))


def _scale_gradients(factor: float) -> Any:
    """Gradients of the tower times a factor, as where tensor-parallel ranks are averaged."""

    def plant(model: Model) -> Any:
        return mock.patch.object(model.vision.exchange, "gradient_scale", model.vision.exchange.gradient_scale * factor)

    return plant


def _deep_gradients_once(model: Model) -> Any:
    """Under sequence parallelism, gradients of deep features from the first tensor-parallel rank alone."""
    exchange = model.vision.exchange
    collect = exchange._leaf_gradients

    def lossy(*arguments: Any) -> Tensor:
        rows = collect(*arguments)
        rows[:, 1:] *= exchange.rank % exchange.tensor == 0
        return rows

    return mock.patch.object(exchange, "_leaf_gradients", lossy)


def _swap_rope_axes(model: Model) -> Any:
    """Height and width in each other's place, in the ropes of the language model."""
    swapped = torch.tensor([0, 2, 1])
    ropes = tuple(replace(rope, axes=swapped[rope.axes]) for rope in model.ropes)
    return mock.patch.object(model, "ropes", ropes)


def _patch_plan(change: Callable[[PatchPlan], PatchPlan]) -> Any:
    def plant(model: Model) -> Any:
        place = "megaswift.bridge.model.vision_encoder.plan_patches"
        return mock.patch(place, lambda *arguments: change(plan_patches(*arguments)))

    return plant


def _swap_axes(plan: PatchPlan) -> PatchPlan:
    """Height and width in each other's place."""
    quarter = plan.cos.shape[-1] // 4
    return replace(plan, cos=plan.cos.roll(quarter, -1), sin=plan.sin.roll(quarter, -1))


def _join_blocks(plan: PatchPlan) -> PatchPlan:
    """One block of all images."""
    return replace(plan, full=Blocks([sum(plan.full.lengths)], plan.full.cu_seqlens[[0, -1]]))


def _shift_tile_features(model: Model) -> Any:
    """Features of images in the next place."""

    def changed(*arguments: Any) -> Any:
        plan = plan_features(*arguments)
        assert plan is not None
        weights = plan.weights if plan.weights is None else plan.weights.roll(1, 0)
        return replace(plan, taps=plan.taps.roll(1, 0), weights=weights)

    return mock.patch("megaswift.bridge.model.vision_encoder.plan_features", changed)


def _move_class_tokens(plan: PatchPlan) -> PatchPlan:
    """Class tokens at the place of the first patch, in the tower's rope."""
    assert plan.row_order is not None
    rows = (plan.row_order < len(plan.full.lengths)).nonzero().flatten()
    cos, sin = (table.index_copy(0, rows, table[rows + 1]) for table in (plan.cos, plan.sin))
    return replace(plan, cos=cos, sin=sin)


def _reverse_squares(model: Model) -> Any:
    """The patches of each square from the last to the first, in the merger."""
    tower = model.vision.part.vision
    merger = tower.merger if tower.downsample is None else tower.downsample
    forward = merger.forward
    return mock.patch.object(merger, "forward", lambda x: forward(x.unflatten(0, (-1, 4)).flip(1).flatten(0, 1)))


def _audio_plan(change: Callable[[AudioPlan], AudioPlan]) -> Any:
    def plant(model: Model) -> Any:
        place = "megaswift.bridge.model.vision_encoder.plan_audios"
        return mock.patch(place, lambda *arguments: change(plan_audios(*arguments)))

    return plant


def _change_blocks(change: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    def plant(model: Model) -> Any:
        make = packed_seqs.make_packed_seqs

        def changed(*arguments: Any, blocks: Sequence[Any], **others: Any) -> Any:
            return make(*arguments, blocks=change(blocks), **others)

        return mock.patch("megaswift.bridge.model.model.make_packed_seqs", changed)

    return plant


def _blocks_everywhere(model: Model) -> Any:
    make = packed_seqs.make_packed_seqs

    def changed(*arguments: Any, **settings: Any) -> Any:
        return make(*arguments, **settings | {"blocks_in_windows": False})

    return mock.patch("megaswift.bridge.model.model.make_packed_seqs", changed)


def _join_audios(plan: AudioPlan) -> AudioPlan:
    """One block of all audios."""
    return replace(plan, blocks=Blocks([sum(plan.blocks.lengths)], plan.blocks.cu_seqlens[[0, -1]]))


def _own_layer_inputs(model: Model) -> Any:
    """Visual tokens have per-layer embeddings of their own."""
    return mock.patch.object(model.chunks[0].embedding.layer_inputs, "visual_tokens", None)


FAULTS: dict[str, Any] = {
    "layer inputs of visual tokens": _own_layer_inputs,
    "no clipping": lambda model: mock.patch.object(ClippedLinear, "_clip", lambda layer, x, side: x),
    "one block for all audios": _audio_plan(_join_audios),
    "positions of the next step of time": _audio_plan(lambda plan: replace(plan, sines=plan.sines.roll(1, 0))),
    "frames of the next step of time": _audio_plan(lambda plan: replace(plan, frames=plan.frames.roll(1, 1))),
    "patches of a square in another order": _reverse_squares,
    "deep levels swapped": _swap_deep_levels,
    "tower gradient / 2": _scale_gradients(0.5),
    "deep gradients of one rank": _deep_gradients_once,
    "axes of ropes swapped": _swap_rope_axes,
    "window order kept": _patch_plan(lambda plan: replace(plan, feature_order=None)),
    "height and width swapped": _patch_plan(_swap_axes),
    "position embeddings of the next row": _patch_plan(lambda plan: replace(plan, taps=plan.taps.roll(1, 0))),
    "causal images": _change_blocks(lambda blocks: ()),
    "images end a token early": _change_blocks(lambda blocks: [(row, low, high - 1) for row, low, high in blocks]),
    "images attend in all layers": _blocks_everywhere,
    "features of tiles in the next place": _shift_tile_features,
    "class tokens at the first patch": _patch_plan(_move_class_tokens),
    "one block for all images": _patch_plan(_join_blocks),
}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    sizes = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    largest = max(sizes.values())
    scales = {name: size if size > SMALLEST_GRADIENT * largest else largest for name, size in sizes.items()}
    relative = {name: (found[name] - gradient).abs().max().item() / scales[name] for name, gradient in expected.items()}
    worst = max(relative, key=lambda name: math.inf if math.isnan(relative[name]) else relative[name])
    return {"gradients": relative[worst], "worst gradient": worst}


def save(model: Model, source: Path, destination: Path) -> dict[str, Tensor]:
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
