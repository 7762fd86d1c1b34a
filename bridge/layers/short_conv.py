"""Gated short convolutions of LFM2 (https://arxiv.org/abs/2511.23404, section 2): a `self_attention` for layer specs.

The channels are in equal groups, so that ranks have some of them; no channel sees another.
"""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import ShortConvolution
from .delta_rule import DeltaLayout, causal_conv
from .grouped_mixer import GroupedMixer, MixerWeight


class ShortConv(GroupedMixer):
    """Convolution of x times an entry gate, times an exit gate, with the arguments of `GroupedMixer`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj,
        out_proj,
        pg_collection=None,
        name: str | None = None,
        **_,
    ):
        sizes: ShortConvolution = config.architecture.short_conv  # type: ignore[attr-defined]
        channels = config.hidden_size // sizes.groups
        super().__init__(
            config,
            layer_number,
            in_proj,
            out_proj,
            pg_collection,
            groups=sizes.groups,
            noun="groups of channels of this model's short convolutions",
            sections=(2 * channels, channels),
        )
        self.conv = MixerWeight(config, self.groups * channels, 1, sizes.kernel, split=True)

    def _mix(self, entry: Tensor, layout: DeltaLayout) -> Tensor:
        """entry [sequence, rows, groups, gate and x] of full documents -> [sequence, rows, groups, 1, channels]"""
        sequence, rows, groups, _ = entry.shape
        gate, x = entry.chunk(2, dim=-1)
        weight = self._local(self.conv(), groups).flatten(0, 1)
        convolved = causal_conv((gate * x).flatten(0, 1).flatten(1), weight, layout, is_activated=False)
        return convolved.view(sequence, rows, groups, 1, -1)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply the exit gate; there is no norm."""
        return x * gate
