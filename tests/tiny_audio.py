"""Tiny audio-language checkpoints with processors, made without a hub, as those of tests/tiny_vision.py."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_vision_files import _save, _text
from tests.tiny_vision_text import VOCABULARY, tokenizer

NAMES = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *NAMES.values()]
RATE = 16000
BINS = 20

TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string -%}{{- message.content -}}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'audio' or 'audio' in item -%}<|audio_start|><|audio_pad|><|audio_end|>
            {%- elif 'text' in item -%}{{- item.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""
TOWER = {
    "num_mel_bins": BINS, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 36, "d_model": 24,
    "n_window": 50, "output_dim": 48, "n_window_infer": 200, "downsample_hidden_size": 6,
}  # fmt: skip


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Return random tones and noise: float32 [samples] in -1..1."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / RATE
    tones = sum(rng.random() * np.sin(2 * np.pi * rng.integers(80, 4000) * time) for _ in range(3))
    return (0.2 * tones + 0.02 * rng.normal(size=samples)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """Return a WAV file. samples: float in -1..1, [samples] or [samples, channels]"""
    scaled = np.clip(np.round(samples * 2 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1)
    numbers = scaled.astype("<i4")
    data = (numbers + 128).astype(np.uint8) if width == 1 else numbers[..., None].view(np.uint8)[..., :width]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(np.ascontiguousarray(data).tobytes())
    return file.getvalue()


def qwen3_asr(folder: Path, seed: int = 0, tied: bool = False, head_dim: int = 16) -> Path:
    """Write a tiny Qwen3-ASR with its processor to a folder and return it."""
    from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration
    from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

    vocabulary = tokenizer(SPECIAL, **NAMES)
    processor = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=BINS), vocabulary, chat_template=TEMPLATE)
    text: dict[str, Any] = _text({"rope_type": "default", "rope_theta": 500.0})
    config = Qwen3ASRConfig(
        text_config=text | {"model_type": "qwen3", "head_dim": head_dim},
        audio_config=TOWER,
        audio_token_id=vocabulary.convert_tokens_to_ids("<|audio_pad|>"),
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    assert text["vocab_size"] == VOCABULARY + 2
    return _save(folder, Qwen3ASRForConditionalGeneration, config, processor, seed)


FAMILIES = {"qwen3_asr": qwen3_asr}
