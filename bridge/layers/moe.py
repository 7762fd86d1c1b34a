"""The layer of experts, and how tokens reach them and come back, by the kernels of fused/permute.py."""

from copy import copy
from typing import cast

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .router import Router


class ExpertLayer(MoELayer):
    """megatron-core's, with our dispatcher where `config.permutes`."""

    def __init__(self, config: TransformerConfig, *args, pg_collection: ProcessGroupCollection | None = None, **kwargs):
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        if config.permutes:  # type: ignore[attr-defined]
            cast(Router, self.router).compact = True
            self.token_dispatcher = Dispatcher(self.num_local_experts, self.local_expert_indices, config, groups)
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's exchange of rows between permutations of ours, where no token is dropped.

    In place of a map over all experts it takes the numbers of each token's. How many rows each expert has stays on the
    device: the host waits for the sizes of an exchange only, and for nothing where there is none.
    """

    def __init__(self, experts: int, indices: list[int], config: TransformerConfig, groups: ProcessGroupCollection):
        config = copy(config)
        config.moe_permute_fusion = True  # what the sorting of chunks needs stays on the device, too
        super().__init__(experts, indices, config, groups)
        self.ranks = self.ep_size * self.tp_size
        self.sorts_chunks = self.ranks > 1 and experts > 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows sorted by expert, and their weights.

        hidden_states: [..., hidden_size]
        routing_map, probs: [tokens, topk], each token's experts and their weights
        """
        from ..kernels.permute import permute, sort_map

        self.hidden_shape, self.probs = hidden_states.shape, probs
        self.places, counts = sort_map(routing_map, self.num_experts)
        # megatron-core sums a map's column for each expert: here it is the sum already.
        self.tokens_per_expert = counts if self.ranks == 1 else self.preprocess(counts.unsqueeze(0))
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._maybe_dtoh_and_synchronize("before_permutation_1")
        return permute(hidden_states.flatten(0, -2), self.places, probs)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the received rows by expert. Return them, the number of rows of each expert, and the weights."""
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
        """Return the experts' rows in the order in which they were received."""
        from ..kernels.permute import unpermute

        if self.sorts_chunks:
            hidden_states = unpermute(hidden_states, self.chunk_sort_map)
            del self.chunk_sort_map
        if self.tp_size > 1:
            wide = hidden_states.to(self.probs.dtype)
            summed = reduce_scatter_to_sequence_parallel_region(
                wide, group=self.tp_group, input_split_sizes=self._tp_sizes()
            )
            hidden_states = summed.to(hidden_states.dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum of each token's returned rows, in the shape of the layer's input."""
        from ..kernels.permute import unpermute

        output = unpermute(permutated_local_input_tokens, self.places).view(self.hidden_shape)
        del self.places, self.probs  # autograd has what the backward pass needs
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
