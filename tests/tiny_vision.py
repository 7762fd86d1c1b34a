"""Tiny vision-language checkpoints with processors, made without a hub.

Every tensor is random, dimensions differ from one another, and the vocabulary is odd, as in tests/tiny.py.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bridge.families import gemma4_text
from tests.tiny_kimi_k25 import kimi_k25
from tests.tiny_vision_files import LATENT_EXPERTS, _save, _text
from tests.tiny_vision_files import mean_of as mean_of
from tests.tiny_vision_text import (
    GEMMA4_NAMES,
    GEMMA4_SPECIAL,
    GEMMA4_TEMPLATE,
    GEMMA_NAMES,
    GEMMA_SPECIAL,
    GEMMA_TEMPLATE,
    GLM_SPECIAL,
    GLM_TEMPLATE,
    KIMI_SPECIAL,
    KIMI_TEMPLATE,
    LLAVA_SPECIAL,
    LLAVA_TEMPLATE,
    MISTRAL_SPECIAL,
    MISTRAL_TEMPLATE,
    QWEN2_VL_TEMPLATE,
    QWEN3_VL_TEMPLATE,
    tokenizer,
)
from tests.tiny_vision_text import VOCABULARY as VOCABULARY
from tests.tiny_vision_tiles import internvl, internvl_chat, llama4, llava_onevision, ovis2


def picture(width: int, height: int, seed: int = 0):
    """Return a random picture that is smooth enough for JPEG."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def qwen2_5_vl(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """Write a tiny Qwen2.5-VL with its processor to a folder and return it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers import Qwen2VLImageProcessor as ImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    video_size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 96 * 28 * 28}
    vocabulary = tokenizer()
    processor = Qwen2_5_VLProcessor(
        ImageProcessor(patch_size=14, merge_size=2, temporal_patch_size=2, size=size),
        vocabulary,
        Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2, size=video_size),
        chat_template=QWEN2_VL_TEMPLATE,
    )
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 3]}
    config = Qwen2_5_VLConfig(
        text_config=_text(rope) | {"tie_word_embeddings": tied},
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 56,
            "out_hidden_size": 48,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
        tie_word_embeddings=tied,
        **_token_ids(vocabulary),
    )
    return _save(folder, Qwen2_5_VLForConditionalGeneration, config, processor, seed)


def qwen3_processor():
    """Return the processor of Qwen3-VL and Qwen3.5."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}
    video_size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 96 * 32 * 32}
    half = [0.5] * 3
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, size=size, image_mean=half, image_std=half
        ),
        tokenizer(),
        Qwen3VLVideoProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, size=video_size),
        chat_template=QWEN3_VL_TEMPLATE,
    )


QWEN3_TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 56,
    "out_hidden_size": 48,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 36,
}


def qwen3_vl(folder: Path, moe: bool = False, seed: int = 0, tied: bool = False, head_dim: int = 16) -> Path:
    """Write a tiny Qwen3-VL, or Qwen3-VL-MoE, with its processor to a folder and return it."""
    import transformers

    processor = qwen3_processor()
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [3 * head_dim // 16, 3 * head_dim // 16, head_dim // 8],
        "mrope_interleaved": True,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    name = "Qwen3VLMoe" if moe else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(rope) | {"head_dim": head_dim, "tie_word_embeddings": tied} | (experts if moe else {}),
        vision_config=QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1, 2]},
        tie_word_embeddings=tied,
        **_token_ids(processor.tokenizer),
    )
    return _save(folder, getattr(transformers, f"{name}ForConditionalGeneration"), config, processor, seed)


def qwen3_5(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Qwen3.5 with its processor to a folder and return it."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    processor = qwen3_processor()
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 24,
    }
    config = Qwen3_5Config(
        text_config=_text(rope) | delta, vision_config=QWEN3_TOWER, **_token_ids(processor.tokenizer)
    )
    return _save(folder, Qwen3_5ForConditionalGeneration, config, processor, seed)


def glm4v(folder: Path, seed: int = 0, *, processor_46v: bool = False) -> Path:
    """Write a tiny GLM-4.1V with its processor, or with that of GLM-4.6V, to a folder and return it."""
    from transformers import (
        Glm4vConfig,
        Glm4vForConditionalGeneration,
        Glm4vImageProcessor,
        Glm4vProcessor,
        Glm46VImageProcessor,
        Glm46VProcessor,
    )
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
    from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor

    vocabulary = tokenizer(GLM_SPECIAL, eos="<|endoftext|>")
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    # Limits are of the pixels of both frames.
    size = {"shortest_edge": 8 * 28 * 28, "longest_edge": 128 * 28 * 28}
    kinds: Any = Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor
    if processor_46v:
        kinds = Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor
    processor = kinds[0](
        kinds[1](**sizes, size=size), vocabulary, kinds[2](**sizes, size=size), chat_template=GLM_TEMPLATE
    )
    rope = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.5,
    }
    config = Glm4vConfig(
        text_config=_text(rope) | {"eos_token_id": 0},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 56,
            "out_hidden_size": 48,
            "patch_size": 14,
            "image_size": 70,
        },
        **{f"{kind}_token_id": vocabulary.convert_tokens_to_ids(f"<|{kind}|>") for kind in ("image", "video")},
    )
    return _save(folder, Glm4vForConditionalGeneration, config, processor, seed)


def mistral3(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """Write a tiny Mistral Small 3.1 with its processor to a folder and return it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessor, PixtralProcessor

    vocabulary = tokenizer(MISTRAL_SPECIAL, eos="</s>")
    processor = PixtralProcessor(
        PixtralImageProcessor(patch_size={"height": 14, "width": 14}, size={"longest_edge": 224}),
        vocabulary,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=MISTRAL_TEMPLATE,
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = Mistral3Config(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0})
        | {"model_type": "mistral", "head_dim": 16}
        | ids,
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 224,
            "hidden_act": "silu",
        },
        image_token_index=vocabulary.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=tied,
    )
    return _save(folder, Mistral3ForConditionalGeneration, config, processor, seed)


def kimi_vl(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Kimi-VL with its processor to a folder and return it."""
    from tests.kimi_vl import KimiVLConfig, KimiVLForConditionalGeneration, KimiVLProcessor

    vocabulary = tokenizer(KIMI_SPECIAL)
    vocabulary.chat_template = KIMI_TEMPLATE
    half = [0.5] * 3
    settings = {
        "patch_size": 14, "merge_kernel_size": [2, 2], "in_token_limit": 120, "pad_input": True,
        "image_mean": half, "image_std": half, "auto_map": {"AutoProcessor": "processing_kimi_vl.KimiVLProcessor"},
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "init_pos_emb_height": 5, "init_pos_emb_width": 5,
    }  # fmt: skip
    config = KimiVLConfig(
        _text({"rope_type": "default", "rope_theta": 500.0}) | LATENT_EXPERTS,
        vision,
        vocabulary.convert_tokens_to_ids("<|media_pad|>"),
    )
    return _save(folder, KimiVLForConditionalGeneration, config, KimiVLProcessor(vocabulary, settings), seed)


def gemma3(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Gemma 3 with its processor to a folder and return it. Its images have four tokens."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor

    vocabulary = tokenizer(GEMMA_SPECIAL, eos="<eos>", **GEMMA_NAMES)
    processor = Gemma3Processor(
        Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        vocabulary,
        chat_template=GEMMA_TEMPLATE,
        image_seq_length=4,
    )
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    text = {
        "head_dim": 16, "query_pre_attn_scalar": 11, "sliding_window": 13, "bos_token_id": 2, "eos_token_id": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    ids = {
        f"{kind}_token_index": vocabulary.convert_tokens_to_ids(GEMMA_NAMES[f"{kind}_token"])
        for kind in ("boi", "image", "eoi")
    }
    config = Gemma3Config(
        text_config=_text(ropes) | text,
        vision_config={
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 56,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        **ids,
    )
    return _save(folder, Gemma3ForConditionalGeneration, config, processor, seed)


VISION_GEMMA4 = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "intermediate_size": 56, "position_embedding_size": 3 * 70,
}  # fmt: skip


def gemma4(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Gemma 4 with its processor to a folder and return it. Its images have up to 70 tokens."""
    return _gemma4(folder, seed, "Gemma4", VISION_GEMMA4 | {"standardize": True})


def gemma4_elastic(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Gemma 4 E2B likewise: its tower clips, images attend from left to right, and layers share keys."""
    vision = VISION_GEMMA4 | {"standardize": False, "use_clipped_linears": True}
    text = gemma4_text.ELASTIC | {"use_bidirectional_attention": None, "num_global_key_value_heads": None}
    return _gemma4(folder, seed, "Gemma4", vision, text)


def gemma4_unified(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Gemma 4 12B likewise: its visual tokens are patches."""
    vision = {"pooling_kernel_size": 3, "mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 70}
    return _gemma4(folder, seed, "Gemma4Unified", vision)


def _gemma4(folder: Path, seed: int, kind: str, vision: dict[str, Any], further: dict[str, Any] | None = None) -> Path:
    """kind: beginning of the names of transformers' classes; further: settings of the language model"""
    import transformers

    patch = 4
    processor = gemma4_processor(kind, patch, 70)
    text = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "bos_token_id": 2}
    settings = _text(gemma4_text.ROPES) | gemma4_text.SETTINGS | text | {"eos_token_id": 5} | (further or {})
    if further:
        settings["vocab_size_per_layer_input"] = settings["vocab_size"]
    config = getattr(transformers, f"{kind}Config")(
        text_config=settings, vision_config=vision | {"patch_size": patch}, **gemma4_ids(processor.tokenizer)
    )
    return _save(folder, getattr(transformers, f"{kind}ForConditionalGeneration"), config, processor, seed)


def gemma4_processor(kind: str, patch: int, tokens: int) -> Any:
    """Return a processor of Gemma 4.

    Args:
        kind: beginning of the names of transformers' classes: Gemma4 or Gemma4Unified
        patch: side of a patch, in pixels
        tokens: largest number of tokens of an image
    """
    import transformers

    module = f"{kind.lower().replace('unified', '_unified')}"
    videos = import_module(f"transformers.models.{module}.video_processing_{module}")
    vocabulary = tokenizer(GEMMA4_SPECIAL, eos="<turn|>", **GEMMA4_NAMES)
    return getattr(transformers, f"{kind}Processor")(
        getattr(transformers, f"{kind}AudioFeatureExtractor")(),
        getattr(transformers, f"{kind}ImageProcessor")(patch_size=patch, max_soft_tokens=tokens),
        vocabulary,
        getattr(videos, f"{kind}VideoProcessor")(patch_size=patch),
        chat_template=GEMMA4_TEMPLATE,
        image_seq_length=tokens,
    )


def gemma4_ids(vocabulary: Any) -> dict[str, int]:
    """Return the entries of config.json for the tokens of images, audio and videos."""
    names = {f"{name}_id": vocabulary.convert_tokens_to_ids(token) for name, token in GEMMA4_NAMES.items()}
    names["eoa_token_index"] = names.pop("eoa_token_id")
    return names | {"video_token_id": vocabulary.convert_tokens_to_ids("<|video|>")}


def llava(folder: Path, seed: int = 0) -> Path:
    """Write a tiny LLaVA 1.5 with its processor to a folder and return it. Its images have four tokens."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    vocabulary = tokenizer(LLAVA_SPECIAL, eos="</s>")
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        vocabulary,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = LlavaConfig(
        text_config=_text({"rope_type": "default", "rope_theta": 500.0}) | {"model_type": "llama"} | ids,
        vision_config={
            "model_type": "clip_vision_model",
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 56,
            "patch_size": 14,
            "image_size": 28,
        },
        image_token_index=vocabulary.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return _save(folder, LlavaForConditionalGeneration, config, processor, seed)


FAMILIES = {
    "llava": llava,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_elastic": gemma4_elastic,
    "gemma4_unified": gemma4_unified,
    "kimi_vl": kimi_vl,
    "kimi_k25": kimi_k25,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "llama4": llama4,
    "llava_onevision": llava_onevision,
    "ovis2": ovis2,
    "mistral3": mistral3,
    "glm4v": glm4v,
    "glm46v": lambda folder, **options: glm4v(folder, processor_46v=True, **options),
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": lambda folder, **options: qwen3_vl(folder, moe=True, **options),
    "qwen3_5": qwen3_5,
}


def processor_of(folder: Path) -> Any:
    """Return the processor of a checkpoint: transformers', or that of tests/kimi_vl.py."""
    from transformers import AutoProcessor

    from tests.kimi_vl import KimiVLProcessor

    return (KimiVLProcessor if _is_kimi_vl(folder) else AutoProcessor).from_pretrained(folder)


def model_of(folder: Path) -> Any:
    """Return the model of a checkpoint in fp32: transformers', or that of tests/kimi_vl.py."""
    from transformers import AutoModelForImageTextToText

    from tests.kimi_vl import KimiVLForConditionalGeneration

    if _is_kimi_vl(folder):
        return KimiVLForConditionalGeneration.from_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def _is_kimi_vl(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] == "kimi_vl"


def _token_ids(vocabulary) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: vocabulary.convert_tokens_to_ids(token) for name, token in names.items()}
