"""Audios of prompts in vLLM, which gets the spectrograms of training, and encodes them as transformers does."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from .request_audio import RequestAudio
from .vllm_kwargs import is_vllm_before

HEARS = "MEGASWIFT_VLLM_HEARS"  # environment variable of vLLM's processes: model_type of a model that takes audios
ASR = "qwen3_asr"
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


def hear(model_type: str) -> None:
    """Prepare vLLM for audios, before it starts. Its own processes prepare themselves when they import this module."""
    os.environ[HEARS] = model_type
    _accept_spectrograms()
    _mend_models()


def _accept_spectrograms() -> None:
    """Have the processors of audios take a text whose audios are spectrograms already.

    vLLM gives them a sample text with a placeholder for each, and they look for its length. The placeholders of the
    prompt are expanded elsewhere. Qwen3-ASR's is asked only for sounds since vLLM 0.32.
    """
    from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor
    from vllm.model_executor.models.qwen2_5_omni_thinker import (  # pyright: ignore[reportMissingImports]
        Qwen2_5OmniThinkerProcessingInfo,
    )
    from vllm.model_executor.models.qwen3_omni_moe_thinker import (  # pyright: ignore[reportMissingImports]
        Qwen3OmniMoeThinkerProcessingInfo,
    )

    processors: list[Any] = [Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor]
    if is_vllm_before("0.32"):
        from vllm.transformers_utils.processors.qwen3_asr import (  # pyright: ignore[reportMissingImports]
            Qwen3ASRProcessor,
        )

        processors.append(Qwen3ASRProcessor)
        # Its Qwen3-Omni parses media as Qwen2-Audio, which takes features in place of spectrograms.
        Qwen3OmniMoeThinkerProcessingInfo.get_data_parser = Qwen2_5OmniThinkerProcessingInfo.get_data_parser
    for processor in processors:
        expand = processor.replace_multimodal_special_tokens
        if not getattr(expand, "takes_spectrograms", False):
            processor.replace_multimodal_special_tokens = _with_unknown_lengths(expand)


def _with_unknown_lengths(expand: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return a processor's method that expands placeholders, with one token for each audio without a length."""

    def expand_known(self: Any, text: list[str], audio_lengths: Iterable[Any], *sizes: Any, **settings: Any) -> Any:
        return expand(self, text, chain(audio_lengths, repeat(1)), *sizes, **settings)

    expand_known.takes_spectrograms = True  # pyright: ignore[reportFunctionMemberAccess]
    return expand_known


def _mend_models() -> None:
    _encode_short_audios()
    if is_vllm_before("0.32"):
        _place_media()


def _place_media() -> None:
    """Have vLLM's Qwen3-Omni give the tokens of a medium the positions of transformers.

    Before 0.32 it takes the first of them for the token that encloses them, so that each has the position of another.
    """
    from vllm.model_executor.models.qwen3_omni_moe_thinker import (  # pyright: ignore[reportMissingImports]
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    places = Qwen3OmniMoeThinkerForConditionalGeneration.iter_mm_features
    if getattr(places, "is_enclosed", False):
        return

    def enclosed_places(self: Any, features: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
        for place, kind, sizes in places(self, features):
            yield place - 1, kind, sizes

    enclosed_places.is_enclosed = True  # pyright: ignore[reportFunctionMemberAccess]
    Qwen3OmniMoeThinkerForConditionalGeneration.iter_mm_features = enclosed_places


def _encode_short_audios() -> None:
    """Have vLLM's audio tower encode audios below a second as transformers does, and as training.

    vLLM's pads chunks to the longest that it encodes together, so that features depend on what is beside them.
    """
    from vllm.model_executor.models.qwen3_omni_moe_thinker import (  # pyright: ignore[reportMissingImports]
        Qwen3OmniMoeAudioEncoder,
    )

    forward = Qwen3OmniMoeAudioEncoder.forward
    if getattr(forward, "has_short_audios", False):
        return

    def forward_with_short(self: Any, input_features: Any, feature_lens: Any, aftercnn_lens: Any) -> Any:
        chunk = 2 * self.n_window
        if int(feature_lens.min()) >= chunk:
            return forward(self, input_features, feature_lens, aftercnn_lens)
        encode = _padded if os.environ[HEARS] == ASR else _apart
        return encode(partial(forward, self), self, input_features, feature_lens, aftercnn_lens)

    forward_with_short.has_short_audios = True  # pyright: ignore[reportFunctionMemberAccess]
    Qwen3OmniMoeAudioEncoder.forward = forward_with_short


def _padded(forward: Callable[..., Any], tower: Any, input_features: Any, feature_lens: Any, aftercnn_lens: Any) -> Any:
    """Encode audios beside a silent second, as Qwen3-ASR's are padded to one."""
    import torch

    chunk = 2 * tower.n_window
    positions = tower._get_cnn_output_lengths(feature_lens.new_tensor([chunk]))
    hidden = forward(
        torch.cat([input_features, input_features.new_zeros(len(input_features), chunk)], dim=1),
        torch.cat([feature_lens, feature_lens.new_tensor([chunk])]),
        torch.cat([aftercnn_lens, positions.to(aftercnn_lens)]),
    )
    return hidden[: -int(positions)]


def _apart(forward: Callable[..., Any], _: Any, input_features: Any, feature_lens: Any, aftercnn_lens: Any) -> Any:
    """Encode each audio by itself, as Qwen3-Omni's are."""
    import torch

    parts = zip(
        input_features.split(feature_lens.tolist(), 1), feature_lens.split(1), aftercnn_lens.split(1), strict=True
    )
    return torch.cat([forward(*part) for part in parts])


class HearingWorker:
    """Extension of vLLM's worker, which imports this module before it makes the model."""


if os.environ.get(HEARS):
    _mend_models()
