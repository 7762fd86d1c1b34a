"""Models of transformers 5.17 as they answer: the thinker of an Omni model, and mended faults of forward passes."""

from collections.abc import Sequence
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
                module.get_video_features = MethodType(_videos_alone(module.get_video_features), module)
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


def _videos_alone(features: Any) -> Any:
    """Return a method of LLaVA-OneVision that takes a list of videos, whose lengths may differ, in place of a tensor.

    The model puts one newline behind all that the method returns, which has those of the other videos. Each video has
    shape [frames, 3, height, width].
    """

    def encode(self: Any, pixel_values: Sequence[torch.Tensor], **settings: Any) -> Any:
        outputs = [features(video[None], **settings) for video in pixel_values]
        parts = []
        for output in outputs:
            parts += [output.pooler_output, self.image_newline[None, None].to(output.pooler_output)]
        outputs[0].pooler_output = torch.cat(parts[:-1], dim=1)
        return outputs[0]

    return encode
