"""megatron-core's self-attention with the fused kernels of kernels/qkv.py, which split, normalize and rotate heads."""

from copy import copy
from typing import Any, cast

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module
from torch import Tensor
from torch.nn import Module

from ..mapping.architecture import Architecture, Layer
from .packed_seqs import Documents


def supports_fused_heads(config: TransformerConfig) -> bool:
    """Return whether the fused kernels support this model's attention heads."""
    architecture: Architecture = config.architecture  # type: ignore[attr-defined]
    assert config.num_query_groups is not None
    assert config.kv_channels is not None
    has_rms_norm = config.normalization == "RMSNorm" and architecture.qk_norm in ("head", "rotated")
    return (
        config.fuse_heads  # type: ignore[attr-defined]
        and not config.multi_latent_attention
        and (has_rms_norm if config.qk_layernorm else architecture.qk_norm != "l2")
        and config.num_query_groups >= config.tensor_model_parallel_size
        and config.kv_channels % 2 == 0
    )


def heads_config(config: TransformerConfig, layer: Layer) -> TransformerConfig:
    """Return the config with the layer's size and number of heads, or `config` itself if it has none of its own."""
    if layer.head_dim is None and layer.groups is None:
        return config
    config = copy(config)
    config.kv_channels = layer.head_dim or config.kv_channels
    config.num_query_groups = layer.groups or config.num_query_groups
    return config


class LayerSelfAttention(SelfAttention):
    """Self-attention whose heads can differ from those of other layers, and whose values can be its keys."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, *args, **kwargs):
        layers = config.architecture.layers  # type: ignore[attr-defined]
        layer: Layer = layers[layer_number - 1] if layer_number <= len(layers) else Layer()
        config = heads_config(config, layer)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.has_values = layer.has_values

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args, **kwargs) -> Any:
        """Return query, key and value, [sequence, batch, heads, dim]; the arguments are megatron-core's."""
        if self.has_values:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, _ = apply_module(self.linear_qkv)(hidden_states)
        # As in megatron-core: with fewer groups than ranks, adjacent ranks share one, and have a part of its queries.
        sharers, rank = max(1, self.world_size // (self.config.num_query_groups or 1)), self.pg_collection.tp.rank()
        if sharers > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(self.world_size // sharers, dim=-1)[rank // sharers]
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, value = mixed[..., :-1, :].flatten(-3, -2), mixed[..., -1, :]
        if sharers > 1:
            query = query.chunk(sharers, dim=-2)[rank % sharers]
        key = value
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = apply_module(self.q_layernorm)(query), apply_module(self.k_layernorm)(key)
        return query, key, value


class DocumentAttention(LayerSelfAttention):
    """Self-attention that makes queries, keys and values by the documents of its micro batch."""

    _documents: Documents | None = None

    def forward(self, *args, packed_seq_params: Documents, **kwargs) -> tuple[Tensor, Tensor | None]:
        self._documents = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def take_documents(self) -> Documents:
        """Return the documents of this call, which the module then does not keep in memory."""
        documents, self._documents = self._documents, None
        assert documents is not None
        return documents


class FusedSelfAttention(DocumentAttention):
    """Self-attention with fused heads and megatron-core's parameter names."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if isinstance(self.q_layernorm, IdentityOp):  # core attention has the norms, behind its rope
            self.q_layernorm = self.k_layernorm = None
        core: Any = self.core_attention
        self.rope, core.rope = core.rope, None  # its queries and keys are already rotated
        # The value can be a view if attention takes its strides and the norms keep the QKV tensor in memory anyway.
        self.view_value = self.q_layernorm is not None and core.kernel != "transformer_engine"

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Return query, key, value and, with `output_gate`, the gate: [sequence, batch, heads, dim].

        hidden_states: [sequence (/ TP under sequence parallelism), batch, hidden_size]
        """
        from ..kernels.qkv import HeadLayout, split_heads

        documents = self.take_documents()
        qkv, _ = apply_module(self.linear_qkv)(hidden_states)
        norms = None
        if self.q_layernorm is not None and self.k_layernorm is not None:
            # The norms' modules are not called. Their hooks, which wait for overlapped all-gathers, run here.
            modules = cast(list[Module], [self.q_layernorm, self.k_layernorm])
            for module in modules:
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())
            norms = cast(tuple[Tensor, Tensor], tuple(module.weight for module in modules))
        rotary = None if self.rope is None else documents.rotary[self.rope]
        layout = HeadLayout(
            groups=self.num_query_groups_per_partition,
            queries=self.num_attention_heads_per_partition // self.num_query_groups_per_partition,
            dim=self.hidden_size_per_attention_head,
            gated=output_gate,
            eps=self.config.layernorm_epsilon,
            zero_centred=self.config.layernorm_zero_centered_gamma,
            interleaved=rotary is not None and rotary.interleaved,
            view_value=self.view_value,
        )
        query, key, value, gate = split_heads(qkv, norms, None if rotary is None else rotary.plane_cos_sin, layout)
        return (query, key, value, gate) if output_gate else (query, key, value)
