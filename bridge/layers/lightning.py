"""Lightning attention of MiniMax-Text-01 (https://arxiv.org/abs/2501.08313): a `self_attention` for layer specs.

It is linear attention, with a decay for each head that depends on the head and the layer alone. A group is one head.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor

from .delta_rule import DeltaLayout
from .fla_kernels import FlaKernels, from_row, to_row
from .grouped_mixer import GroupedMixer, Groups, MixerWeight
from .norm import mean_over_ranks
from .state_space import state_space

NORM_EPS = 1e-6  # transformers' class takes its norm's default, not that of config.json


class LightningAttention(GroupedMixer):
    """Lightning attention, with the arguments of `GroupedMixer`."""

    def _groups(self, config: TransformerConfig) -> Groups:
        self.dim = not_none(config.kv_channels)
        noun = "heads of this model's lightning attention"
        return Groups(config.num_attention_heads, noun, (3 * self.dim, self.dim))

    def _add_modules(self, config: TransformerConfig) -> None:
        self.norm = MixerWeight(config, self.groups * self.dim, split=True)

    def slopes(self) -> Tensor:
        """Return how much less the logarithm of the state is after each token, for this rank's heads."""
        heads, layers = self.config.num_attention_heads, self.config.num_layers
        first = self.tp_group.rank() * self.groups
        numbers = torch.arange(first + 1, first + self.groups + 1, device=self.norm.weight.device)
        depth = 1 - (self.layer_number - 1) / (layers - 1 + 1e-5) + 1e-5
        return torch.exp2(numbers * (-8 / heads)) * depth

    def _mix(self, qkv: Tensor, layout: DeltaLayout) -> Tensor:
        """qkv [sequence, rows, heads, 3 * head dim] of full documents -> [sequence, rows, heads, 1, head dim]"""
        sequence, rows, heads, _ = qkv.shape
        decay = -self._local(self.slopes(), heads)
        return self._run(qkv.flatten(0, 1), decay, layout).view(sequence, rows, heads, 1, -1)

    def _run_torch(self, qkv: Tensor, decay: Tensor, layout: DeltaLayout) -> Tensor:
        """qkv [tokens, heads, 3 * head dim], decay [heads, 1] -> [tokens, heads, 1, head dim]"""
        query, key, value = F.silu(qkv).chunk(3, dim=-1)
        decay = decay.expand(len(qkv), -1, -1)
        return state_space(value.unsqueeze(2), key, query, torch.ones_like(decay), decay, layout)

    def _run_fla(self, kernels: FlaKernels, qkv: Tensor, decay: Tensor, layout: DeltaLayout) -> Tensor:
        query, key, value = to_row(F.silu(qkv), layout).chunk(3, dim=-1)
        output, _ = kernels.decayed_attention(
            *(x.contiguous() for x in (query, key, value)),
            g_gamma=decay.flatten(),
            scale=1.0,
            cu_seqlens=layout.cu_seqlens,
        )
        return from_row(output, layout)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm all heads together."""
        mean = mean_over_ranks(x.float().square().mean(dim=(-3, -2, -1), keepdim=True), self.tp_group)
        normed = (x.float() * (mean + NORM_EPS).rsqrt()).to(x.dtype)
        return gate.sigmoid() * (self.norm().view(self.groups, 1, -1) * normed)
