"""cuDNN's attention over packed sequences, called without Transformer Engine's modules.

Transformer Engine's `DotProductAttention` chooses a kernel at every call, which costs the host more time than the
kernel runs where sequences are short. Here a module chooses at its first call of each shape; if it chooses cuDNN's
kernel, later calls run that directly.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .kept_outputs import kept_outputs


class Mask(NamedTuple):
    """Mask of attention within each sequence. window: the tokens before a query that it attends to; None: all."""

    is_causal: bool
    window: int | None = None


class _Settings(NamedTuple):
    """Arguments of cuDNN's kernels. They are those that Transformer Engine's module passes."""

    longest: int
    scale: float
    mask: Mask
    is_training: bool
    is_deterministic: bool

    def arguments(self) -> dict[str, Any]:
        causal, window = self.mask
        return {
            "qkv_layout": "thd_thd_thd",
            "o_format": "thd",
            "attn_scale": self.scale,
            "attn_mask_type": "padding_causal" if causal else "padding",
            "window_size": (-1 if window is None else window, 0 if causal else -1),
            "bottom_right_diagonal": not causal,
        }


class PackedAttention:
    """Attention of a `DotProductAttention` without dropout, context parallelism or FP8."""

    def __init__(self, module: Any, scale: float | None, mask: Mask):
        """scale: of the scores; None: head_dim ** -0.5"""
        self.module, self.scale, self.mask = module, scale, mask
        self._is_cudnn: dict[Any, bool] = {}  # keyed by the shapes of queries, keys and values, without tokens

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, run_module: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention within each sequence.

        query [tokens, heads, dim], key and value [tokens, groups, dim]; ends: [sequences + 1] int32; longest: at least
        the longest sequence's tokens; run_module: the same by the module -> [tokens, heads, dim]
        """
        shape = query.shape[1:], key.shape[1:], value.shape[2], query.dtype
        is_first = shape not in self._is_cudnn
        if is_first or not self._is_cudnn[shape]:
            output = run_module().view(*query.shape[:2], value.shape[2])
            if is_first:
                self._is_cudnn[shape] = _runs_cudnn()
            if not self._is_cudnn[shape]:
                return output
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        settings = _Settings(longest, scale, self.mask, self.module.training, self.module.deterministic)
        return cast(Tensor, _CudnnAttention.apply(query, key, value, ends, settings))


def _runs_cudnn() -> bool:
    """Return whether Transformer Engine's last call ran cuDNN's kernel for half precision and any length."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    backend = _attention_backends.get("fused_attention_backend")
    is_fused = _attention_backends.get("use_fused_attention") and backend is not None
    return bool(is_fused) and backend == FusedAttnBackend["F16_arbitrary_seqlen"]


class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, settings: _Settings) -> Tensor:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_fwd

        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        longest = settings.longest

        def run() -> tuple[Tensor, ...]:
            output, saved = fused_attn_fwd(
                settings.is_training, longest, longest, ends, ends, query, key, value, query.dtype,
                FusedAttnBackend["F16_arbitrary_seqlen"], cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
                **settings.arguments(),
            )  # fmt: skip
            return output, *(saved or ())

        output, *saved = kept_outputs(run)
        ctx.save_for_backward(query, key, value, output, ends, *saved)
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd

        query, key, value, output, ends, *saved = ctx.saved_tensors
        settings: _Settings = ctx.settings
        longest = settings.longest
        grads = fused_attn_bwd(
            longest, longest, ends, ends, query, key, value, output, grad.contiguous(), grad.dtype, saved,
            FusedAttnBackend["F16_arbitrary_seqlen"], cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
            do_format="thd", dqkv_layout="thd_thd_thd", deterministic=settings.is_deterministic,
            **settings.arguments(),
        )  # fmt: skip
        return *grads[:3], None, None
