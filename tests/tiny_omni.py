"""Tiny Omni checkpoints with processors, made without a hub, as those of tests/tiny_vision.py."""

from pathlib import Path
from typing import Any

import torch

from tests import tiny_audio
from tests.tiny_vision import QWEN3_TOWER, _save, _text
from tests.tiny_vision_text import tokenizer

# Names of a tokenizer's tokens, and the tokens; and the chat template.
QWEN3_NAMES = tiny_audio.NAMES | {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
QWEN2_5_NAMES = {
    "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
TURNS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def template(names: dict[str, str]) -> str:
    image, video, audio = (
        names[f"{kind}_bos_token"] + names[f"{token}_token"] + names[f"{kind}_eos_token"]
        for kind, token in (("vision", "image"), ("vision", "video"), ("audio", "audio"))
    )
    return tiny_audio.TEMPLATE.replace("<|audio_start|><|audio_pad|><|audio_end|>", audio).replace(
        "{%- elif 'text' in item -%}",
        f"""{{%- elif item.type == 'image' or 'image' in item -%}}{image}
            {{%- elif item.type == 'video' or 'video' in item -%}}{video}
            {{%- elif 'text' in item -%}}""",
    )


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
POSITIONS = {"image_size": 96, "apply_vit_abs_pos_embed": True}  # settings of published towers, which vLLM reads
WHISPER = "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "d_model", "output_dim"
SPEAKING = {
    "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 9,
}  # fmt: skip


def processor_of(kind: str, names: dict[str, str], patch: int) -> Any:
    """Return a processor. kind: beginning of its class; names: of tokens; patch: side in pixels"""
    import transformers
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    sizes: dict[str, Any] = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    return getattr(transformers, f"{kind}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes, **half, size=size),
        Qwen2VLVideoProcessor(**sizes, **half, size=size),
        transformers.WhisperFeatureExtractor(feature_size=tiny_audio.BINS),
        tokenizer([*TURNS, *names.values()], **names),
        chat_template=template(names),
    )


def token_ids(processor: Any, names: dict[str, str], suffix: str) -> dict[str, int]:
    """Return the thinker's settings of tokens. suffix: of their names, id or index"""
    places = {f"{kind}_token_{suffix}": f"{kind}_token" for kind in ("image", "video", "audio")}
    places |= {f"{kind}_start_token_id": f"{kind}_bos_token" for kind in ("vision", "audio")}
    return {key: processor.tokenizer.convert_tokens_to_ids(names[name]) for key, name in places.items()}


def qwen3_omni_moe(folder: Path, seed: int = 0, head_dim: int = 16, hidden_size: int = 48) -> Path:
    """Write a tiny Qwen3-Omni that speaks, with its processor, to a folder and return it."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    processor = processor_of("Qwen3OmniMoe", QWEN3_NAMES, 16)
    sections = [3 * head_dim // 16, 3 * head_dim // 16, head_dim // 8]
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": sections, "mrope_interleaved": True}
    thinker = token_ids(processor, QWEN3_NAMES, "id") | {
        "position_id_per_seconds": 13,
        "text_config": _text(rope) | EXPERTS | {"head_dim": head_dim, "hidden_size": hidden_size},
        "vision_config": QWEN3_TOWER
        | {"deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": hidden_size}
        | POSITIONS,
        "audio_config": tiny_audio.TOWER | {"output_dim": hidden_size},
    }
    talker = {
        "text_config": SPEAKING | EXPERTS | {"shared_expert_intermediate_size": 14},
        "code_predictor_config": SPEAKING, "thinker_hidden_size": hidden_size, "num_code_groups": 2,
        "spatial_merge_size": 2,
    }  # fmt: skip
    wave = {
        "codebook_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "decoder_dim": 16,
        "intermediate_size": 10, "num_hidden_layers": 1, "num_quantizers": 2,
    }  # fmt: skip
    config = Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=wave)
    return _save(folder, Qwen3OmniMoeForConditionalGeneration, config, processor, seed)


def qwen2_5_omni(folder: Path, seed: int = 0, head_dim: int = 12) -> Path:
    """Write a tiny Qwen2.5-Omni that speaks, with its processor, to a folder and return it."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    processor = processor_of("Qwen2_5Omni", QWEN2_5_NAMES, 14)
    sections = [head_dim // 6, head_dim // 12]
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [*sections, head_dim // 2 - sum(sections)]}
    thinker = token_ids(processor, QWEN2_5_NAMES, "index") | {
        "position_id_per_seconds": 25,
        "text_config": _text(rope) | {"dtype": "float32", "hidden_size": 4 * head_dim},
        "vision_config": {
            "depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 56, "out_hidden_size": 4 * head_dim,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3],
        },
        "audio_config": {name: tiny_audio.TOWER[name] for name in WHISPER} | {"output_dim": 4 * head_dim},
    }  # fmt: skip
    talker = SPEAKING | {"embedding_size": 4 * head_dim, "rope_parameters": rope}
    dit = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4, "emb_dim": 6,
        "num_embeds": 9, "mel_dim": 5, "enc_dim": 6, "enc_emb_dim": 4, "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4, "enc_se_channels": 4, "enc_res2net_scale": 2,
    }  # fmt: skip
    wave = {"mel_dim": 5, "upsample_initial_channel": 8, "upsample_rates": [2], "upsample_kernel_sizes": [4],
            "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}  # fmt: skip
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config={"dit_config": dit, "bigvgan_config": wave}
    )
    _save(folder, Qwen2_5OmniForConditionalGeneration, config, processor, seed)
    torch.save({"Chelsie": {"bos_token": 3}}, folder / "spk_dict.pt")  # voices
    return folder


FAMILIES = {"qwen3_omni_moe": qwen3_omni_moe, "qwen2_5_omni": qwen2_5_omni}
