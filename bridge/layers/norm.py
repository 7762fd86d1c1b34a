"""Norms in plain PyTorch, with fused kernels on a GPU."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels import usable

NormBuilder = Callable[..., Any]  # arguments: config=, hidden_size=, eps=


class Norm:
    """RMSNorm or LayerNorm by `config.normalization`, with support for sequence parallelism.

    megatron-core's torch norm refuses sequence parallelism. A norm needs only the attribute `sequence_parallel` on its
    parameters: each rank has different tokens, so their gradients are summed over the tensor-parallel ranks.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False, **_
    ) -> torch.nn.Module:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        settings: dict[str, Any] = {"eps": eps, "dtype": config.params_dtype, "device": device}
        if config.normalization == "RMSNorm":
            norm = ZeroCentredNorm if config.layernorm_zero_centered_gamma else RMSNorm
        else:
            norm = ZeroCentredLayerNorm if config.layernorm_zero_centered_gamma else LayerNorm
            settings["bias"] = config.architecture.norm_bias  # type: ignore[attr-defined]
        module = norm(hidden_size, **settings)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        module.has_residual = has_residual
        return module


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with fused forward and backward kernels on a GPU: x [..., size].

    With the kernel and `has_residual`, it also returns x for the residual (megatron-core's layers accept both). The
    backward kernel then adds the residual's gradient.
    """

    zero_centred = False
    has_residual = False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not usable(x, self.weight):
            return self.torch_forward(x)
        from ..kernels.norm import rms_norm, rms_norm_with_residual

        norm = rms_norm_with_residual if self.has_residual else rms_norm
        return norm(x, self.weight, self.eps or 0.0, zero_centred=self.zero_centred)

    def torch_forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, with or without biases, with fused kernels as `RMSNorm` has them: x [..., size]."""

    zero_centred = False
    has_residual = False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not usable(x, self.weight):
            return self.torch_forward(x)
        from ..kernels.norm import layer_norm, layer_norm_with_residual

        norm = layer_norm_with_residual if self.has_residual else layer_norm
        return norm(x, self.weight, self.bias, self.eps, zero_centred=self.zero_centred)

    def torch_forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ZeroCentredLayerNorm(LayerNorm):
    """LayerNorm times 1 + weight, plus bias (Nemotron-4, https://arxiv.org/abs/2402.16819)."""

    zero_centred = True

    def torch_forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ZeroCentredNorm(RMSNorm):
    """RMSNorm times 1 + weight, in fp32 up to its output (Gemma, https://arxiv.org/abs/2403.08295)."""

    zero_centred = True

    def torch_forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class WideNorm(torch.nn.Module):
    """RMSNorm over all heads together, as a norm of queries or keys: x [sequence, batch, heads, dim].

    A rank has some of the heads (with fewer key heads than ranks, several ranks have the same one), so the mean of the
    squares is averaged over the ranks. Every rank holds the full weight, since megatron-core sums the gradients of
    these norms over the tensor-parallel ranks.
    """

    def __init__(self, heads: int, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(heads * hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.heads, self.eps = heads, eps

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        group = cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        ranks = group.size()
        mean = mean_over_ranks(x_fp32.square().mean(dim=(-2, -1), keepdim=True), group)
        local_heads = x.shape[-2]
        first = group.rank() * self.heads // ranks  # with fewer heads than ranks, adjacent ranks share a head
        weight = self.weight.view(self.heads, -1)[first : first + local_heads]
        return weight * (x_fp32 * (mean + self.eps).rsqrt()).to(x.dtype)


def mean_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the mean of x over tensor-parallel ranks, whose outputs all depend on it: its gradient is summed too."""
    summed = reduce_from_tensor_model_parallel_region(x / group.size(), group=group)
    return copy_to_tensor_model_parallel_region(summed, group=group)
