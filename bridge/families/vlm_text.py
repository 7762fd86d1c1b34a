"""The text models of vision-language checkpoints: their part of config.json, and the names of their tensors."""

from ..mapping.param_mapping import HfConfig


def text_config(config: HfConfig, *, tied_inside: bool = False) -> HfConfig:
    """Return the text model's part of a config.json, or all of it if the checkpoint is a text model alone.

    transformers ties the output layer by the outer `tie_word_embeddings` and ignores the inner one.
    tied_inside: the family's language model is a full causal model inside, which follows the inner one instead.
    """
    if "text_config" not in config:
        return config
    text = dict(config["text_config"])
    if not tied_inside:
        text.pop("tie_word_embeddings", None)
    outer = ("quantization_config",) if tied_inside else ("quantization_config", "tie_word_embeddings")
    return {key: config[key] for key in outer if key in config} | text


def inside_model(name: str) -> str:
    """Rename model.layers... to model.language_model.layers..., and keep the head, as transformers 5 does."""
    return name.replace("model.", "model.language_model.", 1)


def inside_language_model(name: str) -> str:
    """Put the full text model, with its head, inside language_model."""
    return "language_model." + name
