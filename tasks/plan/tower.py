"""Vision tower of a run: what its layers save for the backward pass, and its time.

Every rank holds the whole tower. The ranks of tensor, pipeline and context parallelism divide the images of a micro
batch (bridge/model/vision_encoder.py).
"""

import math
from dataclasses import dataclass

from ...bridge.layers.vision_tower import FAST_HEAD_DIMS
from ...bridge.mapping.architecture import Vision
from ...bridge.model.vision_encoder import CALL_PATCHES, FORWARD_CALL_PATCHES
from ..observability.flops import VisionFlops
from .gpu_layout import GpuLayout

BYTES = 2  # size of a bf16 value
IMAGE_SHARE = 0.5  # assumed for packs, where the data is not known
IMAGE_TOKENS = 600  # mean tokens per image
# Share of visual tokens in the micro batch with most of them, relative to the mean, and 2 - SPREAD in that with fewest.
# Packs of chats with images of 256 to 1,024 tokens (docs/results.md).
SPREAD = 1.35
# Share of the peak that the tower reaches in its forward pass, and in training.
FORWARD_RATE, TRAINING_RATE = 0.41, 0.32


@dataclass(frozen=True)
class TowerWork:
    """Vision tower, its trained parts, and its images."""

    vision: Vision
    trains_layers: bool
    trains_mergers: bool
    image_share: float  # visual tokens in all tokens, in the mean
    image_tokens: float  # visual tokens of an image, in the mean
    recomputes: bool | None = None  # its forward pass, for its backward pass; None: with pipeline parallelism

    @property
    def trains(self) -> bool:
        return self.trains_layers or self.trains_mergers

    @property
    def shares(self) -> tuple[float, float]:
        """Return the shares of visual tokens in the micro batches with fewest and most."""
        return self.image_share * (2 - SPREAD), min(self.image_share * SPREAD, 1.0)

    def is_recomputed(self, layout: GpuLayout) -> bool:
        return self.trains_layers and (layout.pipeline > 1 if self.recomputes is None else self.recomputes)

    def bytes_of_micro_batches(
        self, layout: GpuLayout, visual_tokens: float, micro_batches: int
    ) -> tuple[float, float]:
        """Return the bytes that a rank keeps of the images of its micro batches, and those that are recomputed.

        visual_tokens: of a micro batch, of all ranks that divide it; micro_batches: of a step
        """
        vision, ranks = self.vision, layout.tensor * layout.context * layout.pipeline
        square, levels = vision.merge_size**2, 1 + len(vision.deep_layers)
        patches = visual_tokens / ranks * square
        kept = micro_batches  # pipelines encode all of a step before it
        if layout.pipeline == 1:  # those that are encoded together
            kept = max(min(ranks, micro_batches, int(CALL_PATCHES // max(patches, 1))), 1) if self.trains else 1
        # Features are on each rank that has their tokens, with gradients if the tower is trained.
        tokens = visual_tokens / layout.context
        if not self.trains and layout.pipeline == 1:
            tokens = max(tokens, FORWARD_CALL_PATCHES / square)  # micro batches that are encoded together
        features = BYTES * levels * vision.output_size * tokens * kept * (2 if self.trains else 1)
        inputs = BYTES * vision.channels * vision.temporal_patch_size * vision.patch_size**2
        # The mergers' norms, hidden layers and activations.
        mergers = BYTES * 3 * (levels * vision.hidden_size + (vision.visual_words or 0) / square)
        saved = vision.num_layers * BYTES * _layer_values(vision) + mergers
        if not self.trains:
            return features, 0.0
        if not self.trains_layers:
            return features + patches * kept * BYTES * levels * vision.hidden_size + patches * mergers, 0.0
        if not self.is_recomputed(layout):
            return features + patches * kept * (inputs + saved), 0.0
        return features + patches * kept * inputs, min(patches * kept, CALL_PATCHES) * saved

    def seconds(self, layout: GpuLayout, visual_tokens: float, peak_flops: float) -> float:
        """Return the seconds of a micro batch's images on a rank. visual_tokens: as of `bytes_of_micro_batches`"""
        flops = VisionFlops.of(self.vision, trains_layers=self.trains_layers, trains_mergers=self.trains_mergers)
        side = self.vision.merge_size * math.sqrt(self.image_tokens)
        grids = [(1, side, side)]
        cost: float = flops.training(grids)  # type: ignore[arg-type]  # sides need not be whole
        if self.is_recomputed(layout):
            cost += flops.forward(grids)  # type: ignore[arg-type]
        rate = TRAINING_RATE if self.trains_layers else FORWARD_RATE
        ranks = layout.tensor * layout.context * layout.pipeline
        return cost * visual_tokens / self.image_tokens / ranks / (rate * peak_flops)


def _layer_values(vision: Vision) -> float:
    """Return the values that a layer saves per patch: of its norms, attention and MLP."""
    hidden, heads = vision.hidden_size, vision.num_heads
    dim = hidden // heads
    padded = next((size for size in FAST_HEAD_DIMS if size >= dim), dim)
    attention = 4 * heads * padded + (hidden if padded > dim else 0)  # with a copy of the output without padding
    return 4 * hidden + attention + (3 if vision.gated else 2) * vision.ffn_hidden_size
