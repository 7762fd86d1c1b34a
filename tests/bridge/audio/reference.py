"""A tiny audio-language checkpoint, documents with audios, and what transformers makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.bridge.audio import BINS, FAMILIES, WINDOW
from tests.bridge.families.reference import _by_names_in_files, _noise, _write, gradient
from tests.bridge.vision import AUDIO, END, START
from tests.bridge.vision.reference import MediaDocument
from tests.tiny_vision import mean_of

# Of each document of each pack: lengths of texts, and between them the frames of audios: less than a chunk of 100, more
# than one, and more than the two that attend to each other.
PACKS: tuple[tuple[list[Any], ...], ...] = (
    ([7, (133,), 5], [6], [2, (27,), 3, (230,), 6]),
    ([11, (141,), 4, (60,), 5], [21]),
    ([30], [17]),
    ([4, (12,), 3],),
)


def tokens(frames: int) -> int:
    """Tokens of an audio by Qwen3-ASR's and Qwen3-Omni's formula, whose chunks of 100 frames have 13."""
    rest = frames % (2 * WINDOW)
    for _ in range(3):
        rest = (rest + 1) // 2
    return frames // (2 * WINDOW) * 13 + rest


def documents() -> list[list[MediaDocument]]:
    rng = np.random.default_rng(3)
    return [[_document(parts, rng) for parts in pack] for pack in PACKS]


def _document(parts: list[Any], rng: np.random.Generator) -> MediaDocument:
    ids: list[int] = []
    spectrograms = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 240, part).tolist()
            continue
        ids += [START, *[AUDIO] * tokens(part[0]), END]
        spectrograms.append(torch.from_numpy(rng.normal(size=(part[0], BINS)).astype(np.float32)))
    is_text = ~np.isin(ids, [AUDIO, START, END])
    weights = (rng.random(len(ids)) < 0.7).astype(np.float32) * is_text
    return MediaDocument(np.array(ids), weights, None, [], [], [], spectrograms)


def model_inputs(document: MediaDocument) -> dict[str, Tensor]:
    """Spectrograms as transformers' feature extractor gives them."""
    if not document.spectrograms:
        return {}
    chunk = 2 * WINDOW
    longest = -(-max(map(len, document.spectrograms)) // chunk) * chunk
    padded = [F.pad(one, (0, 0, 0, longest - len(one))).t() for one in document.spectrograms]
    mask = [torch.arange(longest) < len(one) for one in document.spectrograms]
    return {"input_features": torch.stack(padded), "input_features_mask": torch.stack(mask).long()}


def run(model: Any, document: MediaDocument) -> Tensor:
    """Log-probabilities [length, vocabulary]."""
    output = model(torch.from_numpy(document.ids)[None], use_cache=False, **model_inputs(document))
    return output.logits[0].log_softmax(-1)


def randomized(family: str, seed: int = 1) -> Any:
    """Return a model of transformers whose parameters are all random."""
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
    model, packs = randomized(family), documents()
    log_probs, loss, count = [], torch.zeros(()), 0.0
    for document in (document for pack in packs for document in pack):
        values = run(model, document)
        log_probs.append(values.detach())
        labels = torch.from_numpy(document.ids[1:, None])
        loss = loss - (values[:-1].gather(1, labels).squeeze(1) * torch.from_numpy(document.weights[1:])).sum()
        count += float(document.weights[1:].sum())
    model.save_pretrained(folder / "fp32")
    _write(folder / "fp32", load_file(folder / "fp32" / "model.safetensors"))
    (loss / count).backward()
    gradients = _by_names_in_files(model, {name: gradient(p) for name, p in model.named_parameters()})
    torch.save({"log_probs": log_probs, "gradients": gradients, "packs": packs}, folder / "reference.pt")
