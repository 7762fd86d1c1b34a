"""Package `flash_attn` for ms-swift that runs PyTorch's FlashAttention-2 kernels.

flash-attn has no wheels, and compiles for hours. PyTorch contains its kernels for packed documents, which are all that
ms-swift calls in these rows, through Transformer Engine and transformers. `write_flash_attn` makes this file a package.
"""

# pyright: reportIncompatibleMethodOverride=false

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"  # interface version, which Transformer Engine reads


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor, int, int], scale: float | None, causal: bool
    ) -> Tensor:
        output, log_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, causal, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, output, log_sum, state, unused)
        ctx.bounds, ctx.scale, ctx.causal = bounds, scale, causal
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum, state, unused = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, output, log_sum, *ctx.bounds, 0.0, ctx.causal, state, unused, scale=ctx.scale
        )
        return *grads, None, None, None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> Tensor:
    """Compute attention over packed documents: [tokens, heads, head_dim] each."""
    if dropout_p or tuple(window_size) not in {(-1, -1), (-1, 0)} or others.get("alibi_slopes") is not None:
        raise NotImplementedError("dropout, windows and ALiBi slopes are not here: install flash-attn")
    bounds = cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k)
    return _Varlen.apply(q, k, v, bounds, softmax_scale, causal)  # type: ignore[return-value]


def _unsupported(*_: Any, **__: Any) -> None:
    raise NotImplementedError("only flash_attn_varlen_func is here: install flash-attn")


flash_attn_func = flash_attn_with_kvcache = _flash_attn_forward = _flash_attn_backward = _unsupported
_flash_attn_varlen_forward = _flash_attn_varlen_backward = _unsupported

FILES = {
    "flash_attn/__init__.py": f"from .flash_attn_interface import *\n__version__ = '{VERSION}'\n",
    "flash_attn/bert_padding.py": "pad_input = unpad_input = index_first_axis = None\n",
    "flash_attn_2_cuda.py": "varlen_bwd = None\n",
    f"flash_attn-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
    f"flash_attn-{VERSION}.dist-info/top_level.txt": "flash_attn\n",
    f"flash_attn-{VERSION}.dist-info/RECORD": "flash_attn/__init__.py,,\n",
}


def write_flash_attn(folder: Path) -> Path:
    """Write the package to a folder for the Python path, and return the folder."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(__file__, folder / "flash_attn" / "flash_attn_interface.py")
    return folder
