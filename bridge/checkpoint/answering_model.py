"""Models of transformers as they answer: the thinker of an Omni model, and mended faults of forward passes."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any

import torch


def answering_model(model: Any) -> Any:
    """Return the part of a model that answers, with `forward` and `generate`, and mend its faults in place."""
    for module in model.modules():
        match type(module).__name__:
            case "Qwen3OmniMoeAudioEncoder":
                module.forward = MethodType(_audios_alone(module.forward), module)
            case "LlavaOnevisionModel":
                module.get_video_features = _videos_alone(module)
    return getattr(model, "thinker", model)  # the class of a whole Omni model has no forward pass


def _audios_alone(forward: Any) -> Any:
    """Return a forward pass of Qwen3-Omni's audio tower whose features of an audio do not depend on others.

    transformers pads an audio below a chunk to the longest chunk beside it, and does not mask what convolutions make
    of that.
    """

    def encode(self: Any, input_features: Any, feature_lens: Any, **settings: Any) -> Any:
        if len(feature_lens) == 1 or int(feature_lens.min()) >= 2 * self.n_window:
            return forward(input_features, feature_lens=feature_lens, **settings)
        audios = zip(input_features.split(feature_lens.tolist(), dim=1), feature_lens.split(1), strict=True)
        outputs = [forward(audio, feature_lens=length, **settings) for audio, length in audios]
        outputs[0].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs])
        return outputs[0]

    return encode


def _videos_alone(model: Any) -> Callable[..., Any]:
    """Return LLaVA-OneVision's `get_video_features` for a list of videos, whose lengths may differ, not a tensor.

    Each video has shape [frames, 3, height, width]. transformers before 5.20 puts one newline behind all that the
    method returns; later ones have the method put one behind each video.
    """
    features = model.get_video_features
    name = next(iter(signature(features).parameters))  # `generate` passes it by name
    adds_newlines = name == "pixel_values"  # its name before 5.20

    @wraps(features)
    def encode(*arguments: list[torch.Tensor], **settings: Any) -> Any:
        videos = arguments[0] if arguments else settings.pop(name)
        outputs = [features(video[None], **settings) for video in videos]
        parts = []
        for output in outputs:
            parts.append(output.pooler_output)
            if adds_newlines:
                parts.append(model.image_newline[None, None].to(output.pooler_output))
        outputs[0].pooler_output = torch.cat(parts[:-1] if adds_newlines else parts, dim=1)
        return outputs[0]

    return encode
