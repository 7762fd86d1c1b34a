"""Score heads: their declaration in config.json, and the initial values of new ones."""

import hashlib

import torch
from torch import Tensor

from ..families import FAMILIES, family_of
from ..families.sequence_classification import SUFFIX, count_labels
from ..families.vlm_text import text_config
from ..mapping.architecture import HfConfig

GENERATIVE = "ForConditionalGeneration"


def add_score_head(
    hf_config: HfConfig, labels: int, problem_type: str | None = None, *, pad_token_id: int | None = None
) -> HfConfig:
    """Return the config.json of a sequence-classification model with `labels` labels, based on `hf_config`.

    pad_token_id: the tokenizer's, for a config.json without one; default: the first eos token. transformers scores a
    document's last token that is not padding. Raises ValueError if transformers has no such model, or `hf_config` has a
    head with another number of labels.
    """
    if (current := count_labels(hf_config)) is not None:
        if current != labels:
            raise ValueError(
                f"--num_labels {labels}: the model already has a head with {current} labels. Remove the flag, or set "
                "--model to the language model that it was made of"
            )
        return hf_config | ({"problem_type": problem_type} if problem_type else {})
    names = [f"LABEL_{label}" for label in range(labels)]
    config = hf_config | {
        "architectures": [_classifier_architecture(hf_config)],
        "id2label": {str(label): name for label, name in enumerate(names)},
        "label2id": {name: label for label, name in enumerate(names)},
        "problem_type": problem_type,
    }
    config.pop("num_labels", None)  # id2label has it
    if "text_config" in config:
        return config | {"text_config": _set_pad_token(config["text_config"], pad_token_id)}
    return _set_pad_token(config, pad_token_id)


def classifier_architectures() -> dict[str, str]:
    """Return transformers' sequence-classification models by model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    return {kind: name for kind, name in NAMES.items() if name.endswith(SUFFIX)}


def _classifier_architecture(config: HfConfig) -> str:
    classifiers, kind = classifier_architectures(), config.get("model_type", "")
    if kind not in classifiers and ("vision_config" in config or "audio_config" in config):
        family = family_of(config)
        # transformers has none for models with a tower. The name follows its rule. `family_of` recognises a classifier
        # with an audio tower alone by its model_type, and one with a vision tower by that of its text.
        name = kind if family.vision is None else text_config(config).get("model_type")
        is_recognised = name == family.name
        if family.has_tower(config) and is_recognised:
            names = *config["architectures"], *family.architectures  # Qwen2_5OmniModel, on the hub, ends otherwise
            return next(name for name in names if name.endswith(GENERATIVE)).replace(GENERATIVE, SUFFIX)
    if kind not in classifiers:
        supported = ", ".join(family.name for family in FAMILIES if family.name in classifiers)
        raise ValueError(f"transformers has no sequence classification for {kind} models. It has some for {supported}")
    return classifiers[kind]


def _set_pad_token(config: HfConfig, pad_token_id: int | None) -> HfConfig:
    if config.get("pad_token_id") is not None:
        return config
    ends = config.get("eos_token_id")
    if pad_token_id is None:
        pad_token_id = ends[0] if isinstance(ends, list) else ends
    return config | {"pad_token_id": pad_token_id}


@torch.no_grad()
def init_head(weight: Tensor, hf_config: HfConfig, seed: int) -> None:
    """Initialize a head with random values as transformers does, the same in every layout."""
    std = text_config(hf_config).get("initializer_range") or 0.02
    weight.copy_(torch.empty(weight.shape).normal_(std=std, generator=seeded_generator("score.weight", seed)))


def seeded_generator(name: str, seed: int) -> torch.Generator:
    """Return a random generator that depends only on a tensor's name and `seed`."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
