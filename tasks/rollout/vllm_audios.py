"""Audios of prompts in vLLM, which gets the spectrograms of training, and encodes them as transformers does."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .request_audio import RequestAudio

HEARS = "MEGASWIFT_VLLM_HEARS"  # environment variable of vLLM's processes: the model takes audios
EXTENSION = f"{__name__}.HearingWorker"


def audio_data(audios: Sequence[RequestAudio]) -> dict[str, Any]:
    """Return the audios of a prompt as vLLM's Qwen3-ASR takes spectrograms: its own processor pads audios otherwise."""
    import torch

    lengths = [len(audio.spectrogram) for audio in audios]
    return {
        "input_audio_features": torch.from_numpy(np.concatenate([audio.spectrogram for audio in audios]).T.copy()),
        "audio_feature_lengths": torch.tensor(lengths),
        "feature_attention_mask": [torch.ones(length) for length in lengths],
    }


def hear() -> None:
    """Prepare vLLM for audios, before it starts. Its own processes prepare themselves when they import this module."""
    os.environ[HEARS] = "1"
    _accept_spectrograms()
    _encode_whole_chunks()


def _accept_spectrograms() -> None:
    """Have vLLM's processor of Qwen3-ASR take a text whose audios are spectrograms already.

    vLLM 0.26's looks for the length of an audio for each placeholder of a sample text, and fails where there is none.
    The placeholders of the prompt are expanded elsewhere.
    """
    from vllm.transformers_utils.processors.qwen3_asr import (  # pyright: ignore[reportMissingImports]
        Qwen3ASRProcessor,
    )

    expand = Qwen3ASRProcessor.replace_multimodal_special_tokens
    if getattr(expand, "takes_spectrograms", False):
        return

    def expand_known(self: Any, text: list[str], audio_lengths: Any) -> list[str]:
        lengths = list(audio_lengths)
        return expand(self, text, iter(lengths)) if lengths else text

    expand_known.takes_spectrograms = True  # pyright: ignore[reportFunctionMemberAccess]
    Qwen3ASRProcessor.replace_multimodal_special_tokens = expand_known


def _encode_whole_chunks() -> None:
    """Have vLLM's audio tower pad audios below a second to one, as transformers does.

    vLLM 0.26's pads chunks to the longest that it encodes together, so that features depend on what is beside them.
    """
    import torch
    from vllm.model_executor.models.qwen3_omni_moe_thinker import (  # pyright: ignore[reportMissingImports]
        Qwen3OmniMoeAudioEncoder,
    )

    forward = Qwen3OmniMoeAudioEncoder.forward
    if getattr(forward, "has_whole_chunks", False):
        return

    def forward_with_whole_chunk(self: Any, input_features: Any, feature_lens: Any, aftercnn_lens: Any) -> Any:
        chunk = 2 * self.n_window
        if int(feature_lens.max()) >= chunk:
            return forward(self, input_features, feature_lens, aftercnn_lens)
        positions = self._get_cnn_output_lengths(feature_lens.new_tensor([chunk]))
        silence = input_features.new_zeros(len(input_features), chunk)
        hidden = forward(
            self,
            torch.cat([input_features, silence], dim=1),
            torch.cat([feature_lens, feature_lens.new_tensor([chunk])]),
            torch.cat([aftercnn_lens, positions.to(aftercnn_lens)]),
        )
        return hidden[: -int(positions)]

    forward_with_whole_chunk.has_whole_chunks = True  # pyright: ignore[reportFunctionMemberAccess]
    Qwen3OmniMoeAudioEncoder.forward = forward_with_whole_chunk


class HearingWorker:
    """Extension of vLLM's worker, which imports this module before it makes the model."""


if os.environ.get(HEARS):
    _encode_whole_chunks()
