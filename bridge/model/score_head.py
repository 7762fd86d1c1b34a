"""Heads that score documents: how config.json says that a model has one, and what a new one begins with."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..families import FAMILIES
from ..families.sequence_classification import SCORED, head_of
from ..families.vlm_text import text_config

__all__ = ["architectures", "begin_head", "head_of", "random_of", "with_head"]


def with_head(
    hf_config: dict[str, Any], labels: int, problem_type: str | None = None, *, pad_token_id: int | None = None
) -> dict[str, Any]:
    """The config.json of the sequence-classification model with so many labels that begins as the model of `hf_config`.

    `pad_token_id`: the tokenizer's, where config.json has none; else the first that ends a text. transformers takes the
    last token that is another one for a document's last. Raises ValueError where transformers has no such model, or
    `hf_config` has a head with another number of labels.
    """
    if (already := head_of(hf_config)) is not None:
        if already != labels:
            raise ValueError(
                f"--num_labels {labels}: the model has a head with {already} labels already. Leave the flag out, or "
                "give the model that it was made of"
            )
        return hf_config | ({"problem_type": problem_type} if problem_type else {})
    names = [f"LABEL_{label}" for label in range(labels)]
    config = hf_config | {
        "architectures": [_architecture(hf_config)],
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
        "problem_type": problem_type,
    }
    config.pop("num_labels", None)  # which id2label says
    if "text_config" in config:
        return config | {"text_config": _with_padding(config["text_config"], pad_token_id)}
    return _with_padding(config, pad_token_id)


def architectures() -> dict[str, str]:
    """transformers' sequence-classification models, by their model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    return {kind: name for kind, name in KNOWN.items() if name.endswith(SCORED)}


def _architecture(config: dict[str, Any]) -> str:
    known, kind = architectures(), config.get("model_type", "")
    if kind not in known:
        able = ", ".join(family.name for family in FAMILIES if family.name in known)
        raise ValueError(f"transformers has no sequence classification for {kind} models. It has some for {able}")
    return known[kind]


def _with_padding(config: dict[str, Any], pad_token_id: int | None) -> dict[str, Any]:
    if config.get("pad_token_id") is not None:
        return config
    ends = config.get("eos_token_id")
    if pad_token_id is None:
        pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config | {"pad_token_id": pad_token_id}


@torch.no_grad()
def begin_head(weight: Tensor, hf_config: dict[str, Any], seed: int) -> None:
    """Make a head random, as transformers does: the same in every layout."""
    std = text_config(hf_config).get("initializer_range") or 0.02
    weight.copy_(torch.empty(weight.shape).normal_(std=std, generator=random_of("score.weight", seed)))


def random_of(name: str, seed: int) -> torch.Generator:
    """Random numbers of a tensor, by its name and `seed` alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
