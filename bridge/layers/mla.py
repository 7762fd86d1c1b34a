"""Multi-latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Keys and values of all heads are projections of one latent vector per token; so are queries if `config.q_lora_rank` is
set. A head's last `qk_pos_emb_head_dim` dimensions are rotated by position, and their key is shared by all heads. Each
tensor-parallel rank computes the full latents (of its own tokens with sequence parallelism) and its own heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from .attention import CoreAttention
from .linear import ReplicatedLinear, column_linear
from .norm import NormBuilder
from .packed_seqs import Documents

LATENT_EPS = 1e-6  # of the latents' norms; transformers too ignores the eps in config.json here


@dataclass
class LatentAttentionSubmodules:
    """Modules that differ between Transformer Engine's layers and megaswift's."""

    column: Any
    row: Any
    norm: NormBuilder


class _PreRotatedAttention(CoreAttention):
    """Core attention without rotation: queries and keys are already rotated, since only part of each head is."""

    def rotate(self, x: Tensor, documents: Documents) -> Tensor:
        return super()._rotate(x, documents)

    def _rotate(self, x: Tensor, documents: Documents) -> Tensor:
        return x


class LatentAttention(MegatronModule):
    """Causal multi-latent self-attention within documents: a `self_attention` for layer specs.

    Its matrices have the names of megatron-core's MLASelfAttention.
    """

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        submodules: LatentAttentionSubmodules,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        **_,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.heads = config.num_attention_heads // self.tp_group.size()
        self.query_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        selective = (config.recompute_modules or []) if config.recompute_granularity == "selective" else []
        self.recomputes_core, self.recomputes_up = "core_attn" in selective, "mla_up_proj" in selective

        def column(inputs: int, outputs: int) -> Any:
            return column_linear(submodules.column, config, inputs, outputs, self.tp_group)

        queries = config.num_attention_heads * self.query_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = column(config.hidden_size, queries)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = submodules.norm(config=config, hidden_size=config.q_lora_rank, eps=LATENT_EPS)
            self.linear_q_up_proj = column(config.q_lora_rank, queries)
        self.linear_kv_down_proj = ReplicatedLinear(
            config, config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )
        self.kv_layernorm = submodules.norm(config=config, hidden_size=config.kv_lora_rank, eps=LATENT_EPS)
        self.linear_kv_up_proj = column(
            config.kv_lora_rank, config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        )
        self.core_attention = _PreRotatedAttention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = submodules.row(
            config.num_attention_heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def set_for_recompute_input_layernorm(self) -> None:
        """Save the input unquantized: megatron-core calls this for FP8 with a recomputed input norm."""
        if self.config.q_lora_rank is None:
            self.linear_q_proj.save_original_input = True

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Documents, **_
    ) -> tuple[Tensor, None]:
        """hidden_states [sequence (/ TP under sequence parallelism), batch, hidden_size] -> (same shape, None)"""
        documents = packed_seq_params
        if self.config.q_lora_rank is None:
            query_source = hidden_states
        else:
            query_source = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent, rope_key = self.linear_kv_down_proj(hidden_states).split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        latent = self.kv_layernorm(latent)
        selection = self._select(hidden_states, query_source, documents)
        # The heads of every rank use the shared key, so its gradient is summed over the ranks.
        if self.config.sequence_parallel:
            rope_key = tensor_parallel.gather_from_sequence_parallel_region(rope_key, group=self.tp_group)
        else:
            rope_key = tensor_parallel.copy_to_tensor_model_parallel_region(rope_key, group=self.tp_group)

        def project_heads(query_source: Tensor, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._heads(query_source, latent, rope_key, documents)

        checkpoint = None
        if self.recomputes_up and self.training:
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)  # pyright: ignore[reportArgumentType]
        project = (
            project_heads if checkpoint is None else lambda *sources: checkpoint.checkpoint(project_heads, *sources)
        )
        query, key, value = project(query_source, latent, rope_key)
        if self.recomputes_core and self.training:
            attend = partial(self._attend, documents=documents, selection=selection)
            context = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            context = self._attend(query, key, value, documents, selection)
        context = self._attach_loss(context, query, key, documents, selection)
        if checkpoint is not None:
            checkpoint.discard_output_and_register_recompute(context)
        output, _ = self.linear_proj(context)
        return output, None

    def _heads(
        self, query_source: Tensor, latent: Tensor, rope_key: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rotated query and key [sequence, batch, heads, query_dim], and value.

        value: [sequence, batch, heads, v_head_dim]
        """
        config = self.config
        query_proj = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query, _ = query_proj(query_source)
        key_value, _ = self.linear_kv_up_proj(latent)
        query = query.unflatten(-1, (self.heads, self.query_dim))
        key_value = key_value.unflatten(-1, (self.heads, config.qk_head_dim + config.v_head_dim))
        nope_query, rope_query = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat((nope_query, self.core_attention.rotate(rope_query, documents)), dim=-1)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        rotated_key = self.core_attention.rotate(rope_key.unsqueeze(2), documents).expand(-1, -1, self.heads, -1)
        return query, torch.cat((key, rotated_key), dim=-1), value.contiguous()

    def _select(self, hidden_states: Tensor, query_source: Tensor, documents: Documents) -> Any:
        """Return the keys that each query attends to, for `_attend`; None: all of its document, up to itself."""
        return None

    def _attach_loss(self, context: Tensor, query: Tensor, key: Tensor, documents: Documents, selection: Any) -> Tensor:
        """Return the attention output, which in the backward pass starts that of a loss of the layer's own."""
        return context

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, selection: Any) -> Tensor:
        """Return the attention output, [sequence, batch, heads * v_head_dim]."""
        # Some kernels need values as wide as keys: pad with zeros, and slice the output.
        pads = self.core_attention.kernel in ("transformer_engine", "varlen")
        padding = self.query_dim - value.shape[-1] if pads else 0
        value = F.pad(value, (0, padding))
        batch = query.shape[1]
        if documents.qkv_format == "thd":
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        context = self.core_attention(query, key, value, packed_seq_params=documents)
        context = context.view(-1, batch, self.heads, value.shape[-1])
        return context[..., : value.shape[-1] - padding].flatten(2)
