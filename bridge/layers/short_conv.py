"""Gated short convolutions of LFM2 (https://arxiv.org/abs/2511.23404, section 2): a `self_attention` for layer specs.

The channels are in equal groups, so that ranks have some of them; no channel sees another.
"""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import ShortConvolution
from .delta_rule import DeltaLayout, causal_conv
from .fla_kernels import FlaKernels, from_row
from .grouped_mixer import GroupedMixer, Groups, MixerWeight


class ShortConv(GroupedMixer):
    """Convolution of x times an entry gate, times an exit gate, with the arguments of `GroupedMixer`."""

    is_recomputed = False

    def _groups(self, config: TransformerConfig) -> Groups:
        sizes: ShortConvolution = config.architecture.short_conv  # type: ignore[attr-defined]
        self.kernel, self.channels = sizes.kernel, config.hidden_size // sizes.groups
        noun = "groups of channels of this model's short convolutions"
        return Groups(sizes.groups, noun, (2 * self.channels, self.channels))

    def _add_modules(self, config: TransformerConfig) -> None:
        self.conv = MixerWeight(config, self.groups * self.channels, 1, self.kernel, split=True)

    def _mix(self, entry: Tensor, layout: DeltaLayout) -> Tensor:
        """entry [sequence, rows, groups, gate and x] of full documents -> [sequence, rows, groups, 1, channels]"""
        sequence, rows, groups, _ = entry.shape
        gate, x = entry.chunk(2, dim=-1)
        weight = self._local(self.conv(), groups).flatten(0, 1)
        return self._run((gate * x).flatten(0, 1).flatten(1), weight, layout).view(sequence, rows, groups, 1, -1)

    def _run_torch(self, x: Tensor, weight: Tensor, layout: DeltaLayout) -> Tensor:
        """x [tokens, channels] -> the same shape"""
        return causal_conv(x, weight, layout, is_activated=False)

    def _run_fla(self, kernels: FlaKernels, x: Tensor, weight: Tensor, layout: DeltaLayout) -> Tensor:
        return from_row(kernels.convolve(x, weight, layout, is_activated=False), layout)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply the exit gate; there is no norm."""
        return x * gate
