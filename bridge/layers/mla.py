"""Multi-latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Keys and values of all heads are made of one latent vector a token, and so are queries where `config.q_lora_rank` is
set. A head's last `qk_pos_emb_head_dim` dimensions turn by position, and their key is the same for all heads. Each
tensor-parallel rank makes the whole latents (of its own tokens under sequence parallelism) and its own heads of them.
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
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from .attention import CoreAttention
from .norm import NormBuilder
from .packed_seqs import Documents

LATENT_EPS = 1e-6  # of the latents' norms, whatever config.json says of the other norms: as transformers has it


@dataclass
class LatentAttentionSubmodules:
    """The modules that differ between Transformer Engine's layers and plain ones."""

    column: Any
    row: Any
    norm: NormBuilder


class ReplicatedLinear(torch.nn.Module):
    """A matrix that every tensor-parallel rank holds whole: `weight` [outputs, inputs]."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees its own tokens: the gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _TurnedAttention(CoreAttention):
    """Queries and keys come turned: only a part of a head turns, and that of the keys before the heads have it."""

    def turn(self, x: Tensor, documents: Documents) -> Tensor:
        return super()._rotate(x, documents)

    def _rotate(self, x: Tensor, documents: Documents) -> Tensor:
        return x


class LatentAttention(MegatronModule):
    """Causal multi-latent self-attention within documents, at the place of megatron-core's `self_attention`.

    Its matrices have the names that megatron-core's own MLASelfAttention gives them.
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
        self.recompute_core, self.recompute_up = "core_attn" in selective, "mla_up_proj" in selective

        def column(inputs: int, outputs: int) -> Any:
            return submodules.column(
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.tp_group,
            )

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
        self.core_attention = _TurnedAttention(
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
        """megatron-core's wish, with FP8: what is recomputed is kept as it comes, not in FP8."""
        if self.config.q_lora_rank is None:
            self.linear_q_proj.save_original_input = True

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: Documents, **_
    ) -> tuple[Tensor, None]:
        """hidden_states [sequence (/ TP under sequence parallelism), batch, hidden_size] -> the same shape, no bias"""
        documents = packed_seq_params
        if self.config.q_lora_rank is None:
            query_source = hidden_states
        else:
            query_source = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent, turning_key = self.linear_kv_down_proj(hidden_states).split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        latent = self.kv_layernorm(latent)
        # Each rank's heads use the shared key: its gradient is summed over the ranks.
        if self.config.sequence_parallel:
            turning_key = tensor_parallel.gather_from_sequence_parallel_region(turning_key, group=self.tp_group)
        else:
            turning_key = tensor_parallel.copy_to_tensor_model_parallel_region(turning_key, group=self.tp_group)

        def heads(query_source: Tensor, latent: Tensor, turning_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._heads(query_source, latent, turning_key, documents)

        up = None
        if self.recompute_up and self.training:
            up = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)  # pyright: ignore[reportArgumentType]
        make = heads if up is None else lambda *sources: up.checkpoint(heads, *sources)
        query, key, value = make(query_source, latent, turning_key)
        if self.recompute_core and self.training:
            context = tensor_parallel.checkpoint(partial(self._attend, documents=documents), False, query, key, value)
        else:
            context = self._attend(query, key, value, documents)
        if up is not None:
            up.discard_output_and_register_recompute(context)
        output, _ = self.linear_proj(context)
        return output, None

    def _heads(
        self, query_source: Tensor, latent: Tensor, turning_key: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key [sequence, batch, heads, query_dim] and value [sequence, batch, heads, v_head_dim] of this rank's
        heads, turned."""
        config = self.config
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query, _ = project(query_source)
        key_value, _ = self.linear_kv_up_proj(latent)
        query = query.unflatten(-1, (self.heads, self.query_dim))
        key_value = key_value.unflatten(-1, (self.heads, config.qk_head_dim + config.v_head_dim))
        still, turning = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        query = torch.cat((still, self.core_attention.turn(turning, documents)), dim=-1)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        turned = self.core_attention.turn(turning_key.unsqueeze(2), documents).expand(-1, -1, self.heads, -1)
        return query, torch.cat((key, turned), dim=-1), value.contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
        """[sequence, batch, heads * v_head_dim]"""
        # Flash kernels want values as wide as keys; zeros add nothing, and are cut off again.
        padded = self.query_dim - value.shape[-1] if self.core_attention.kernel != "sdpa" else 0
        value = F.pad(value, (0, padded))
        batch = query.shape[1]
        if documents.qkv_format == "thd":
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        context = self.core_attention(query, key, value, packed_seq_params=documents)
        context = context.view(-1, batch, self.heads, value.shape[-1])
        return context[..., : value.shape[-1] - padded].flatten(2)
