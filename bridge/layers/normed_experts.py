"""MoE layer whose routed and shared experts have norms of their own."""

from functools import partial
from typing import cast

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .moe import ExpertLayer
from .norm import NormBuilder


class NormedExpertLayer(ExpertLayer):
    """MoE layer with norms on the inputs and outputs of its routed experts, and on those of its shared one (Gemma 4).

    No norm is before it, since the router has one of its own (`Routing.input_norm`).
    """

    def __init__(self, config: TransformerConfig, *args, norm: NormBuilder, **kwargs):
        super().__init__(config, *args, **kwargs)
        build = partial(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.input_norm, self.output_norm = build(), build()
        self.shared_input_norm, self.shared_output_norm = build(), build()

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        return super().preprocess(self.input_norm(hidden_states), probs, routing_map)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        output = super().shared_experts_compute(self.shared_input_norm(hidden_states))
        return self.shared_output_norm(cast(Tensor, output))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        assert shared_expert_output is not None
        return self.output_norm(super().postprocess(output, None)) + shared_expert_output
