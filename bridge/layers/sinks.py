"""Attention with sinks or capped scores. A sink is one more softmax logit per head, of a key that has no value.

GPT-OSS, https://arxiv.org/abs/2508.10925; after https://arxiv.org/abs/2309.17453. With L the log-sum-exp of a query's
scores and s the sink, L' = log(exp L + exp s), and the output is the output without sinks times exp(L - L'). A flash
kernel returns L, and its unchanged backward pass is correct if it gets L' and the new output.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..kernels import usable
from ..kernels.flash_attention import FlashAttention
from ..kernels.kept_outputs import kept_outputs
from .gathered_keys import Backward, Forward, gathering
from .packed_seqs import Segments

MAX_HEAD_DIM = 128  # up to which kernels/attention.py is faster: the sums of wider heads do not fit into registers
MAX_CAPPED_DIM = 256  # widest head if scores are capped, which torch's kernels cannot do


class KernelAttention(torch.autograd.Function):
    """Attention by the forward and backward passes of a flash kernel, with optional sinks.

    query [tokens, heads, dim], key and value [tokens, groups, dim], sinks [heads] or None -> [tokens, heads, dim]
    """

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, forward: Forward, backward: Backward
    ) -> Tensor:
        output, log_sum = kept_outputs(lambda: forward(query, key, value))
        if sinks is not None:
            log_sum_with_sink = torch.logaddexp(log_sum, sinks.float().unsqueeze(1))
            output = (output * (log_sum - log_sum_with_sink).exp().t().unsqueeze(-1)).to(query.dtype)
            log_sum = log_sum_with_sink
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.kernel = backward
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        grads = ctx.kernel(grad.contiguous(), query, key, value, output, log_sum)
        if not ctx.needs_input_grad[3]:
            return *grads, None, None, None
        # The sink's value is zero, so only the output's term of the softmax's derivative remains.
        share = (sinks.float().unsqueeze(1) - log_sum).exp()
        grad_sinks = -(share * (grad.float() * output.float()).sum(-1).t()).sum(1)
        return *grads, grad_sinks.to(sinks.dtype), None, None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    sinks: Tensor | None,
    cap: float | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    uses_flash: bool = False,
    is_deterministic: bool = False,
) -> Tensor:
    """Compute causal flash attention over segments: query [tokens, heads, dim], key and value [tokens, groups, dim].

    cap: see `Architecture.score_cap`. Raises ValueError where no kernel has caps for heads or documents of this size
    group: ranks of context parallelism, of which this one's keys and values are given; None: all keys are given
    uses_flash: by FlashAttention-4 where it is faster; its values may have another dim than queries
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    # Of windows it is slower: 494 against 393 us in the backward pass of 64 heads of 64, windows of 128 (H200).
    if uses_flash and cap is None and (segments.window is None or query.shape[-1] > MAX_HEAD_DIM):
        flash = FlashAttention(
            segments.query_ends,
            segments.key_ends,
            max(segments.queries),
            max(segments.keys),
            factor,
            window=segments.window,
            is_deterministic=is_deterministic,
        )
        passes = flash.forward, flash.backward
    else:
        passes = _other_passes(query, key, value, segments, factor, cap)
    if group is not None and segments.key_index is not None:
        passes = gathering(*passes, segments, group)
    return KernelAttention.apply(query, key, value, sinks, *passes)  # type: ignore[return-value]


def _other_passes(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, cap: float | None
) -> tuple[Forward, Backward]:
    """Return the passes of the Triton kernels where they are faster, and of aten's elsewhere."""
    # The Triton kernels index a document's elements with 32 bits.
    largest = max(max(segments.queries) * query.stride(0), max(segments.keys) * max(key.stride(0), value.stride(0)))
    dim = query.shape[-1]
    is_supported = dim <= (MAX_HEAD_DIM if cap is None else MAX_CAPPED_DIM) and largest < 2**31 and usable(query)
    if cap is not None and not is_supported:
        raise ValueError(f"no kernel caps the scores of heads of {dim} over {max(segments.keys)} tokens of a document")
    return _triton_passes(segments, scale, cap) if is_supported else _aten_passes(segments, scale)


def _triton_passes(segments: Segments, scale: float, cap: float | None) -> tuple[Forward, Backward]:
    from ..kernels.attention import BLOCK, attend, attend_backward

    tiles, key_tiles = segments.tiles(BLOCK)
    settings = {"tiles": tiles, "scale": scale, "window": segments.window, "cap": cap}
    return partial(attend, **settings), partial(attend_backward, key_tiles=key_tiles, **settings)


def _aten_passes(segments: Segments, scale: float) -> tuple[Forward, Backward]:
    """Return the aten kernels, since torch's `varlen_attn` needs as many groups as heads."""
    causal, left = (True, -1) if segments.window is None else (False, segments.window - 1)
    lengths = (segments.query_ends, segments.key_ends, max(segments.queries), max(segments.keys), 0.0, causal)
    window_args: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(*states: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._flash_attention_forward(*states, *lengths, False, **window_args)[:2]

    def backward(*states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rng_state = states[0].new_empty(2, dtype=torch.uint64)  # of dropout, which is 0
        return torch.ops.aten._flash_attention_backward(*states, *lengths, rng_state, rng_state, **window_args)

    return forward, backward


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    dropout: float,
    cap: float | None = None,
) -> Tensor:
    """Compute attention with sinks or capped scores, with all scores in memory.

    query, key, value [batch, heads, length, dim]; mask [queries, keys], None: causal.
    """
    if repeat := query.shape[1] // key.shape[1] - 1:
        key, value = (x.repeat_interleave(repeat + 1, dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * (scores / cap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    shares = scores.softmax(dim=-1)[..., : key.shape[2]].to(query.dtype)
    return F.dropout(shares, dropout) @ value
