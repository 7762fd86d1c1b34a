"""Checkpoints of InternVLChatModel in transformers: as its own InternVL, under their names of tensors and settings."""

from functools import cache
from typing import Any

from ..families.internvl import CHAT, lift_language_model, usual_settings

IMAGE_TOKEN = "<IMG_CONTEXT>"
LANGUAGE_MODEL = r"^language_model\.model\."
# Patterns of the language model's modules, and their names in transformers' InternVLForConditionalGeneration.
MODULES = {LANGUAGE_MODEL: "model.language_model.", r"^language_model\.lm_head": "lm_head"}


@cache
def register_in_transformers() -> Any:
    """Return a class of configs whose models are transformers' InternVL. The Python code of a checkpoint is not run."""
    from transformers import (
        AutoModel,
        AutoModelForImageTextToText,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLModel,
    )
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    class InternVLChatConfig(InternVLConfig):
        model_type = CHAT

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **settings: Any) -> Any:
            return super().from_dict(usual_settings(lift_language_model(config_dict)), **settings)

    class InternVLChatModel(InternVLForConditionalGeneration):
        config_class = InternVLChatConfig  # pyright: ignore[reportAssignmentType]

    class InternVLChatBackbone(InternVLModel):  # has no output layer
        config_class = InternVLChatConfig  # pyright: ignore[reportAssignmentType]

    for auto, kind, prefix in (
        (AutoModelForImageTextToText, InternVLChatModel, "model."),
        (AutoModel, InternVLChatBackbone, ""),
    ):
        auto.register(InternVLChatConfig, kind)
        tower, projector = f"{prefix}vision_tower.", f"{prefix}multi_modal_projector."
        names = {
            LANGUAGE_MODEL: f"{prefix}language_model.",
            r"^mlp1\.0\.": f"{projector}layer_norm.",
            r"^mlp1\.1\.": f"{projector}linear_1.",
            r"^mlp1\.3\.": f"{projector}linear_2.",
            r"^vision_model\.embeddings\.class_embedding": f"{tower}embeddings.cls_token",
            r"^vision_model\.embeddings\.position_embedding": f"{tower}embeddings.position_embeddings",
            r"^vision_model\.embeddings\.patch_embedding\.": f"{tower}embeddings.patch_embeddings.projection.",
            r"^vision_model\.encoder\.layers\.": f"{tower}encoder.layer.",
            r"\.norm1\.": ".layernorm_before.",
            r"\.norm2\.": ".layernorm_after.",
            r"\.ls1": ".lambda_1",
            r"\.ls2": ".lambda_2",
            r"\.attn\.proj\.": ".attention.projection_layer.",
        }
        if prefix:
            names |= MODULES
        parts = [f".attention.{part}_proj." for part in "qkv"]
        register_checkpoint_conversion_mapping(
            kind.__name__,
            [
                *(WeightRenaming(pattern, name) for pattern, name in names.items()),
                WeightConverter(".attn.qkv.", parts, operations=[Chunk(dim=0)]),
            ],
        )
    return InternVLChatConfig


def set_image_token(config: Any, tokenizer: Any) -> None:
    """Set what stands for an image in transformers' `config`, which config.json does not say."""
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
