"""Tiny checkpoints of models that cut images into tiles."""

from pathlib import Path
from typing import Any

from tests import internvl_chat as internvl_names
from tests.tiny_vision_files import _save, _text
from tests.tiny_vision_text import (
    INTERN_NAMES,
    INTERN_SPECIAL,
    INTERN_TEMPLATE,
    LLAMA_SPECIAL,
    LLAMA_TEMPLATE,
    ONEVISION_SPECIAL,
    ONEVISION_TEMPLATE,
    OVIS_SPECIAL,
    OVIS_TEMPLATE,
    tokenizer,
)


def internvl(folder: Path, seed: int = 0) -> Path:
    """Write a tiny InternVL 3.5 with its processor to a folder and return it. Its tiles have four tokens."""
    from transformers import GotOcr2ImageProcessor, InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    vocabulary = tokenizer(INTERN_SPECIAL, **INTERN_NAMES)
    size = {"height": 56, "width": 56}
    processor = InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=6),
        vocabulary,
        InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=INTERN_TEMPLATE,
    )
    config = InternVLConfig(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0}) | {"model_type": "qwen3", "head_dim": 16},
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 56,
            "layer_scale_init_value": 1.0,
        },
        image_token_id=vocabulary.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return _save(folder, InternVLForConditionalGeneration, config, processor, seed)


def internvl_chat(folder: Path, seed: int = 0) -> Path:
    """Write the tiny InternVL likewise, under the names of InternVLChatModel."""
    return internvl_names.rename(internvl(folder, seed), most_tiles=6)


def ovis2(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Ovis2 with its processor to a folder and return it. Its tiles have four tokens."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration, Ovis2ImageProcessor, Ovis2Processor

    vocabulary = tokenizer(OVIS_SPECIAL)
    size = {"height": 56, "width": 56}
    images = Ovis2ImageProcessor(size=size, crop_to_patches=True, max_patches=6)
    processor = Ovis2Processor(images, vocabulary, image_seq_length=4, chat_template=OVIS_TEMPLATE)
    text = _text({"rope_type": "default", "rope_theta": 500.0}) | {"model_type": "qwen2"}
    config = Ovis2Config(
        text_config=text,
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 56,
            "vocab_size": 37,
            "hidden_stride": 2,
        },
        image_token_id=vocabulary.convert_tokens_to_ids(OVIS_SPECIAL[3]),
        visual_indicator_token_ids=vocabulary.convert_tokens_to_ids(OVIS_SPECIAL[4:]),
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        tie_word_embeddings=False,
    )
    return _save(folder, Ovis2ForConditionalGeneration, config, processor, seed)


def llama4_processor(tile: int, **settings: Any) -> Any:
    """Return a processor of Llama 4. tile: side in pixels"""
    from transformers import Llama4ImageProcessor, Llama4Processor

    images = Llama4ImageProcessor(size={"height": tile, "width": tile}, **settings)
    return Llama4Processor(images, tokenizer(LLAMA_SPECIAL, eos="<|eot|>"), chat_template=LLAMA_TEMPLATE)


def llama4(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Llama 4 with its processor to a folder and return it. Its tiles have four tokens."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    processor = llama4_processor(56, max_patches=6)
    vocabulary = processor.tokenizer
    text = {
        "head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 80, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 23,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3,
    }  # fmt: skip
    config = Llama4Config(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0}) | text,
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "patch_size": 14,
            "image_size": 56,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        image_token_index=vocabulary.convert_tokens_to_ids("<|patch|>"),
        boi_token_index=vocabulary.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=vocabulary.convert_tokens_to_ids("<|image_end|>"),
    )
    return _save(folder, Llama4ForConditionalGeneration, config, processor, seed)


def llava_onevision(folder: Path, seed: int = 0) -> Path:
    """Write a tiny LLaVA-OneVision with its processor to a folder and return it. Its tiles have four tokens."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
    )
    from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

    vocabulary = tokenizer(ONEVISION_SPECIAL)
    tile, half = 32, [0.5] * 3
    pinpoints = [[tile * rows, tile * columns] for rows in range(1, 4) for columns in range(1, 4)]
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(
            size={"height": tile, "width": tile}, image_grid_pinpoints=pinpoints, image_mean=half, image_std=half
        ),
        vocabulary,
        LlavaOnevisionVideoProcessor(size={"height": tile, "width": tile}, image_mean=half, image_std=half),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_3",
        chat_template=ONEVISION_TEMPLATE,
    )
    config = LlavaOnevisionConfig(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0}) | {"model_type": "qwen2"},
        vision_config={
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": tile,
            "vision_use_head": False,
        },
        image_token_index=vocabulary.convert_tokens_to_ids("<image>"),
        video_token_index=vocabulary.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_3",
        tie_word_embeddings=False,
    )
    return _save(folder, LlavaOnevisionForConditionalGeneration, config, processor, seed)
