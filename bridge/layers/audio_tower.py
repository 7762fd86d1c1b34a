"""Audio tower: convolutions over a log-mel spectrogram, a transformer, and a projector to the language model.

Every rank holds all of it and encodes audios of its own; see model/vision_encoder.py. One class covers the towers that
`Audio` describes. Whisper: https://arxiv.org/abs/2212.04356, Qwen2.5-Omni: https://arxiv.org/abs/2503.20215,
Qwen3-Omni: https://arxiv.org/abs/2509.17765.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..mapping.architecture import Audio
from .audio_plan import AudioPlan
from .mergers import ACTIVATIONS, Linear
from .norm import LayerNorm
from .vision_tower import TowerLayer, make_attention

AUDIO_MODULES = "convs", "linear_conv", "layers", "final_norm"


class Convolution(nn.Module):
    """Convolution with a kernel of 3, in one dimension or in two: x [chunks, channels, (frequencies,) time]."""

    def __init__(
        self, inputs: int, outputs: int, *, dims: int, stride: int, config: TransformerConfig, device: torch.device
    ):
        super().__init__()
        kinds = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *[3] * dims, **kinds))
        self.bias = nn.Parameter(torch.empty(outputs, **kinds))
        self._convolve = partial(F.conv2d if dims == 2 else F.conv1d, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self._convolve(x, self.weight, self.bias))


class AudioProjector(nn.Module):
    """Projection of the tower's output: x [positions, hidden_size] -> [positions, output_size]."""

    def __init__(self, audio: Audio, config: TransformerConfig, device: torch.device):
        super().__init__()
        kinds = {"dtype": config.params_dtype, "device": device}
        self.linear_fc1 = None
        if audio.projector_hidden:
            self.linear_fc1 = Linear(audio.hidden_size, audio.hidden_size, **kinds)
        self.activation = ACTIVATIONS[audio.activation]
        self.linear_fc2 = Linear(audio.hidden_size, audio.output_size, **kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(x if self.linear_fc1 is None else self.activation(self.linear_fc1(x)))


class AudioTower(nn.Module):
    """Audio tower with uninitialized weights.

    levels: of the features that it returns, of which all but the first are zeros: the vision tower's DeepStack
    """

    def __init__(self, audio: Audio, config: TransformerConfig, device: torch.device, levels: int = 1):
        super().__init__()
        self.audio_settings, self._levels = audio, levels
        make = partial(Convolution, config=config, device=device)
        if audio.channels:
            sizes = [1, *[audio.channels] * audio.halvings]
            convs = [make(inputs, outputs, dims=2, stride=2) for inputs, outputs in pairwise(sizes)]
            frequencies = audio.mel_bins
            for _ in convs:
                frequencies = (frequencies + 1) // 2
            kinds = {"dtype": config.params_dtype, "device": device}
            self.linear_conv = Linear(audio.channels * frequencies, audio.hidden_size, bias=False, **kinds)
        else:
            sizes = (audio.mel_bins, 1), (audio.hidden_size, 2)
            convs = [make(inputs, audio.hidden_size, dims=1, stride=stride) for inputs, stride in sizes]
            self.linear_conv = None
        self.convs = nn.ModuleList(convs)
        attention = make_attention(audio, config)
        self.layers = nn.ModuleList(TowerLayer(audio, config, device, attention) for _ in range(audio.num_layers))
        self.final_norm = LayerNorm(audio.hidden_size, eps=audio.eps, dtype=config.params_dtype, device=device)
        self.merger = AudioProjector(audio, config, device)

    def encode(self, spectrograms: Tensor, plan: AudioPlan) -> list[Tensor]:
        """Return what the projector takes: [[features, hidden_size]].

        spectrograms: [frames, mel_bins], of audios behind each other
        """
        x = F.pad(spectrograms, (0, 0, 0, 1))[plan.frames].transpose(1, 2)  # [chunks, mel_bins, chunk]
        x = x.to(self.convs[0].weight.dtype)  # type: ignore[arg-type]
        if self.linear_conv is not None:
            x = x.unsqueeze(1)
        for number, convolution in enumerate(self.convs):
            if number and plan.masks is not None:
                mask = plan.masks[number - 1]
                x = x * mask.view(len(mask), *[1] * (x.dim() - 2), -1)
            x = convolution(x)
        if self.linear_conv is None:
            x = x.transpose(1, 2)
        else:
            x = x.permute(0, 3, 1, 2).flatten(2)  # [chunks, time, channels * frequencies]
            x = self.linear_conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        x = (x + plan.sines.to(x.dtype)).flatten(0, 1)[plan.rows]
        for layer in self.layers:
            x = layer(x, plan, plan.blocks)
        if plan.pairs is not None:
            x = (x[plan.pairs] + x[plan.pairs + 1]) / 2
        return [self.final_norm(x)]

    def merge(self, states: list[Tensor], plan: AudioPlan) -> Tensor:
        """Return the features of `encode`'s states: [levels, features, output_size]."""
        features = self.merger(states[0]).unsqueeze(0)
        return F.pad(features, (0, 0, 0, 0, 0, self._levels - 1)) if self._levels > 1 else features
