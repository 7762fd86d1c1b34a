"""Norm with the linear layer or MLP behind it, which saves neither the norm's output nor the GELU's.

The backward pass computes both again, which takes their bandwidth alone. Of a vision tower's layer this saves 6 of 16
values per hidden one (Qwen3-VL), and the host calls one function instead of three or five.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .norm import NormKernel
from .weight_gradient import accumulate


def normed_linear(
    x: Tensor, norm: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None, kernel: NormKernel
) -> tuple[Tensor, Tensor]:
    """Return norm(x) @ weight^T + bias, and x for the residual, whose gradient the norm's backward kernel adds.

    x [rows, in]; norm: its weight and bias; weight [out, in] with `main_grad`, into which its gradient is added
    """
    return cast(tuple[Tensor, Tensor], _NormedLinear.apply(x, *norm, weight, bias, kernel))


def normed_mlp(
    x: Tensor,
    norm: tuple[Tensor, Tensor | None],
    first: tuple[Tensor, Tensor | None],
    second: tuple[Tensor, Tensor | None],
    approximate: str,
    kernel: NormKernel,
) -> Tensor:
    """Return x + the MLP of norm(x): linear layers with a GELU between them.

    first, second: weight, with `main_grad`, and bias of each linear layer. approximate: of the GELU, as in torch
    """
    return cast(Tensor, _NormedMlp.apply(x, *norm, *first, *second, approximate, kernel))


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        kernel: NormKernel,
    ) -> tuple[Tensor, Tensor]:
        normed, _ = kernel.forward(x, norm_weight, norm_bias)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight)
        ctx.kernel = kernel
        return F.linear(normed, weight, bias), x

    @staticmethod
    def backward(ctx, grad: Tensor, grad_residual: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *norm_inputs, weight = ctx.saved_tensors
        kernel: NormKernel = ctx.kernel
        normed, statistics = kernel.forward(*norm_inputs)
        grad_weight = accumulate(weight, grad, normed)
        grads = kernel.backward(norm_inputs, statistics, grad @ weight, grad_residual, ctx.needs_input_grad[1:3])
        return *grads, grad_weight, grad.sum(0) if ctx.needs_input_grad[4] else None, None


class _NormedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        approximate: str,
        kernel: NormKernel,
    ) -> Tensor:
        normed, _ = kernel.forward(x, norm_weight, norm_bias)
        hidden = F.linear(normed, first_weight, first_bias)
        output = F.linear(F.gelu(hidden, approximate=approximate), second_weight, second_bias)
        ctx.save_for_backward(x, norm_weight, norm_bias, first_weight, second_weight, hidden)
        ctx.kernel, ctx.approximate = kernel, approximate
        return output.add_(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *norm_inputs, first_weight, second_weight, hidden = ctx.saved_tensors
        kernel: NormKernel = ctx.kernel
        grad_second = accumulate(second_weight, grad, F.gelu(hidden, approximate=ctx.approximate))
        grad_hidden = torch.ops.aten.gelu_backward(grad @ second_weight, hidden, approximate=ctx.approximate)
        normed, statistics = kernel.forward(*norm_inputs)
        grad_first = accumulate(first_weight, grad_hidden, normed)
        del normed
        grads = kernel.backward(norm_inputs, statistics, grad_hidden @ first_weight, grad, ctx.needs_input_grad[1:3])
        needs_first, needs_second = ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        return (
            *grads, grad_first, grad_hidden.sum(0) if needs_first else None,
            grad_second, grad.sum(0) if needs_second else None, None, None,
        )  # fmt: skip
