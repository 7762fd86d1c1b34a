"""Module that holds a model's towers, as the chunks of a model hold the layers."""

from types import SimpleNamespace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from ..mapping.architecture import Audio, Vision
from .audio_tower import AUDIO_MODULES, AudioTower
from .vision_tower import VISION_MODULES, VisionTower

TOWER_MODULES = tuple(dict.fromkeys(VISION_MODULES + AUDIO_MODULES))  # all modules but the mergers


class TowerPart(nn.Module):
    """Vision and audio tower of a model; None: it has none.

    The functions that load, save and freeze parameters take it beside the chunks.
    """

    pre_process = post_process = False
    decoder = SimpleNamespace(layers=())

    def __init__(self, vision: Vision | None, audio: Audio | None, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.config = config
        self.vision = None if vision is None else VisionTower(vision, config, device)
        self.levels = 1 if vision is None else 1 + len(vision.deep_layers)  # levels of features, DeepStack's included
        self.audio = None if audio is None else AudioTower(audio, config, device, self.levels)
