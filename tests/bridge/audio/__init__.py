"""Tiny audio-language models and documents with audios: the tower and the whole model beside transformers'."""

from collections.abc import Callable
from typing import Any

from tests.bridge.families import CP, PP, ROPE, SHARED, SP, TP, VPP
from tests.bridge.vision import AUDIO, FULL

BINS, WINDOW = 20, 50  # of a spectrogram, and half a chunk in frames: transformers expects 13 positions of a chunk
TOWER = {
    "num_mel_bins": BINS, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 36, "d_model": 24,
    "n_window": WINDOW, "output_dim": 48,
}  # fmt: skip
# Three convolutions, and attention over two chunks.
TOWER_2D = TOWER | {"n_window_infer": 4 * WINDOW, "downsample_hidden_size": 6}


def qwen3_asr() -> Any:
    from transformers import Qwen3ASRConfig

    text = SHARED | {"model_type": "qwen3", "head_dim": 16, "rope_parameters": ROPE}
    return Qwen3ASRConfig(text_config=text, audio_config=TOWER_2D, audio_token_id=AUDIO, tie_word_embeddings=False)


FAMILIES: dict[str, Callable[[], Any]] = {"qwen3_asr": qwen3_asr}

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"": {}, "recompute": FULL},
    2: {
        "TP2 SP": {TP: 2, SP: True},
        "CP2": {CP: 2},
        "PP2": {PP: 2},
        "PP2 VPP2": {PP: 2, VPP: 2},
        "DP2": {},
    },
    4: {"TP2 SP CP2": {TP: 2, SP: True, CP: 2}},
}
