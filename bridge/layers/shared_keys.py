"""Self-attention to the keys and values of an earlier layer (Gemma 4 E2B, E4B)."""

from typing import Any

from megatron.core.typed_torch import apply_module
from torch import Tensor

from ..mapping.architecture import Layer
from .deferred_grad import add_shared_grad, shared_leaf
from .self_attention import DocumentAttention


class KeySourceAttention(DocumentAttention):
    """Self-attention whose keys and values later layers attend to."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args, **kwargs) -> Any:
        documents = self.take_documents()
        query, *tensors = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        # A recomputed layer keeps the leaves of its first pass, which later layers have used.
        leaves = documents.shared_keys.setdefault(self.layer_number, tuple(map(shared_leaf, tensors)))
        return query, *(add_shared_grad(x, x, leaf) for x, leaf in zip(tensors, leaves, strict=True))


class SharedKeyAttention(DocumentAttention):
    """Self-attention whose `linear_qkv` makes queries only: its keys and values are those of `Layer.kv_source`."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        layer: Layer = config.architecture.layers[layer_number - 1]
        assert layer.kv_source is not None
        self.source = layer.kv_source + 1  # its layer number

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args, **kwargs) -> Any:
        """Return query, key and value, [sequence, batch, heads, dim]; the arguments are megatron-core's."""
        documents = self.take_documents()
        query, _ = apply_module(self.linear_qkv)(hidden_states)
        query = query.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        if self.q_layernorm is not None:
            query = apply_module(self.q_layernorm)(query)
        return query, *documents.shared_keys[self.source]
