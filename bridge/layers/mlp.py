"""Activation of gated MLPs."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..kernels import usable


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, in place of the Transformer Engine activation module of megatron-core's MLP.

    x [..., 2 * width], gates first -> [..., width]
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if usable(x):
            from ..kernels.swiglu import swiglu

            return swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
