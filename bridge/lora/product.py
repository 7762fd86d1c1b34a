"""Products of frozen weights and their adapters, each in one autograd function.

Both parts of the output, and of the input's gradient, are summed within the matrix product of the frozen weight, or
added in place.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

# Bytes of a row's low-rank values up to which the tiles of the kernels fit into a multiprocessor's memory
NARROW = 256


def is_narrow(a: Tensor) -> bool:
    """Return whether the fused kernels take the factor a [..., rank, in]."""
    return a.shape[-2] * a.itemsize <= NARROW


def adapted_linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float) -> Tensor:
    """Return x @ weight^T + scaling * dropout(x) @ a^T @ b^T.

    x [..., in]; weight [out, in], frozen; a [rank, in]; b [out, rank]; all of one type -> [..., out]. Dropout with a
    probability above 0 needs the fused kernels, and a factor that `is_narrow`.
    """
    output = _AdaptedLinear.apply(x.reshape(-1, x.shape[-1]), weight, a, b, scaling, dropout)
    return cast(Tensor, output).view(*x.shape[:-1], len(weight))


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float) -> Tensor:
        keys = None
        if dropout:
            from ..kernels.low_rank_dropout import draw_keys, project

            keys, scaling = draw_keys(x), scaling / (1 - dropout)
            low_rank = project(x, a, keys, dropout, scaling)
        else:
            low_rank = _scaled_product(x, a.t(), scaling)
        output = low_rank @ b.t()
        output.addmm_(x, weight.t())
        ctx.save_for_backward(x, weight, a, b, low_rank, keys)
        ctx.scaling, ctx.dropout = scaling, dropout
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, a, b, low_rank, keys = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[0]
        grad_b = grad.t() @ low_rank
        grad_low_rank = _scaled_product(grad, b, ctx.scaling)
        if ctx.dropout:
            from ..kernels.low_rank_dropout import project_backward

            grad_x, grad_a = project_backward(grad_low_rank, x, a, keys, ctx.dropout, needs_x=needs_x)
        else:
            grad_x, grad_a = grad_low_rank @ a if needs_x else None, grad_low_rank.t() @ x
        if grad_x is not None:
            grad_x.addmm_(grad, weight)
        return grad_x, None, grad_a, grad_b, None, None


def adapted_experts(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, ends: Tensor) -> Tensor:
    """Return x @ weight^T + scaling * x @ a^T @ b^T, with the matrices of each row's expert, on a GPU in bf16.

    a must be narrow: see `is_narrow`.
    x [rows, in], sorted by expert; weight [experts, out, in], frozen; a [experts, rank, in]; b [experts, out, rank];
    ends int32 [experts], end of each expert's rows -> [rows, out].
    """
    return cast(Tensor, _AdaptedExperts.apply(x, weight, a, b, scaling, ends))


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float, ends: Tensor) -> Tensor:
        from ..kernels.low_rank_rows import add_low_rank, project_rows

        low_rank = project_rows(x, a, ends, scaling)
        output = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        add_low_rank(output, low_rank, b.transpose(1, 2), ends)
        ctx.save_for_backward(x, weight, a, b, low_rank, ends)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from ..kernels.low_rank_rows import add_low_rank, factor_gradients, project_rows

        x, weight, a, b, low_rank, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_b = factor_gradients(grad, low_rank, ends).transpose(1, 2)
        grad_low_rank = project_rows(grad, b.transpose(1, 2), ends, ctx.scaling)
        grad_a, grad_x = factor_gradients(x, grad_low_rank, ends), None
        if ctx.needs_input_grad[0]:
            grad_x = F.grouped_mm(grad, weight, offs=ends)
            add_low_rank(grad_x, grad_low_rank, a, ends)
        return grad_x, None, grad_a, grad_b, None, None


def _scaled_product(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return scale * x @ y, scaled before rounding."""
    return torch.addmm(x.new_empty(len(x), y.shape[1]), x, y, beta=0, alpha=scale)
