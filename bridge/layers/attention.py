"""Attention over packed documents, with rotary embeddings and context parallelism: a `core_attention` for layer specs.

It rotates queries and keys by their position ids, then calls the available kernel: FlashAttention-4's, Transformer
Engine's, megaswift's for packed documents on a GPU (or torch's flash attention), or one `scaled_dot_product_attention`
per document on a CPU.
`config.architecture` describes each layer.
"""

from copy import copy
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from ..mapping.architecture import Architecture, Layer
from .norm import Norm
from .packed_seqs import AttentionSpan, Documents, Segments
from .rope import apply_rotary
from .sinks import masked_attention, varlen_attention

MAX_FLASH_DIM = 256  # widest head that flash kernels support


class CoreAttention(MegatronModule):
    """softmax(q k' * scale) v within each document, with the arguments of megatron-core's `core_attention`.

    `config.attention_kernel` (set by the model builder) is "flash", "transformer_engine", "varlen" or "sdpa".
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        assert attn_mask_type == AttnMaskType.causal
        architecture: Architecture = config.architecture  # type: ignore[attr-defined]
        layers = architecture.layers
        layer = layers[layer_number - 1] if layer_number <= len(layers) else Layer()
        self.rope, self.span = layer.rope, AttentionSpan(layer.window, layer.chunk)
        self.value_norm = architecture.value_norm
        self.l2_norm = architecture.qk_norm == "l2" and layer.rope is not None
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm and architecture.qk_norm == "rotated":
            # megatron-core sums the gradients of norms with these names over the tensor-parallel ranks.
            self.q_layernorm, self.k_layernorm = (
                Norm(config, config.kv_channels or 0, eps=config.layernorm_epsilon) for _ in range(2)
            )
        growth = architecture.query_growth
        self.query_growth = growth if growth and growth.has_rope == (layer.rope is not None) else None
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.softmax_scale = softmax_scale
        self.score_cap = architecture.score_cap
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.kernel: str = config.attention_kernel  # type: ignore[attr-defined]
        if (layer.head_dim or 0) > MAX_FLASH_DIM:
            self.kernel = "sdpa"
        self.inner = self.packed_attention = self.softmax_offset = None
        if architecture.sinks:
            # Attention sinks: a logit per head, of a key that every query attends to and that has no value.
            heads = config.num_attention_heads // self.tp_group.size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        if self.kernel == "transformer_engine":
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

            if self.span.window and self.cp_group.size() == 1:
                config = copy(config)
                config.window_size, config.window_attn_skip_freq = (self.span.window - 1, 0), None
            self.inner = TEDotProductAttention(
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                attention_dropout=attention_dropout,
                softmax_scale=softmax_scale,
                cp_comm_type=cp_comm_type or "p2p",
                pg_collection=pg_collection,
            )
            if self.cp_group.size() == 1 and not self.dropout and not config.fp8_dot_product_attention:
                from ..kernels.cudnn_attention import Mask, PackedAttention

                mask = Mask(is_causal=True, window=self.span.window and self.span.window - 1)
                self.packed_attention = PackedAttention(self.inner, softmax_scale, mask)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_bias: Tensor | None = None,
        packed_seq_params: Documents | None = None,
    ) -> Tensor:
        """Packed: query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim].

        Padded: [sequence, batch, ...] instead of [tokens, ...].
        """
        documents = packed_seq_params
        assert documents is not None
        assert attention_bias is None
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        query, key = self._rotate(query, documents), self._rotate(key, documents)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.l2_norm:
            query, key = (
                F.rms_norm(x.float(), x.shape[-1:], eps=self.config.layernorm_epsilon).to(x.dtype) for x in (query, key)
            )
        if self.query_growth is not None:
            assert documents.positions is not None
            growth = self.query_growth
            scales = ((documents.positions + growth.first) // growth.step).float().log1p() * growth.rate + 1
            query = (query * scales[..., None, None]).to(query.dtype)
        if self.value_norm:
            value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        if documents.row_segments:
            outputs = []
            for number, by_span in enumerate(documents.row_segments):
                q, k, v = (x[:, number : number + 1] for x in (query, key, value))
                outputs.append(self._attend(q, k, v, by_span[self.span]))
            return torch.cat(outputs, dim=1).flatten(2)
        segments = documents.segments[self.span]
        if self.inner is not None and self._is_supported_by_engine(segments):
            if packed:
                query, key, value = (x.squeeze(1) for x in (query, key, value))
            run_module = partial(
                self.inner, query, key, value, None, attn_mask_type, packed_seq_params=documents if packed else None
            )
            if packed and self.packed_attention is not None:
                ends, longest = documents.cu_seqlens_q, documents.max_seqlen_q
                assert ends is not None
                assert longest is not None
                output = self.packed_attention(query, key, value, ends, longest, run_module)
            else:
                output = run_module()
            return output.reshape(*query.shape[:-2], -1)

        output = self._attend(query, key, value, segments).flatten(2)
        return output.squeeze(1) if packed else output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Return the attention output without Transformer Engine: [sequence, batch, heads, dim], as the arguments."""
        has_kernel = self.kernel != "sdpa" and segments.keys_ahead is None
        has_kernel = has_kernel and query.shape[1] == 1 and not (self.training and self.dropout)
        is_distributed = self.cp_group.size() > 1
        if segments.key_index is not None and not (has_kernel and is_distributed):
            if is_distributed:  # all-gather forward, reduce-scatter backward
                key, value = (
                    gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.cp_group)
                    for x in (key, value)
                )
            key, value = (select_rows(x, segments.key_index) for x in (key, value))
        if has_kernel:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
            output = varlen_attention(
                query,
                key,
                value,
                segments,
                self.softmax_scale,
                self.softmax_offset,
                self.score_cap,
                group=self.cp_group if is_distributed else None,
                uses_flash=self.kernel == "flash",
                is_deterministic=self.config.deterministic_mode,
            )
            return output.unsqueeze(1)
        if self.training and self.dropout and not self.config.sequence_parallel:
            # Tensor-parallel ranks have different heads, so their dropout must differ.
            with get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return self._sdpa(query, key, value, segments)
        return self._sdpa(query, key, value, segments)

    def _is_supported_by_engine(self, segments: Segments) -> bool:
        """Return whether Transformer Engine supports this.

        It supports no chunks, prefixes and blocks, and with context parallelism no windows for packs.
        """
        if segments.keys_ahead is not None:
            return False
        if self.cp_group.size() == 1:
            return not segments.chunked and segments.key_index is None
        return not segments.chunked and segments.window is None

    def _rotate(self, x: Tensor, documents: Documents) -> Tensor:
        if self.rope is None:
            return x
        rotary = documents.rotary[self.rope]
        if self.config.apply_rope_fusion and self.kernel == "transformer_engine" and rotary.angles is not None:
            from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

            return fused_apply_rotary_pos_emb(x, rotary.angles, interleaved=rotary.interleaved)
        return apply_rotary(x, rotary)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Return the attention output, [sequence, batch, heads, dim], as are query, key and value."""
        outputs = []
        dropout = self.dropout if self.training else 0.0
        for q, k, v, ahead in zip(
            query.split(segments.queries),
            key.split(segments.keys),
            value.split(segments.keys),
            segments.keys_ahead or [None] * len(segments.queries),
            strict=True,
        ):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [batch, heads, length, dim]
            mask = _mask(q.shape[2], k.shape[2], segments.window, q.device, ahead)
            if self.softmax_offset is not None or self.score_cap is not None:
                output = masked_attention(
                    q, k, v, mask, self.softmax_offset, self.softmax_scale, dropout, self.score_cap
                )
            else:
                output = F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=mask is None,
                    dropout_p=dropout,
                    scale=self.softmax_scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            outputs.append(output.permute(2, 0, 1, 3))
        return torch.cat(outputs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> ShardedStateDict:
        tensors = {
            f"{name}.weight": norm.weight
            for name, norm in (("q_layernorm", self.q_layernorm), ("k_layernorm", self.k_layernorm))
            if norm is not None
        }
        if self.softmax_offset is not None:
            tensors["softmax_offset"] = self.softmax_offset
        if not tensors:
            return {}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x with these numbers: [rows, ...] -> [len(index), ...]. Gradients are summed in fp32."""
    return cast(Tensor, _SelectRows.apply(x, index))


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [index] = ctx.saved_tensors
        sums = torch.zeros(ctx.rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return sums.index_add_(0, index, grad.float()).to(grad.dtype), None


def _mask(queries: int, keys: int, window: int | None, device: torch.device, ahead: int | None) -> Tensor | None:
    """Return the mask [queries, keys] of attended keys, or None for causal.

    ahead: keys behind the last query, which all queries attend to; None: the mask is causal
    """
    if ahead is None and queries == keys and (window is None or window >= keys):
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    first = keys - queries - (ahead or 0)  # key of the first query
    mask = mask.tril(first) if ahead is None else mask
    return mask if window is None else mask.triu(first - window + 1)
