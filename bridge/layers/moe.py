"""MoE layer whose token dispatchers use our kernels: kernels/exchange.py between GPUs of a host, else permute.py."""

from copy import copy
from typing import cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .linear import ReplicatedLinear
from .router import Router


class ExpertLayer(MoELayer):
    """megatron-core's MoE layer, with a dispatcher of ours if `config.fuses_permutation`.

    With `Architecture.expert_latent` the routed experts work on a projection of the input, and the sum of their outputs
    is projected back (LatentMoE of Nemotron 3). megatron-core has this with Transformer Engine only.
    """

    def __init__(self, config: TransformerConfig, *args, pg_collection: ProcessGroupCollection | None = None, **kwargs):
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        self.reads_peers = False  # tokens reach their experts through memory that the GPUs share
        if config.fuses_permutation:  # type: ignore[attr-defined]
            cast(Router, self.router).is_compact = True
            self.token_dispatcher = self._dispatcher(config, groups)
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if size := config.architecture.expert_latent:  # type: ignore[attr-defined]
            self.fc1_latent_proj = ReplicatedLinear(config, config.hidden_size, size)
            self.fc2_latent_proj = ReplicatedLinear(config, size, config.hidden_size)

    def _dispatcher(self, config: TransformerConfig, groups: ProcessGroupCollection) -> MoETokenDispatcher:
        if groups.ep.size() > 1 and groups.expt_tp.size() == 1 and torch.cuda.is_available():
            from .peer_exchange import PeerDispatcher, exchange_of

            if exchange := exchange_of(groups.ep):
                self.reads_peers = True
                return PeerDispatcher(exchange, self.num_local_experts, config, groups)
        return Dispatcher(self.num_local_experts, self.local_expert_indices, config, groups)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        if self.fc1_latent_proj is not None:
            hidden_states = self.fc1_latent_proj(hidden_states)
        return super().preprocess(hidden_states, probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        if self.fc2_latent_proj is None:
            return super().postprocess(output, shared_expert_output)
        assert self.token_dispatcher is not None
        output = self.fc2_latent_proj(self.token_dispatcher.combine_postprocess(output))
        return output if shared_expert_output is None else output + shared_expert_output


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all dispatcher with fused permutations; it drops no tokens.

    It takes the indices of each token's experts instead of a routing map over all experts. The number of rows per
    expert stays on the device: the host waits only for the split sizes of an all-to-all, if there is one.
    """

    def __init__(self, experts: int, indices: list[int], config: TransformerConfig, groups: ProcessGroupCollection):
        config = copy(config)
        config.moe_permute_fusion = True  # keeps the inputs of the chunk sort on the device too
        super().__init__(experts, indices, config, groups)
        self.ranks = self.ep_size * self.tp_size
        self.sorts_chunks = self.ranks > 1 and experts > 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows sorted by expert, and their weights.

        hidden_states: [..., hidden_size]
        routing_map, probs: [tokens, topk], the experts of each token and their weights
        """
        from ..kernels.permute import permute, sort_map

        self.hidden_shape, self.probs = hidden_states.shape, probs
        self.row_map, counts = sort_map(routing_map, self.num_experts)
        # megatron-core sums each expert's column of the routing map; `counts` is that sum already.
        self.tokens_per_expert = counts if self.ranks == 1 else self.preprocess(counts.unsqueeze(0))
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_dtoh_and_synchronize("before_permutation_1")
        return permute(hidden_states.flatten(0, -2), self.row_map, probs)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the received rows sorted by expert, the number of rows per expert, and the weights."""
        from ..kernels.permute import chunk_sort_map, permute

        rows, weights, counts = global_input_tokens, global_probs, cast(Tensor, self.tokens_per_expert)
        self.tokens_per_expert = None
        if self.tp_size > 1:
            rows, weights = (
                gather_from_sequence_parallel_region(part, group=self.tp_group, output_split_sizes=self._tp_sizes())
                for part in (rows, weights)
            )
        if self.sorts_chunks:
            self.chunk_sort_map = chunk_sort_map(self.num_global_tokens_per_local_expert, len(rows))
            rows, weights = permute(rows, self.chunk_sort_map, weights.unsqueeze(1))
        return rows, counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' rows in the order of reception."""
        from ..kernels.permute import unpermute

        if self.sorts_chunks:
            hidden_states = unpermute(hidden_states, self.chunk_sort_map)
            del self.chunk_sort_map
        if self.tp_size > 1:
            states = hidden_states.to(self.probs.dtype)
            reduced = reduce_scatter_to_sequence_parallel_region(
                states, group=self.tp_group, input_split_sizes=self._tp_sizes()
            )
            hidden_states = reduced.to(hidden_states.dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum of each token's rows, in the shape of the layer's input."""
        from ..kernels.permute import unpermute

        output = unpermute(permutated_local_input_tokens, self.row_map).view(self.hidden_shape)
        del self.row_map, self.probs  # autograd keeps what the backward pass needs
        if self.shared_experts is not None:
            output += cast(Tensor, self.shared_experts.get_output())
        return output

    def _tp_sizes(self) -> list[int]:
        assert self.output_splits_tp is not None
        return self.output_splits_tp.tolist()

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None):
        if self.ranks > 1:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert
