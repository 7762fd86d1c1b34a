"""Residual addition with an optional norm or scale on the branch's output, and layers with factors of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from ..mapping.architecture import ResidualFactors


class ResidualAdd(torch.nn.Module):
    """Replacement of megatron-core's bias-dropout-add in a layer spec, with a norm and a scale before the addition.

    Without dropout it calls the addition alone, which costs the host less time.
    """

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module] | None, scale: float):
        super().__init__()
        self.norm = norm and norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.scale = scale

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        return partial(self._add, training)

    def _add(self, training: bool, branch: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """Add a branch's (output, bias) to the residual, [sequence, batch, hidden_size]."""
        x, bias = branch
        if bias is not None:
            x = x + bias
        if self.norm is not None:
            x = self.norm(x)
        if self.scale != 1.0:
            x = x * self.scale
        return residual + (F.dropout(x, dropout, training) if dropout else x)


class ScaledLayer(TransformerLayer):
    """Layer whose output is multiplied by a number of the checkpoint, which is not trained."""

    layer_scalar: Tensor

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        self.register_buffer("layer_scalar", torch.empty(1, dtype=self.config.params_dtype, device=device))

    def forward(self, *args, **kwargs):
        hidden_states, context = super().forward(*args, **kwargs)
        assert isinstance(hidden_states, Tensor)
        return hidden_states * self.layer_scalar, context


class NormedResidualLayer(TransformerLayer):
    """Layer that adds its mixer and its MLP to their normed inputs, times factors (MiniMax-Text-01).

    See https://arxiv.org/abs/2501.08313, section 2.2.
    """

    def __init__(self, *args, factors: ResidualFactors, **kwargs):
        super().__init__(*args, **kwargs)
        # megatron-core would free the norms' outputs, which are the residuals.
        self.recompute_input_layernorm = self.recompute_pre_mlp_layernorm = False
        norms = (self.input_layernorm, factors.mixer_residual), (self.pre_mlp_layernorm, factors.mlp_residual)
        for norm, factor in norms:
            cast(torch.nn.Module, norm).register_forward_hook(partial(self._with_residual, factor))

    @staticmethod
    def _with_residual(factor: float, module: torch.nn.Module, inputs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a norm and the residual, which megatron-core's layer takes from a norm."""
        return output, output if factor == 1.0 else output * factor
