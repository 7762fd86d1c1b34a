"""Vision tower of a run: what its layers save for the backward pass, and its time.

Every rank holds the whole tower. The ranks of tensor, pipeline and context parallelism divide the images of a micro
batch (bridge/model/vision_encoder.py).
"""

import math
from dataclasses import dataclass

from ...bridge.layers.vision_tower import FAST_HEAD_DIMS, GELUS
from ...bridge.mapping.architecture import Vision
from ...bridge.model.encoding_groups import CALL_PATCHES, FORWARD_CALL_PATCHES
from ..observability.flops import VisionFlops
from .gpu_layout import GpuLayout

BYTES = 2  # size of a bf16 value
IMAGE_SHARE = 0.5  # assumed for packs, where the data is not known
IMAGE_TOKENS = 600  # mean tokens per image
# Share of visual tokens in the micro batch with most of them, relative to the mean, and 2 - SPREAD in that with fewest.
# The sum of some micro batches varies less, by the root of their number. Packs of chats with images of 256 to 1,024
# tokens (docs/results.md).
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
    fuses_layers: bool = True  # norms and what is behind them are one function (kernels/normed_linear.py)
    # Its forward pass, for its backward pass; None: with pipeline parallelism, for what does not fit into memory.
    recomputes: bool | None = None

    @property
    def trains(self) -> bool:
        return self.trains_layers or self.trains_mergers

    @property
    def shares(self) -> tuple[float, float]:
        """Return the shares of visual tokens in the micro batches with fewest and most."""
        return self.image_share * (2 - SPREAD), min(self.image_share * SPREAD, 1.0)

    def recomputed_share(self, layout: GpuLayout, visual_tokens: float, micro_batches: int, kept_patches: int) -> float:
        """Return the share of the patches whose forward pass is recomputed. Arguments as of `bytes_of_micro_batches`"""
        if not self.trains_layers or (layout.pipeline == 1 and not self.recomputes):
            return 0.0
        kept = self._saved_patches(layout, self._patches(layout, visual_tokens), micro_batches, kept_patches)
        return 1 - kept / (micro_batches * self._patches(layout, visual_tokens))

    def is_bounded_by_memory(self, layout: GpuLayout) -> bool:
        """Return whether the patches whose activations are kept depend on what fits into memory."""
        return self.trains_layers and not self.recomputes and (layout.pipeline == 1 or self.recomputes is None)

    def least_patches(self, layout: GpuLayout, visual_tokens: float, micro_batches: int) -> int:
        """Return the patches whose activations a rank keeps at least. Arguments as of `bytes_of_micro_batches`"""
        return int(self._saved_patches(layout, self._patches(layout, visual_tokens), micro_batches, 0))

    def patch_bytes(self, layout: GpuLayout) -> float:
        """Return the bytes of a further patch whose activations are kept."""
        if layout.pipeline > 1:
            return self._saved_bytes  # its pixels and features are kept anyway
        ranks = layout.tensor * layout.context * layout.pipeline
        features = self._feature_bytes * ranks / (layout.context * self.vision.merge_size**2)
        return self._input_bytes + self._saved_bytes + features

    def bytes_of_micro_batches(
        self, layout: GpuLayout, visual_tokens: float, mean_tokens: float, micro_batches: int, kept_patches: int
    ) -> tuple[float, float]:
        """Return the bytes that a rank keeps of the images of its micro batches, and those that are recomputed.

        visual_tokens: of a micro batch, of all ranks that divide it, and mean_tokens, their mean; micro_batches: of a
        step; kept_patches: of a rank, as of VisionEncoder
        """
        patches, square = self._patches(layout, visual_tokens), self.vision.merge_size**2
        encoded = self._encoded(layout, patches, micro_batches, kept_patches)
        if visual_tokens > mean_tokens:
            visual_tokens = mean_tokens + (visual_tokens - mean_tokens) / math.sqrt(encoded)
            patches = self._patches(layout, visual_tokens)
        # Features are on each rank that has their tokens, with gradients if the tower is trained.
        tokens = visual_tokens / layout.context
        if not self.trains and layout.pipeline == 1:
            tokens = max(tokens, FORWARD_CALL_PATCHES / square)  # micro batches that are encoded together
        features = self._feature_bytes * tokens * encoded
        if not self.trains:
            return features, 0.0
        if not self.trains_layers:
            states = BYTES * (1 + len(self.vision.deep_layers)) * self.vision.hidden_size
            at_a_time = min(patches * encoded, max(patches, CALL_PATCHES))
            return features + patches * encoded * states + at_a_time * self._merger_bytes, 0.0
        saved = self._saved_patches(layout, patches, micro_batches, kept_patches)
        recomputed = min(patches * encoded - saved, CALL_PATCHES)
        kept = patches * encoded * self._input_bytes + saved * self._saved_bytes
        return features + kept, recomputed * self._saved_bytes

    def _patches(self, layout: GpuLayout, visual_tokens: float) -> float:
        """Return the patches of a micro batch on a rank."""
        return visual_tokens / (layout.tensor * layout.context * layout.pipeline) * self.vision.merge_size**2

    def _encoded(self, layout: GpuLayout, patches: float, micro_batches: int, kept_patches: int) -> int:
        """Return how many micro batches have features at a time. patches: of a micro batch on a rank"""
        if layout.pipeline > 1:
            return micro_batches  # all of a step are encoded before it
        if not self.trains:
            return 1
        limit = int(CALL_PATCHES // max(patches, 1))
        if self.trains_layers and not self.recomputes:
            ranks = layout.tensor * layout.context
            limit = max(min(ranks, limit), int(kept_patches // max(patches, 1)))
        return max(min(limit, micro_batches), 1)

    def _saved_patches(self, layout: GpuLayout, patches: float, micro_batches: int, kept_patches: int) -> float:
        """Return the patches whose layers' activations are kept at a time."""
        encoded = patches * self._encoded(layout, patches, micro_batches, kept_patches)
        if self.recomputes or not self.trains_layers:
            return 0.0
        return min(kept_patches, encoded) if layout.pipeline > 1 and self.recomputes is None else encoded

    @property
    def _feature_bytes(self) -> float:
        """Bytes of a token's features, with their gradients."""
        levels = 1 + len(self.vision.deep_layers)
        return BYTES * levels * self.vision.output_size * (2 if self.trains else 1)

    @property
    def _input_bytes(self) -> float:
        """Bytes of a patch's pixels."""
        return BYTES * self.vision.channels * self.vision.temporal_patch_size * self.vision.patch_size**2

    @property
    def _merger_bytes(self) -> float:
        """Bytes that the mergers save of a patch: norms, hidden layers and activations."""
        levels, square = 1 + len(self.vision.deep_layers), self.vision.merge_size**2
        return BYTES * 3 * (levels * self.vision.hidden_size + (self.vision.visual_words or 0) / square)

    @property
    def _saved_bytes(self) -> float:
        """Bytes that layers and mergers save of a patch."""
        values = _layer_values(self.vision, fuses_layers=self.fuses_layers)
        return self.vision.num_layers * BYTES * values + self._merger_bytes

    def seconds(self, layout: GpuLayout, visual_tokens: float, peak_flops: float, recomputed: float) -> float:
        """Return the seconds of a micro batch's images on a rank.

        visual_tokens: as of `bytes_of_micro_batches`; recomputed: share of patches
        """
        flops = VisionFlops.of(self.vision, trains_layers=self.trains_layers, trains_mergers=self.trains_mergers)
        side = self.vision.merge_size * math.sqrt(self.image_tokens)
        grids = [(1, side, side)]
        cost: float = flops.training(grids)  # type: ignore[arg-type]  # sides need not be whole
        cost += recomputed * flops.forward(grids)  # type: ignore[arg-type]
        rate = TRAINING_RATE if self.trains_layers else FORWARD_RATE
        ranks = layout.tensor * layout.context * layout.pipeline
        return cost * visual_tokens / self.image_tokens / ranks / (rate * peak_flops)


def _layer_values(vision: Vision, *, fuses_layers: bool) -> int:
    """Return the values that a layer saves per patch: of its norms, attention and MLP."""
    hidden, heads = vision.hidden_size, vision.num_heads
    dim = hidden // heads
    padded = next((size for size in FAST_HEAD_DIMS if size >= dim), dim)
    attention = 4 * heads * padded + (hidden if padded > dim else 0)  # with a copy of the output without padding
    fuses_mlp = fuses_layers and vision.activation in GELUS and not (vision.gated or vision.layer_scale)
    norms = 4 - fuses_layers - fuses_mlp  # inputs of both, and outputs
    norms += 2 if vision.post_norms else 0  # inputs of those on outputs
    if vision.head_norms:  # their inputs
        attention += 3 * hidden + heads * padded
    return norms * hidden + attention + (3 if vision.gated else 1 if fuses_mlp else 2) * vision.ffn_hidden_size
