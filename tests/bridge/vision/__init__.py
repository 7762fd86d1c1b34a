"""Tiny vision-language models and documents with images: the tower and the whole model beside transformers'."""

from collections.abc import Callable
from typing import Any

from tests.bridge.families import ACCOUNTED, CP, EP, LAYOUT, PP, ROPE, SHARED, SP, TP, VPP, YARN

AUDIO, IMAGE, VIDEO, START, END = 249, 250, 251, 252, 253  # token ids
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TEXT = SHARED
AXIAL = {"rope_type": "axial", "rope_theta": 50.0}  # rope of the towers


def qwen2_vl() -> Any:
    from transformers import Qwen2VLConfig

    vision = {"depth": 3, "embed_dim": 24, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 3, "patch_size": 4}
    rope = ROPE | {"mrope_section": [2, 3, 1]}
    return Qwen2VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **TOKENS)


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    # Windows of 2 x 2 merged squares: images have several, and some that are cut off.
    vision = {
        "depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 48, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1, 3], "rope_parameters": AXIAL,
    }  # fmt: skip
    rope = ROPE | {"mrope_section": [2, 3, 1]}
    return Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **TOKENS)


VISION3 = {
    "depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 36, "out_hidden_size": 48, "patch_size": 4,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 3], "rope_parameters": AXIAL,
}  # fmt: skip
ROPE3 = ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    text = TEXT | {"head_dim": 16, "rope_parameters": ROPE3, "tie_word_embeddings": True}
    return Qwen3VLConfig(text_config=text, vision_config=VISION3, tie_word_embeddings=False, **TOKENS)


def qwen3_vl_moe() -> Any:
    from transformers import Qwen3VLMoeConfig

    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    text = TEXT | experts | {"head_dim": 16, "rope_parameters": ROPE3}
    return Qwen3VLMoeConfig(text_config=text, vision_config=VISION3, **TOKENS)


# Qwen3.5's tower has no DeepStack.
VISION35 = {key: value for key, value in VISION3.items() if key != "deepstack_visual_indexes"}
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 24,
    "rope_parameters": ROPE | {"mrope_section": [3, 2, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}  # fmt: skip


def qwen3_5() -> Any:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(text_config=TEXT | DELTA, vision_config=VISION35, **TOKENS)


def qwen3_5_moe() -> Any:
    from transformers import Qwen3_5MoeConfig

    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
    }  # fmt: skip
    text = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    return Qwen3_5MoeConfig(text_config=text | DELTA | experts, vision_config=VISION35, **TOKENS)


# The tower's MLPs are as wide as its output, and the merger's have another width. The grid of position embeddings is
# smaller than some images.
VISION_GLM = {
    "depth": 3, "hidden_size": 24, "num_heads": 2, "intermediate_size": 36, "out_hidden_size": 48, "patch_size": 4,
    "image_size": 20, "rope_parameters": AXIAL,
}  # fmt: skip
ROPE_GLM = ROPE | {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}


def glm4v() -> Any:
    from transformers import Glm4vConfig

    text = TEXT | {"hidden_size": 64, "rope_parameters": ROPE_GLM}
    return Glm4vConfig(text_config=text, vision_config=VISION_GLM | {"out_hidden_size": 64}, image_token_id=IMAGE)


def glm4v_moe() -> Any:
    from transformers import Glm4vMoeConfig

    experts = {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "head_dim": 16,
    }  # fmt: skip
    vision = VISION_GLM | {"attention_bias": True}
    return Glm4vMoeConfig(
        text_config=TEXT | experts | {"rope_parameters": ROPE_GLM}, vision_config=vision, image_token_id=IMAGE
    )


# Mistral 3: the frequencies of height and width differ, and the merger has a layer of its own for each square.
BREAK = 254
VISION_PIXTRAL = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 40, "hidden_act": "silu", "rope_parameters": AXIAL,
}  # fmt: skip


def _mistral3(text: dict[str, Any], **settings: Any) -> Any:
    from transformers import Mistral3Config

    settings = {"tie_word_embeddings": False, "image_token_index": IMAGE} | settings
    return Mistral3Config(text_config=TEXT | {"head_dim": 16} | text, vision_config=VISION_PIXTRAL, **settings)


def mistral3() -> Any:
    return _mistral3({"model_type": "mistral", "rope_parameters": ROPE, "sliding_window": 29})


def ministral3() -> Any:
    """Variant whose projector has biases."""
    rope = YARN | {"llama_4_scaling_beta": 0.6, "mscale": 0.9, "mscale_all_dim": 0.6}
    return _mistral3({"model_type": "ministral3", "rope_parameters": rope}, multimodal_projector_bias=True)


# InternVL: tiles of four squares, each with a class token.
TILE = 4  # patches on a side
VISION_INTERN = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 4 * TILE, "attention_bias": True, "layer_scale_init_value": 1.0,
}  # fmt: skip


def _internvl(kind: str, text: dict[str, Any], **vision: Any) -> Any:
    from transformers import InternVLConfig

    return InternVLConfig(
        text_config=TEXT | {"head_dim": 16, "model_type": kind, "rope_parameters": ROPE} | text,
        vision_config=VISION_INTERN | vision,
        image_token_id=IMAGE,
        image_seq_length=TILE**2 // 4,
        tie_word_embeddings=kind == "qwen2",
    )


def internvl_qwen2() -> Any:
    return _internvl("qwen2", {}, norm_type="rms_norm")


def internvl_qwen3() -> Any:
    return _internvl("qwen3", {})


def internvl_qwen3_moe() -> Any:
    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    return _internvl("qwen3_moe", experts, attention_bias=False)


def internvl_gpt_oss() -> Any:
    from tests.bridge.families.gpt_oss import YARN

    experts = {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 40, "sliding_window": 7,
        "rope_parameters": YARN, "attention_bias": True,
    }  # fmt: skip
    return _internvl("gpt_oss", experts)


def internvl_chat_moe() -> Any:
    """As InternVLChatModel's checkpoints have it, with biases of queries, keys and values."""
    config = internvl_qwen3_moe()
    config.vision_config.attention_bias = True
    return config


# Kimi-VL: the grid of position embeddings is larger than some images and smaller than others.
VISION_MOON = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "init_pos_emb_height": 5, "init_pos_emb_width": 5,
}  # fmt: skip


def kimi_vl() -> Any:
    """Moonlight's settings: one group of experts, a plain query matrix."""
    from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT
    from tests.kimi_vl import KimiVLConfig

    moonlight = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    return KimiVLConfig(TEXT | LATENT | EXPERTS | {"rope_parameters": ROPE} | moonlight, VISION_MOON, IMAGE)


def kimi_k25() -> Any:
    """Kimi-K2's settings: one group of experts, a query matrix of low rank."""
    from transformers import Kimi_K25Config

    from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT

    vision = {name.removeprefix("init_"): value for name, value in VISION_MOON.items()} | {"rope_parameters": AXIAL}
    experts = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    text = TEXT | LATENT | EXPERTS | {"rope_parameters": ROPE, "model_type": "deepseek_v3"} | experts
    return Kimi_K25Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, projection_hidden_size=vision["hidden_size"],
        tie_word_embeddings=False,
    )  # fmt: skip


# Gemma 3: images of four squares, each of one token. Its window is narrower than an image.
VISION_SIGLIP = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 4 * TILE, "vision_use_head": False,
}  # fmt: skip


def gemma3() -> Any:
    from transformers import Gemma3Config

    from tests.bridge.families.gemma3_text import config

    text = config(sliding_window=3, vocab_size=TEXT["vocab_size"]).to_dict()
    tokens = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    return Gemma3Config(
        text_config=text,
        vision_config=VISION_SIGLIP,
        mm_tokens_per_image=TILE**2 // 4,
        tie_word_embeddings=True,
        **tokens,
    )


# Gemma 4: images of any size, whose tokens attend to each other in windows that are narrower.
VISION_GEMMA4 = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 9,
    "rope_parameters": AXIAL, "standardize": True,
}  # fmt: skip


def gemma4(**vision: Any) -> Any:
    from transformers import Gemma4Config

    from tests.bridge.families.gemma4_text import config

    text = config(sliding_window=5, vocab_size=TEXT["vocab_size"], use_bidirectional_attention="vision").to_dict()
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
    tokens |= {"boi_token_id": START, "eoi_token_id": END}
    return Gemma4Config(
        text_config=text, vision_config=VISION_GEMMA4 | vision, audio_config=None, tie_word_embeddings=True, **tokens
    )


def gemma4_elastic() -> Any:
    """Gemma 4 E2B: the tower clips, images attend from left to right, and tokens have embeddings for each layer."""
    from tests.bridge.families.gemma4_text import ELASTIC

    whole = gemma4(use_clipped_linears=True, standardize=False)
    text = whole.text_config.to_dict() | ELASTIC | {"sliding_window": 5, "use_bidirectional_attention": None}
    text |= {"vocab_size_per_layer_input": TEXT["vocab_size"], "num_global_key_value_heads": None}
    text = {name: value for name, value in text.items() if name != "per_layer_config"}
    settings = whole.to_dict() | {"text_config": text}
    return type(whole)(**settings)


VISION_UNIFIED = {
    "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 5,
}  # fmt: skip


def gemma4_unified() -> Any:
    """Gemma 4 12B: patches are embedded, and enter the language model."""
    from transformers import Gemma4UnifiedConfig

    from tests.bridge.families.gemma4_unified_text import config

    text = config(sliding_window=5, vocab_size=TEXT["vocab_size"], use_bidirectional_attention="vision").to_dict()
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}
    tokens |= {"boi_token_id": START, "eoi_token_id": END}
    return Gemma4UnifiedConfig(
        text_config=text, vision_config=VISION_UNIFIED, audio_config=None, tie_word_embeddings=True, **tokens
    )


# LLaVA: images of 2 x 2 patches, each of one token, and a class token; the last layer of the tower is not used.
CROP = 2  # patches on a side
VISION_CLIP = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 4 * CROP, "hidden_act": "quick_gelu", "model_type": "clip_vision_model",
}  # fmt: skip


def llava() -> Any:
    from transformers import LlavaConfig

    text = TEXT | {"model_type": "llama", "rope_parameters": ROPE}
    return LlavaConfig(
        text_config=text, vision_config=VISION_CLIP, image_token_index=IMAGE, image_seq_length=CROP**2,
        tie_word_embeddings=False,
    )  # fmt: skip


# LLaVA-OneVision: tiles of 2 x 2 patches, and images whose features are reduced to those of one tile.
SIDE = 2
VISION_ANYRES = VISION_SIGLIP | {"image_size": 4 * SIDE + 2, "model_type": "siglip_vision_model"}


def llava_onevision() -> Any:
    from transformers import LlavaOnevisionConfig

    tile = VISION_ANYRES["image_size"]
    return LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2", "rope_parameters": ROPE}, vision_config=VISION_ANYRES,
        image_token_index=IMAGE, video_token_index=VIDEO, vision_aspect_ratio="anyres_max_1",
        image_grid_pinpoints=[[tile * rows, tile * columns] for rows in (1, 2) for columns in (1, 2, 3)],
    )  # fmt: skip


# Ovis2: tiles of four squares, and learned features around and between them.
INDICATORS = tuple(range(241, 246))
VISION_OVIS = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 4 * TILE, "vocab_size": 37, "hidden_stride": 2,
}  # fmt: skip


def ovis2() -> Any:
    from transformers import Ovis2Config

    return Ovis2Config(
        text_config=TEXT | {"model_type": "qwen2", "rope_parameters": ROPE}, vision_config=VISION_OVIS,
        image_token_id=IMAGE, visual_indicator_token_ids=INDICATORS, tie_word_embeddings=False,
        hidden_size=TEXT["hidden_size"], vocab_size=TEXT["vocab_size"],
    )  # fmt: skip


def ovis2_with_biases() -> Any:
    """Variant whose tower has biases and whose visual tokens are patches."""
    config = ovis2()
    for name, value in {"qkv_bias": True, "mlp_bias": True, "hidden_stride": 1, "image_size": 2 * TILE}.items():
        setattr(config.vision_config, name, value)
    config.tie_word_embeddings = True
    return config


# Llama 4: tiles of four squares, each with a class token and a rope; the tower ends with an MLP over squares.
VISION_LLAMA = {
    "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 4 * TILE, "projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip


def llama4() -> Any:
    from transformers import Llama4Config

    from tests.bridge.families.llama4_text import config

    text = config(vocab_size=TEXT["vocab_size"]).to_dict()
    return Llama4Config(text_config=text, vision_config=VISION_LLAMA, image_token_index=IMAGE)


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "glm4v": glm4v,
    "glm4v_moe": glm4v_moe,
    "mistral3": mistral3,
    "ministral3": ministral3,
    "internvl_qwen2": internvl_qwen2,
    "internvl_qwen3": internvl_qwen3,
    "internvl_qwen3_moe": internvl_qwen3_moe,
    "internvl_gpt_oss": internvl_gpt_oss,
    "internvl_chat_moe": internvl_chat_moe,
    "kimi_vl": kimi_vl,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_elastic": gemma4_elastic,
    "gemma4_unified": gemma4_unified,
    "llava": llava,
    "llama4": llama4,
    "kimi_k25": kimi_k25,
    "llava_onevision": llava_onevision,
    "ovis2": ovis2,
    "ovis2_with_biases": ovis2_with_biases,
}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# By the number of processes.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"": {}, "recompute": FULL},
    2: {
        "DP2": {},
        "TP2": {TP: 2, SP: False},
        "TP2 SP": {TP: 2, SP: True},
        "CP2": {CP: 2},
        "PP2": {PP: 2},
        "PP2 VPP2": {PP: 2, VPP: 2},
        "PP2 embedding apart": {PP: 2, LAYOUT: "E|ttttL"},
        "PP2 VPP3 accounted": {PP: 2, VPP: 3} | ACCOUNTED,
        "EP2": {EP: 2},
        "TP2 SP EP2": {TP: 2, SP: True, EP: 2},
    },
    4: {
        "TP2 SP CP2": {TP: 2, SP: True, CP: 2},
        "TP2 SP PP2 recompute": {TP: 2, SP: True, PP: 2, **FULL},
    },
}
