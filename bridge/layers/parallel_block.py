"""Layers whose parts have the same input: attention and MLP, or attention and Mamba-2."""

from typing import Any, cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class ParallelLayer(TransformerLayer):
    """Layer that adds attention(norm(x)) and mlp(norm(x)) to x, with one norm.

    So are GPT-J and Cohere, https://arxiv.org/abs/2504.00698.
    """

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


class ParallelMixers(MegatronModule):
    """Attention and Mamba-2 of the same input, summed with `Architecture.mixer_scales`: a `self_attention` for specs.

    See Falcon-H1, https://arxiv.org/abs/2507.22448, section 2.1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attention: ModuleSpec,
        mamba: ModuleSpec,
        **settings,
    ):
        super().__init__(config=config)
        self.scales: tuple[float, float] = config.architecture.mixer_scales  # type: ignore[attr-defined]
        settings |= {"config": config, "layer_number": layer_number}
        self.attention, self.mamba = build_module(attention, **settings), build_module(mamba, **settings)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        """hidden_states [sequence, rows, hidden_size] -> (the same, no bias)"""
        outputs = [mixer(hidden_states, *args, **kwargs) for mixer in (self.attention, self.mamba)]
        terms = []
        for scale, (output, bias) in zip(self.scales, outputs, strict=True):
            terms.append(scale * (output if bias is None else output + bias))
        return terms[0] + terms[1], None
