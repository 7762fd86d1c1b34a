"""Transformer layer whose attention and MLP have the same input (GPT-J; Cohere, https://arxiv.org/abs/2504.00698)."""

from typing import Any, cast

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class ParallelLayer(TransformerLayer):
    """Layer that adds attention(norm(x)) and mlp(norm(x)) to x, with one norm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.recompute_input_layernorm = False  # megatron-core would free the norm's output before the MLP reads it
        self.normalized: Tensor | None = None
        cast(torch.nn.Module, self.input_layernorm).register_forward_hook(self._keep_normalized)

    def _keep_normalized(self, module: torch.nn.Module, inputs: Any, output: Tensor | tuple[Tensor, Tensor]) -> None:
        self.normalized = output[0] if isinstance(output, tuple) else output

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Tensor:
        """Return the norm of the layer's input; hidden_states, with attention added to it, is the residual."""
        normalized, self.normalized = self.normalized, None
        assert normalized is not None
        return normalized
