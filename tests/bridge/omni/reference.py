"""A tiny Omni checkpoint, documents with images, a video and audios, and what transformers makes of its thinker."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bridge.audio import BINS
from tests.bridge.audio import reference as audio
from tests.bridge.families.qwen3_omni_moe_text import carried, whole
from tests.bridge.families.reference import (
    SMALLEST_MARGIN,
    _by_names_in_files,
    _noise,
    _write,
    gradient,
    routing_margins,
)
from tests.bridge.omni import AUDIO_END, AUDIO_START, FAMILIES, SECONDS
from tests.bridge.vision import AUDIO, END, IMAGE, START, VIDEO
from tests.bridge.vision.reference import CHANNELS, FRAMES, MERGE, PATCH, MediaDocument, _float_pixels, _grids
from tests.tiny_vision import mean_of

# Of each document of each pack: lengths of texts, and between them grids of images and videos, and frames of audios. An
# audio below a chunk is alone: beside longer ones transformers pads it with what it does not mask.
PACKS: tuple[tuple[list[Any], ...], ...] = (
    ([7, (1, 4, 6), 5, (133,), 2], [6], [2, (1, 2, 2), (1, 6, 4), 6, (1, 4, 4), 1]),
    ([3, (118,), 4, (2, 4, 4), 1, (101,), 2, (1, 2, 8), 5],),
    ([11, (41,), 4], [30]),
    ([4, (1, 6, 6), 3],),
)


def documents(model: Any) -> list[list[MediaDocument]]:
    rng = np.random.default_rng(3)
    return [[_document(model, parts, rng) for parts in pack] for pack in PACKS]


def _document(model: Any, parts: list[Any], rng: np.random.Generator) -> MediaDocument:
    ids: list[int] = []
    document = MediaDocument(np.empty(0), np.empty(0), None, [], [], [])
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 240, part).tolist()
        elif len(part) == 1:
            frames, tokens = audio_size(model, part[0])
            ids += [AUDIO_START, *[AUDIO] * tokens, AUDIO_END]
            values = rng.normal(size=(frames, BINS)).astype(np.float32)
            document.spectrograms.append(torch.from_numpy(values))
        else:
            patches, frames = int(np.prod(part)), 1 if part[0] == 1 else FRAMES
            ids += [START, *[IMAGE if part[0] == 1 else VIDEO] * (patches // MERGE**2), END]
            document.grids.append(part)
            shape = patches, CHANNELS * frames * PATCH**2
            document.pixels.append(torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8)))
    document.ids = np.array(ids)
    is_text = ~np.isin(ids, [AUDIO, AUDIO_START, AUDIO_END, START, END, IMAGE, VIDEO])
    document.weights = (rng.random(len(ids)) < 0.7).astype(np.float32) * is_text
    document.positions = positions(model, document)
    return document


def audio_size(model: Any, frames: int) -> tuple[int, int]:
    """Frames and tokens of an audio: Qwen2.5-Omni has a token for four frames, and gets a third of them here."""
    if model.config.model_type.startswith("qwen3"):
        return frames, audio.tokens(frames)
    frames //= 3
    return frames, (frames + 1) // 2 // 2


def positions(model: Any, document: MediaDocument) -> Tensor:
    """transformers' positions in time, height and width: [3, length]."""
    ids = torch.from_numpy(document.ids)[None]
    found, _ = model.get_rope_index(
        ids,
        attention_mask=torch.ones_like(ids),
        audio_seqlens=torch.tensor([len(one) for one in document.spectrograms]),
        second_per_grids=torch.full((len(document.grids),), SECONDS),
        **_grids(document),
    )
    return found[:, 0]


def run(model: Any, document: MediaDocument) -> Tensor:
    """Log-probabilities [length, vocabulary]."""
    inputs: dict[str, Any] = {name: grid for name, grid in _grids(document).items() if grid is not None}
    for name, is_video in (("pixel_values", False), ("pixel_values_videos", True)):
        media = zip(document.pixels, document.grids, strict=True)
        if pixels := [_float_pixels(values) for values, grid in media if (grid[0] > 1) == is_video]:
            inputs[name] = torch.cat(pixels)
    if document.spectrograms:
        features = audio.model_inputs(document)
        inputs["input_features"] = features["input_features"]
        inputs["feature_attention_mask"] = features["input_features_mask"]
    ids = torch.from_numpy(document.ids)[None]
    seconds = torch.full((len(document.grids),), SECONDS)
    output = model(ids, attention_mask=torch.ones_like(ids), video_second_per_grid=seconds, use_cache=False, **inputs)
    return output.logits[0].log_softmax(-1)


def randomized(family: str, seed: int = 1) -> Any:
    """Return a thinker of transformers whose parameters are all random."""
    from transformers import AutoModelForMultimodalLM

    config = FAMILIES[family]()
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    noise = _noise(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(noise(*tensor.shape, mean=mean_of(model, name) or float(name.endswith("ln_post.weight"))))
    return model


def make(folder: Path, family: str) -> None:
    """Write `folder`/fp32, a checkpoint, and `folder`/reference.pt."""
    for seed in range(1, 21):
        model = randomized(family, seed)
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
    file = folder / "fp32" / "config.json"
    file.write_text(json.dumps(whole(json.loads(file.read_text())), indent=2))
    weights = {f"thinker.{name}": t for name, t in load_file(folder / "fp32" / "model.safetensors").items()}
    speech = {name: t for name, t in carried(model.config, _noise(9)).items() if not name.startswith("thinker.")}
    _write(folder / "fp32", weights | speech)
    (loss / count).backward()
    # Of Qwen2.5-Omni's audio tower, the embedding of ends is not used.
    used = {name: p for name, p in model.named_parameters() if "audio_bos_eos_token" not in name}
    gradients = _by_names_in_files(model, {name: gradient(p) for name, p in used.items()})
    gradients = {f"thinker.{name}": tensor for name, tensor in gradients.items()}
    torch.save({"log_probs": log_probs, "gradients": gradients, "packs": packs}, folder / "reference.pt")
