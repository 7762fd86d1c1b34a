"""A tiny vision-language checkpoint, documents with images and a video, and what transformers makes of them."""

import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny_kimi_k25
from tests.bridge.families.reference import (
    SMALLEST_MARGIN,
    _by_names_in_files,
    _noise,
    _write,
    gradient,
    routing_margins,
)
from tests.bridge.vision import (
    AUDIO,
    BREAK,
    CROP,
    END,
    FAMILIES,
    IMAGE,
    INDICATORS,
    SIDE,
    START,
    TILE,
    VIDEO,
    VISION_ANYRES,
)
from tests.internvl_chat import chat_config, chat_names
from tests.kimi_vl import KimiVLForConditionalGeneration
from tests.tiny_vision import mean_of

MERGE, PATCH, FRAMES, CHANNELS = 2, 4, 2, 3
# Of each document of each pack: lengths of texts, and between them the grids of media; time above 1 is a video.
PACKS: tuple[tuple[list[Any], ...], ...] = (
    ([7, (1, 4, 6), 5], [9], [2, (1, 2, 2), 3, (1, 6, 4), 1, (1, 4, 4), 6]),
    ([11, (2, 4, 4), 4, (1, 2, 8), 5], [21]),
    ([30], [17]),
    ([4, (1, 6, 6), 3],),
)
PACK = 96
PADDED = "padded patches", "embedded patches"
STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")  # names of all experts of a layer in one tensor


@dataclass
class MediaDocument:
    ids: np.ndarray  # [length]
    weights: np.ndarray  # [length] float32
    positions: Tensor | None  # [3, length]: transformers'; None: a token has one
    grids: list[tuple[int, int, int]]
    kinds: list[int]  # [length] 1: token of an image, 2: of a video
    pixels: list[Tensor]  # uint8 [patches, channels * frames * area], frames: 1 of an image
    spectrograms: list[Tensor] = field(default_factory=list)  # fp32 [frames, bins] of audios
    has_blocks: bool = False  # tokens of an image attend to each other in both directions
    merge: int = MERGE  # side of a token in patches
    sizes: list[tuple[int, int]] = field(default_factory=list)  # heights and widths in pixels, where these count
    layouts: list[tuple[int, int, int, int]] = field(default_factory=list)  # of tiles
    counts: list[int] = field(default_factory=list)  # tokens of each image, where the grid does not tell


def documents(model: Any) -> list[list[MediaDocument]]:
    rng = np.random.default_rng(3)
    return [[_document(model, parts, rng) for parts in pack] for pack in PACKS]


def _document(model: Any, parts: list[Any], rng: np.random.Generator) -> MediaDocument:
    if form(model):
        side = getattr(model.config.vision_config, "hidden_stride", None)  # of a visual token, of Ovis2
        side = 1 if form(model) == "embedded patches" else side
        return _document_of_images(parts, rng, form(model), side, has_blocks=_has_blocks(model))
    is_glm = model.config.model_type.startswith("glm")  # the token of videos is that of images
    ids: list[int] = []
    kinds: list[int] = []
    grids, pixels = [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 240, part).tolist()
            kinds += [0] * part
            continue
        time, height, width = part
        if is_glm and time == 1 and any(isinstance(other, tuple) and other[0] > 1 for other in parts):
            part = time, height, width = 2, height, width // 2  # transformers' class takes no image beside a video
        frames = 1 if time == 1 else FRAMES
        tokens = height * width // MERGE**2
        blocks = [time * tokens] if not _splits_frames(model) else [tokens] * time
        for block in blocks:
            ids += [START, *[IMAGE if time == 1 or is_glm else VIDEO] * block, END]
            kinds += [0, *[1 if time == 1 else 2] * block, 0]
        grids.append(part)
        shape = time * height * width, CHANNELS * frames * PATCH**2
        pixels.append(torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8)))
    weights = (rng.random(len(ids)) < 0.7).astype(np.float32) * (np.array(kinds) == 0)
    document = MediaDocument(np.array(ids), weights, torch.empty(0), grids, kinds, pixels)
    positions, _ = model.model.get_rope_index(
        torch.tensor([ids]), torch.tensor([kinds], dtype=torch.int32), **_grids(document)
    )
    document.positions = positions[:, 0]
    return document


def _has_blocks(model: Any) -> bool:
    """Whether tokens of an image attend in both directions."""
    causal = model.config.model_type == "gemma4" and model.config.text_config.use_bidirectional_attention is None
    return form(model) in ("images", *PADDED) and not causal


def form(model: Any) -> str:
    """How a model takes images.

    As "rows" with a token behind each, as "tiles", as "separated tiles" with visual tokens around and between them, as
    "images" of one size whose tokens attend in both directions, as "crops" of one size with a token for each patch, as
    "patches" whose tokens have one position each, as "padded patches" or "embedded patches" (without a tower) whose
    tokens attend in both directions too (but those of Gemma 4 E2B), or as patches whose tokens have positions on axes
    (empty).
    """
    forms = {"llava": "crops", "mistral3": "rows", "internvl": "tiles", "gemma3": "images", "kimi_vl": "patches"}
    forms |= {"llama4": "tiles", "kimi_k25": "patches", "llava_onevision": "anyres", "ovis2": "separated tiles"}
    forms |= {"gemma4": "padded patches", "gemma4_unified": "embedded patches"}
    return forms.get(model.config.model_type, "")


def _document_of_images(
    parts: list[Any], rng: np.random.Generator, form: str, merge: int | None, *, has_blocks: bool
) -> MediaDocument:
    """A document whose videos are images of as many patches, or about as many tiles."""
    ids: list[int] = []
    merge = merge or (1 if form in ("crops", "anyres") else MERGE)
    document = MediaDocument(np.empty(0), np.empty(0), None, [], [], [], has_blocks=has_blocks, merge=merge)
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 240, part).tolist()
            continue
        time, height, width = 1, part[1], part[0] * part[2]
        if form == "embedded patches":
            height, width = height // MERGE, width // MERGE
        if form == "anyres" and part[0] > 1:
            half, frames = (SIDE + 1) // 2, part[0] + 1
            document.layouts.append((-1, half, half, 0))
            document.counts.append(frames * half**2 + 1)
            document.sizes.append((0, 0))
            time, height, width = frames, SIDE, SIDE
            ids += [START, *[VIDEO] * document.counts[-1], END]
        elif form == "anyres":
            size = 5 * height, 3 * width + 1
            rows, columns, kept_height, kept_width = layout = anyres_layout(size, SIDE, VISION_ANYRES["image_size"])
            new_height, new_width = reduced_size(kept_height, kept_width, SIDE, 1)
            time, height, width = 1 + rows * columns, SIDE, SIDE
            document.sizes.append(size)
            document.layouts.append(layout)
            document.counts.append(SIDE**2 + new_height * (new_width + 1))
            ids += [START, *[IMAGE] * document.counts[-1], END]
        elif form == "separated tiles":
            rows, columns = (2, 2) if part[0] > 1 else (1, max(part[2] // 3, 1))
            time, height, width = rows * columns + (rows * columns > 1), 2 * merge, 2 * merge
            image = separated(rows, columns, 4)
            document.layouts.append((rows, columns, 2 * rows, 2 * columns))
            document.counts.append(len(image))
            ids += image
        elif form == "crops":
            time, height, width = 1, CROP, CROP
            ids += [IMAGE] * CROP**2
        elif form in ("tiles", "images"):
            time, height, width = max(height * width // TILE**2, 1) if form == "tiles" else 1, TILE, TILE
            ids += [START, *[IMAGE] * (time * TILE**2 // MERGE**2), END]
        elif form.endswith("patches"):
            ids += [START, *[IMAGE] * (height * width // merge**2), END]
        else:
            for row in range(height // MERGE):
                ids += [IMAGE] * (width // MERGE) + [BREAK if row + 1 < height // MERGE else END]
        document.grids.append((time, height, width))
        pixels = rng.integers(0, 256, (time * height * width, CHANNELS * PATCH**2))
        document.pixels.append(torch.from_numpy(pixels.astype(np.uint8)))
    document.ids = np.array(ids)
    is_text = ~np.isin(document.ids, [IMAGE, VIDEO, BREAK, START, END, *INDICATORS])
    document.weights = (rng.random(len(ids)) < 0.7).astype(np.float32) * is_text
    return document


def model_inputs(document: MediaDocument, form: str) -> dict[str, Tensor]:
    """Images of rows as transformers' processor gives them, padded to one size, or tiles, or patches row by row."""
    images: list[Tensor] = []
    for (time, height, width), pixels in zip(document.grids, document.pixels, strict=True):
        squares = (pixels.float() / 255 - 0.5) / 0.5
        merge = document.merge
        squares = squares.view(time, height // merge, width // merge, merge, merge, CHANNELS, PATCH, PATCH)
        images += squares.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(time, CHANNELS, height * PATCH, width * PATCH)
    if form in ("tiles", "separated tiles", "images", "crops"):
        return {"pixel_values": torch.stack(images)}
    if form == "anyres":
        images = [F.pad(image, (0, 2, 0, 2)) for image in images]  # which the tower does not see
        media = torch.stack(images).split([grid[0] for grid in document.grids])
        is_video = [layout[0] < 0 for layout in document.layouts]
        tiles = [part for part, is_of_video in zip(media, is_video, strict=True) if not is_of_video]
        sizes = [size for size, is_of_video in zip(document.sizes, is_video, strict=True) if not is_of_video]
        inputs = {}
        if tiles:
            most = max(map(len, tiles))
            padded = [F.pad(part, (0, 0, 0, 0, 0, 0, 0, most - len(part))) for part in tiles]
            inputs |= {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}
        if any(is_video):
            inputs["pixel_values_videos"] = torch.stack(
                [part for part, is_of_video in zip(media, is_video, strict=True) if is_of_video]
            )
        return inputs
    if form == "patches":
        patches = [image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH) for image in images]
        values = torch.cat([part.permute(1, 2, 0, 3, 4).flatten(0, 1) for part in patches])
        return {"pixel_values": values, "image_grid_hws": torch.tensor([grid[1:] for grid in document.grids])}
    if form in PADDED:
        most = max(height * width for _, height, width in document.grids)
        values, positions = torch.zeros(len(images), most, CHANNELS * PATCH**2), torch.full((len(images), most, 2), -1)
        for number, image in enumerate(images):
            patches = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 3, 4, 0).flatten(0, 1)
            is_normalized = form == "embedded patches"  # the other model does it
            values[number, : len(patches)] = patches.flatten(1) if is_normalized else patches.flatten(1) / 2 + 0.5
            places = torch.cartesian_prod(*(torch.arange(side) for side in document.grids[number][1:]))
            positions[number, : len(places)] = places.flip(1)
        return {"pixel_values": values, "image_position_ids": positions}
    sizes = torch.tensor([image.shape[1:] for image in images])
    longest, widest = sizes.amax(0).tolist()
    padded = [F.pad(image, (0, widest - image.shape[2], 0, longest - image.shape[1])) for image in images]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def separated(rows: int, columns: int, tile: int) -> list[int]:
    """Return the ids of an image of Ovis2, as its processor has them. tile: visual tokens of a tile"""
    from transformers import Ovis2Processor

    named = SimpleNamespace(image_seq_length=tile)
    text = Ovis2Processor.replace_image_token(named, {"grids": torch.tensor([[rows, columns]])}, 0)  # type: ignore
    names = dict(zip(("START", "GRID", "COL", "ROW", "END"), INDICATORS, strict=True)) | {"ATOM": IMAGE}
    return [names[name] for name in re.findall(r"<IMG_(\w+)>", text)]


def anyres_layout(size: tuple[int, int], side: int, tile: int, most: int = 3) -> tuple[int, int, int, int]:
    """Return rows and columns of tiles, and the height and width of the features without padding."""
    from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape, unpad_image

    pinpoints = [[tile * rows, tile * columns] for rows in range(1, most) for columns in range(1, most + 1)]
    rows, columns = get_anyres_image_grid_shape(size, pinpoints, tile)
    return rows, columns, *unpad_image(torch.zeros(1, rows * side, columns * side), size).shape[1:]  # type: ignore


def reduced_size(height: int, width: int, side: int, most_tiles: int) -> tuple[int, int]:
    """Return the height and width of features that transformers reduces to about those of some tiles."""
    ratio = (height * width / (most_tiles * side**2)) ** 0.5
    return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)


def _splits_frames(model: Any) -> bool:
    return not model.config.model_type.startswith("qwen2")


def _grids(document: MediaDocument) -> dict[str, Tensor | None]:
    images = [grid for grid in document.grids if grid[0] == 1]
    videos = [grid for grid in document.grids if grid[0] > 1]
    return {
        "image_grid_thw": torch.tensor(images) if images else None,
        "video_grid_thw": torch.tensor(videos) if videos else None,
    }


def visual_tokens(document: MediaDocument) -> list[np.ndarray]:
    """The positions of the tokens of each image or video."""
    visual = np.flatnonzero(np.isin(document.ids, [IMAGE, VIDEO, *INDICATORS]))
    counts = document.counts or [int(np.prod(grid)) // document.merge**2 for grid in document.grids]
    return np.split(visual, np.cumsum(counts)[:-1]) if counts else []


def audio_tokens(document: MediaDocument) -> list[np.ndarray]:
    """The positions of the tokens of each audio, of which no two lie side by side."""
    heard = np.flatnonzero(document.ids == AUDIO)
    return np.split(heard, np.flatnonzero(np.diff(heard) > 1) + 1) if len(heard) else []


def _float_pixels(pixels: Tensor) -> Tensor:
    """[patches, channels * frames * area] uint8 -> as transformers' processors give it"""
    patches = pixels.view(len(pixels), CHANNELS, -1, PATCH**2).expand(-1, -1, FRAMES, -1).flatten(1)
    return (patches.float() / 255 - 0.5) / 0.5


def run(model: Any, document: MediaDocument) -> Tensor:
    """Log-probabilities [length, vocabulary]."""
    if form(model):
        inputs = model_inputs(document, form(model)) if document.grids else {}
        if model.config.model_type == "kimi_k25" and inputs:
            inputs = {"pixel_values": inputs["pixel_values"], "image_grid_thw": torch.tensor(document.grids)}
        ids = torch.from_numpy(document.ids)[None]
        if document.has_blocks:
            name = "mm_token_type_ids" if form(model) in PADDED else "token_type_ids"
            inputs[name] = (ids == IMAGE).long()
        if form(model) == "embedded patches":
            # transformers' forward pass lets images attend in all layers, unlike its `generate` and Gemma 4's class.
            inputs["attention_mask"] = model.create_masks_for_generate(
                model.config,
                torch.zeros(*ids.shape, 1),
                None,
                None,
                None,
                mm_token_type_ids=inputs["mm_token_type_ids"],
            )
        output = model(ids, use_cache=False, **inputs)
        return output.logits[0].log_softmax(-1)
    images = [p for p, grid in zip(document.pixels, document.grids, strict=True) if grid[0] == 1]
    videos = [p for p, grid in zip(document.pixels, document.grids, strict=True) if grid[0] > 1]
    pixels: dict[str, Tensor] = {}
    if images:
        pixels["pixel_values"] = torch.cat([_float_pixels(p) for p in images])
    if videos:
        pixels["pixel_values_videos"] = torch.cat([_float_pixels(p) for p in videos])
    ids = torch.from_numpy(document.ids)[None]
    kinds = torch.tensor([document.kinds], dtype=torch.int32)
    output = model(ids, mm_token_type_ids=kinds, use_cache=False, **pixels, **_grids(document))
    return output.logits[0].log_softmax(-1)


@torch.no_grad()
def mean_loss(model: Any, packs: list[list[MediaDocument]]) -> float:
    """Mean loss over the trained tokens of all documents."""
    total = count = 0.0
    for document in (document for pack in packs for document in pack):
        values = run(model, document)[:-1].gather(1, torch.from_numpy(document.ids[1:, None])).squeeze(1)
        total -= (values * torch.from_numpy(document.weights[1:])).sum().item()
        count += float(document.weights[1:].sum())
    return total / count


def build(config: Any) -> Any:
    """transformers' model of a config, or that of tests/kimi_vl.py: fp32, eager attention."""
    from transformers import AutoModelForImageTextToText

    if config.model_type == "kimi_vl":
        return KimiVLForConditionalGeneration(config)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")


def make(folder: Path, family: str) -> None:
    """Write `folder`/fp32, a checkpoint, and `folder`/reference.pt."""
    for seed in range(1, 21):
        config = FAMILIES[family]()
        model = build(config).eval()
        noise = _noise(seed)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                tensor.copy_(noise(*tensor.shape, mean=mean_of(model, name)))
        packs = documents(model)
        with routing_margins() as margins:
            log_probs, loss, count = [], torch.zeros(()), 0.0
            for document in (document for pack in packs for document in pack):
                values = run(model, document)
                log_probs.append(values.detach())
                labels = torch.from_numpy(document.ids[1:, None])
                loss = loss - (values[:-1].gather(1, labels).squeeze(1) * torch.from_numpy(document.weights[1:])).sum()
                count += float(document.weights[1:].sum())
        if min(margins, default=1.0) > SMALLEST_MARGIN:
            break
    else:
        raise RuntimeError("no seed gives a routing without ties")
    model.save_pretrained(folder / "fp32")
    _write(folder / "fp32", _as_on_the_hub(load_file(folder / "fp32" / "model.safetensors"), family))
    if family == "internvl_chat_moe":
        file = folder / "fp32" / "config.json"
        file.write_text(json.dumps(chat_config(json.loads(file.read_text()))))
    (loss / count).backward()
    rename = getattr(model, "by_names_in_files", partial(_by_names_in_files, model))
    # The last layer of LLaVA's tower, or the norm behind it, is not used.
    has_unused = form(model) in ("crops", "anyres")
    used = {name: p for name, p in model.named_parameters() if p.grad is not None or not has_unused}
    gradients = rename({name: gradient(p) for name, p in used.items()})
    gradients = _as_on_the_hub(gradients, family)
    torch.save({"log_probs": log_probs, "gradients": gradients, "packs": packs}, folder / "reference.pt")


def _as_on_the_hub(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return tensors by the names and in the form of the hub, which transformers gives only some of those it saves."""
    if family == "kimi_k25":
        return {tiny_kimi_k25.name_on_the_hub(name): tensor for name, tensor in tensors.items()}
    if family == "internvl_chat_moe":
        return chat_names(tensors)
    if family in ("llama4", "internvl_gpt_oss"):  # their classes have the experts as the hub
        return tensors
    return {name: t.transpose(1, 2).contiguous() if STACKED.search(name) else t for name, t in tensors.items()}
