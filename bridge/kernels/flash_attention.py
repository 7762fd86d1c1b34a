"""FlashAttention-4's kernels (the package flash-attn-4), which are compiled when they are first used.

On Hopper they are faster than cuDNN's for packed documents, mostly in the backward pass. Compiled kernels are kept on
disk, since compiling one takes three seconds.
"""
# pyright: reportMissingImports=false

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Sizes of heads (of queries and keys, of values) whose gradients are right. At 72, 80 and 192 those of queries are
# wrong (4.0.0b19, H200).
HEAD_SIZES = (64, 64), (128, 128), (192, 128), (256, 256)
FORWARD_HEAD_SIZES = 64, 72, 80, 128  # without a backward pass
CAPABILITY = 9  # major number of the devices on which the kernels were measured: H100, H200


@cache
def is_installed() -> bool:
    """Return whether the package is installed, on any device."""
    try:
        return bool(version("flash-attn-4"))
    except PackageNotFoundError:
        return False


def is_usable() -> bool:
    """Return whether the package is installed and the device is one for which its kernels were measured."""
    return torch.cuda.is_available() and is_installed() and torch.cuda.get_device_capability()[0] == CAPABILITY


class FlashAttention(NamedTuple):
    """Attention within segments: from queries to the keys of their own segment.

    query_ends, key_ends: [segments + 1] int32 on the device, 0 first
    longest_query, longest_key: at least the number of queries, and of keys, of the longest segment
    is_causal: a segment's last query and its last key are the same token; otherwise every query attends to all keys
    window: number of keys that a causal query attends to, including its own; None: all before it
    """

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    scale: float
    is_causal: bool = True
    window: int | None = None
    is_deterministic: bool = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads, value dim], and the log-sum-exp of scores, [heads, tokens] fp32.

        query: [tokens, heads, dim] in half precision
        key: [keys, groups, dim]
        value: [keys, groups, value dim]
        """
        return _module()._flash_attn_fwd(query, key, value, return_lse=True, **self._arguments())[:2]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value. grad: like output

        Raises ValueError for sizes of heads that are not in HEAD_SIZES.
        """
        if (query.shape[-1], value.shape[-1]) not in HEAD_SIZES:
            raise ValueError(f"FlashAttention-4 has no correct gradients for heads of {query.shape[-1]}")
        return _module()._flash_attn_bwd(
            query, key, value, output, grad, log_sum, deterministic=self.is_deterministic, **self._arguments()
        )[:3]

    def _arguments(self) -> dict[str, object]:
        arguments: dict[str, object] = {
            "cu_seqlens_q": self.query_ends,
            "cu_seqlens_k": self.key_ends,
            "max_seqlen_q": self.longest_query,
            "max_seqlen_k": self.longest_key,
            "softmax_scale": self.scale,
            "causal": self.is_causal and self.window is None,
        }
        if self.window is not None:
            arguments |= {"window_size_left": self.window - 1, "window_size_right": 0}
        return arguments


@cache
def _module():
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "flash_attention_cute_dsl"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    from flash_attn.cute import interface

    return interface
