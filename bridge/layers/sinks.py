"""Attention with sinks: for each head one more logit in the softmax, of a key that every query sees and that has no
value (GPT-OSS, https://arxiv.org/abs/2508.10925; after https://arxiv.org/abs/2309.17453).

With L the logarithm of a query's sum of exp(score), the sum with the sink s has the logarithm L' = log(exp L + exp s),
and the output is the plain one times exp(L - L'). A flash kernel gives L, and its backward pass is right as it stands
once it is handed L' and the new output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import usable
from .packed_seqs import Segments

WIDEST = 128  # heads that fused/attention.py takes: wider ones' sums do not fit into registers

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # query, key, value -> output, L [heads, tokens]
# grad of output, query, key, value, output, L' -> grads of query, key, value
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class KernelAttention(torch.autograd.Function):
    """query [tokens, heads, dim], key and value [tokens, groups, dim]; sinks [heads], or None; a kernel's two passes
    -> [tokens, heads, dim]"""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, forward: Forward, backward: Backward
    ) -> Tensor:
        output, log_sum = forward(query, key, value)
        if sinks is not None:
            log_total = torch.logaddexp(log_sum, sinks.float().unsqueeze(1))
            output = (output * (log_sum - log_total).exp().t().unsqueeze(-1)).to(query.dtype)
            log_sum = log_total
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.kernel = backward
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        grads = ctx.kernel(grad.contiguous(), query, key, value, output, log_sum)
        if not ctx.needs_input_grad[3]:
            return *grads, None, None, None
        # The sink's value is zero: of the softmax's derivative only the share of the output is left.
        share = (sinks.float().unsqueeze(1) - log_sum).exp()
        grad_sinks = -(share * (grad.float() * output.float()).sum(-1).t()).sum(1)
        return *grads, grad_sinks.to(sinks.dtype), None, None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Flash attention over segments, causal: query [tokens, heads, dim], key and value [tokens, groups, dim]."""
    # Ours count a document's elements in 32 bits.
    largest = max(max(segments.queries) * query.stride(0), max(segments.keys) * max(key.stride(0), value.stride(0)))
    is_supported = query.shape[-1] <= WIDEST and largest < 2**31 and usable(query)
    passes = (_own if is_supported else _torch)(segments, query.shape[-1] ** -0.5 if scale is None else scale)
    return KernelAttention.apply(query, key, value, sinks, *passes)  # type: ignore[return-value]


def _own(segments: Segments, scale: float) -> tuple[Forward, Backward]:
    from ..kernels.attention import BLOCK, attend, attend_back

    tiles, key_tiles = segments.tiles(BLOCK)
    about = {"tiles": tiles, "scale": scale, "window": segments.window}
    return partial(attend, **about), partial(attend_back, key_tiles=key_tiles, **about)


def _torch(segments: Segments, scale: float) -> tuple[Forward, Backward]:
    """Return the kernels themselves, since torch's `varlen_attn` wants as many groups as heads."""
    causal, left = (True, -1) if segments.window is None else (False, segments.window - 1)
    lengths = (segments.query_ends, segments.key_ends, max(segments.queries), max(segments.keys), 0.0, causal)
    reach: dict[str, Any] = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(*states: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._flash_attention_forward(*states, *lengths, False, **reach)[:2]

    def backward(*states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        unread = states[0].new_empty(2, dtype=torch.uint64)  # the state of dropout, which there is none of
        return torch.ops.aten._flash_attention_backward(*states, *lengths, unread, unread, **reach)

    return forward, backward


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scale: float | None, dropout: float
) -> Tensor:
    """Compute attention with every score in memory.

    query, key, value [batch, heads, length, dim]; mask [queries, keys], None: causal.
    """
    if repeat := query.shape[1] // key.shape[1] - 1:
        key, value = (x.repeat_interleave(repeat + 1, dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    sinks = sinks.float().view(-1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1].to(query.dtype)
    return F.dropout(shares, dropout) @ value
