"""Text models of vision-language checkpoints: their part of config.json and their tensor names."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping

TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
TOWER_AND_PROJECTOR = r"(model\.)?(vision_tower|multi_modal_projector)\."  # `Architecture.passthrough`
# What names of tensors and modules of vision and audio towers, and of what follows these, have.
TOWER_PARTS = "visual.", "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.", "mm_projector."
TOWER_PARTS += "image_newline", "visual_embeddings_table.", "embed_vision.", "vision_embedder.", "mlp1."
# `Architecture.module_names`, where files have the whole text model in language_model.
NESTED_MODULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
    *((rf"^{name[:-1]}\.", f"model.{name}") for name in (TOWER, PROJECTOR)),
)


def is_of_tower(name: str) -> bool:
    """Return whether a tensor or module of a checkpoint belongs to a vision or audio tower."""
    return any(part in name for part in TOWER_PARTS)


def text_config(config: HfConfig, *, use_inner_tie: bool = False) -> HfConfig:
    """Return the text model's part of a config.json, or all of it if the checkpoint is only a text model.

    transformers ties the output layer by the outer `tie_word_embeddings` and ignores the inner one. use_inner_tie: the
    family's language model is a full causal model, which follows the inner one instead.
    """
    if "text_config" not in config:
        return config
    text = dict(config["text_config"])
    if not use_inner_tie:
        text.pop("tie_word_embeddings", None)
    outer_keys = ("quantization_config",) if use_inner_tie else ("quantization_config", "tie_word_embeddings")
    return {key: config[key] for key in outer_keys if key in config} | text


def nested_text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part of a config.json, where files have the whole text model in language_model.

    transformers ties the output layer by the outer tie_word_embeddings, but not if the files have two matrices. Files
    whose config.json has none outside follow the inner one.
    """
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return text_config(config, use_inner_tie=True) | outer


def mrope_text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part of a config.json, whose rope type `mrope` is called `default`.

    A text token has one position for time, height and width, so that such a rope equals the plain one.
    """
    text = dict(text_config(config))
    for key in ("rope_parameters", "rope_scaling"):
        if text.get(key):
            text[key] = {name: "default" if value == "mrope" else value for name, value in text[key].items()}
    return text


def vision_config(config: HfConfig, defaults: HfConfig) -> HfConfig:
    """Return the vision tower's part of a config.json, with defaults for missing and null keys, and `rope_base`."""
    vision = config.get("vision_config") or {}
    rope_base = ({"rope_theta": 10000.0} | vision | (vision.get("rope_parameters") or {}))["rope_theta"]
    return (
        vision
        | {"rope_base": rope_base}
        | {key: default for key, default in defaults.items() if vision.get(key) is None}
    )


def add_language_model_prefix(name: str) -> str:
    """Rename model.layers... to model.language_model.layers... and keep lm_head, as transformers 5 does."""
    return name.replace("model.", "model.language_model.", 1)


def nest_in_language_model(name: str) -> str:
    """Prefix a tensor of the full text model, including its head, with language_model."""
    return "language_model." + name


def with_nested_text(
    family: Family,
    name: str,
    *,
    vision: Callable[[HfConfig, HfConfig], Vision],
    vision_mappings: Callable[[Vision], list[ParamMapping]],
    limits: tuple[str, ...],
    module_names: Sequence[tuple[str, str]] = NESTED_MODULES,
) -> Family:
    """Return a family of language models that is also the text model of the architecture `name`.

    Files have the whole text model in language_model. vision: takes the raw config.json and the family's defaults
    """

    def architecture(config: HfConfig) -> Architecture:
        decoder = family.architecture(config)
        if "text_config" not in config:
            return decoder
        return replace(decoder, passthrough=TOWER_AND_PROJECTOR, module_names=tuple(module_names))

    return replace(
        family,
        architectures=(*family.architectures, name),
        architecture=architecture,
        text_config=nested_text_config,
        vision=lambda config: vision(config, family.defaults),
        vision_mappings=vision_mappings,
        vlm_names=(nest_in_language_model, add_language_model_prefix),
        limits=family.limits + limits,
    )
