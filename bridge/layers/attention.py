"""Attention over packed documents, with rotary embeddings and context parallelism: a `core_attention` for layer specs.

One module for every machine. It turns queries and keys by their position ids, then hands them to the kernel that this
machine has: Transformer Engine's, torch's variable-length flash attention on a GPU, or one
`scaled_dot_product_attention` per document on a CPU.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .rope import angles, rotate


@dataclass(frozen=True)
class Segments:
    """Which keys a rank's queries meet: pieces of queries in order, each with its keys, the last of which is its own.

    Without context parallelism a segment is a document. With it a rank holds two chunks of each document, and a chunk
    meets the document from its start to the chunk's end; `key_index` finds these keys among the gathered ones.
    """

    queries: list[int]  # length of each segment's queries
    keys: list[int]  # length of each segment's keys
    query_ends: Tensor  # [segments + 1] int32, on the device
    key_ends: Tensor
    key_index: Tensor | None  # [sum(keys)]: positions in the rank-major gathered keys; None without context parallelism


def make_segments(bounds: list[int], cp_rank: int, cp_size: int, device: torch.device) -> Segments:
    """`bounds` [documents + 1]: where documents begin and end in the whole sequence; each divides by 2 x cp_size."""
    queries, keys, index = [], [], []
    for start, end in pairwise(bounds):
        if cp_size == 1:
            queries.append(end - start)
            keys.append(end - start)
            continue
        chunk = (end - start) // (2 * cp_size)
        # Where each of the document's 2 x CP chunks lies once the ranks' tokens are laid one rank after another.
        places = []
        for number in range(2 * cp_size):
            rank, second = (number, 0) if number < cp_size else (2 * cp_size - 1 - number, 1)
            place = rank * (bounds[-1] // cp_size) + start // cp_size + second * chunk
            places.append(torch.arange(place, place + chunk))
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            queries.append(chunk)
            keys.append((number + 1) * chunk)
            index += places[: number + 1]
    return Segments(
        queries, keys, _ends(queries, device), _ends(keys, device), _to(torch.cat(index), device) if index else None
    )


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return _to(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32), device)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy: nothing waits for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Documents(PackedSeqParams):
    """What attention must know of a micro batch, found once, on the CPU, before the first layer runs."""

    segments: Segments | None = None
    angles: Tensor | None = None  # [sequence, batch, 1, dim] fp32
    cos: Tensor | None = None  # the same in the model's dtype
    sin: Tensor | None = None


def describe_documents(
    position_ids: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    *,
    frequencies: Tensor,
    dtype: torch.dtype,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> Documents:
    """position_ids [batch, local sequence] on the device; cu_seqlens [documents + 1] on the CPU, over the whole row
    (None: rows are padded instead of packed); max_seqlen: the longest document."""
    device = position_ids.device
    turns = angles(position_ids, frequencies)
    if cu_seqlens is None:
        bounds, packed = [0, position_ids.shape[1] * cp_size], {}
    else:
        bounds, ends = cu_seqlens.tolist(), _to(cu_seqlens, device)
        packed = {
            "qkv_format": "thd",
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_kv": max_seqlen,
        }
        if cp_size > 1:
            packed |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}
    return Documents(
        **packed,
        segments=make_segments(bounds, cp_rank, cp_size, device),
        angles=turns,
        cos=turns.cos().to(dtype),
        sin=turns.sin().to(dtype),
    )


class CoreAttention(MegatronModule):
    """softmax(q k' * scale) v within each document; takes megatron-core's `core_attention` arguments.

    `config.attention_kernel` (put there by the builder) is "transformer_engine", "varlen" or "sdpa".
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
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.kernel: str = config.attention_kernel  # type: ignore[attr-defined]
        self.inner = None
        if self.kernel == "transformer_engine":
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

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
        """query [tokens, heads, dim] with key and value [tokens, groups, dim] where packed, else [sequence, batch, ...]
        -> [tokens, heads * dim] or [sequence, batch, heads * dim]"""
        documents = packed_seq_params
        assert documents is not None
        assert attention_bias is None
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        query, key = self._rotate(query, documents), self._rotate(key, documents)
        if self.inner is not None:
            if packed:
                query, key, value = (x.squeeze(1) for x in (query, key, value))
            output = self.inner(
                query, key, value, None, attn_mask_type, packed_seq_params=documents if packed else None
            )
            return output.reshape(*query.shape[:-2], -1)

        segments = documents.segments
        assert segments is not None
        if segments.key_index is not None:  # all-gather forward, reduce-scatter backward
            key, value = (
                gather_from_sequence_parallel_region(
                    x, tensor_parallel_output_grad=True, group=self.cp_group
                ).index_select(0, segments.key_index)
                for x in (key, value)
            )
        if self.kernel == "varlen" and query.shape[1] == 1 and not (self.training and self.dropout):
            output = self._varlen(query.squeeze(1), key.squeeze(1), value.squeeze(1), segments)
        elif self.training and self.dropout and not self.config.sequence_parallel:
            # Tensor-parallel ranks have different heads: they drop out differently.
            with get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                output = self._sdpa(query, key, value, segments)
        else:
            output = self._sdpa(query, key, value, segments)
        shape = query.shape[:1] if packed else query.shape[:2]
        return output.reshape(*shape, -1)

    def _rotate(self, x: Tensor, documents: Documents) -> Tensor:
        if documents.cos is None or documents.sin is None:
            return x
        if self.config.apply_rope_fusion and self.inner is not None:
            from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

            # Positions are the same in every row where rows are padded, and packed tokens are one row.
            assert documents.angles is not None
            return fused_apply_rotary_pos_emb(x, documents.angles[:, :1])
        return rotate(x, documents.cos, documents.sin)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if repeat := query.shape[1] // key.shape[1] - 1:  # this kernel takes as many key heads as query heads
            key, value = (x.repeat_interleave(repeat + 1, dim=1) for x in (key, value))
        output = varlen_attn(
            query,
            key,
            value,
            segments.query_ends,
            segments.key_ends,
            max(segments.queries),
            max(segments.keys),
            scale=self.softmax_scale,
            window_size=(-1, 0),
        )
        assert isinstance(output, Tensor)
        return output

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """All [sequence, batch, heads, dim]."""
        outputs = []
        for q, k, v in zip(
            query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), strict=True
        ):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [batch, heads, length, dim]
            mask = None
            if q.shape[2] != k.shape[2]:  # a later chunk: the last query meets the last key
                ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
                mask = ones.tril(k.shape[2] - q.shape[2])
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(output.permute(2, 0, 1, 3))
        return torch.cat(outputs)
