"""LoRA adapters of megatron-core's linear layers and embeddings.

An adapter is a child of the layer's module and runs after it. Its parameters are split like the layer's weight. Tensor
parallelism communicates only the low-rank activations between A and B.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..kernels import usable
from ..layers.experts import grouped_product
from .product import adapted_experts, adapted_linear, is_narrow


class MatrixSharding(NamedTuple):
    """Sharding of a weight over ranks."""

    split: int | None  # dimension of the weight [outputs, inputs] that is split over `group`; None: replicated
    group: ProcessGroup
    sequence_parallel: bool  # each rank of the group has different tokens outside of the layer
    communicates: bool  # the module communicates between ranks; else its caller does


class _Adapter(nn.Module):
    """Adapter with this rank's shards of lora_A [..., parts * rank, inputs] and lora_B [..., outputs, rank].

    parts: bool [outputs, parts], which part of lora_A each output uses. lora_B stays 0 for an output without one.
    """

    mask: Tensor | None
    enabled = True

    def __init__(
        self, weight: Tensor, parts: Tensor, rank: int, scaling: float, dtype: torch.dtype, sharding: MatrixSharding
    ):
        super().__init__()
        self.scaling, self.sharding = scaling, sharding
        *leading, outputs, inputs = weight.shape
        rows = parts.shape[1] * rank
        self.lora_A = nn.Parameter(torch.empty(*leading, rows, inputs, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(*leading, outputs, rank, dtype=dtype, device=weight.device))
        self.register_buffer("mask", None if parts.all() else parts.to(self.lora_B), persistent=False)
        self._set_parallel_attributes()

    def _set_parallel_attributes(self) -> None:
        """Set megatron-core's parameter attributes: whether they are split, and whether their gradients are partial."""
        for parameter, dim in ((self.lora_A, 1), (self.lora_B, 0)):
            is_split = self.sharding.split == dim
            if is_split:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            is_partial = self.sharding.sequence_parallel and self.sharding.communicates and not is_split
            parameter.sequence_parallel = is_partial  # type: ignore[attr-defined]

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [..., parts * rank, inputs] and B [..., outputs, parts * rank] of weight + scaling * B @ A."""
        a, b = self.lora_A, self.lora_B
        if not self.sharding.communicates and self.sharding.split is not None:
            # Each rank has a part of the outputs, or of their sum, so the gradient of the replicated factor is partial.
            if self.sharding.split == 0:
                a = copy_to_tensor_model_parallel_region(a, group=self.sharding.group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=self.sharding.group)
        if self.mask is not None:
            b = (b.unsqueeze(-2) * self.mask.unsqueeze(-1)).flatten(-2)
        return a.to(dtype), b.to(dtype)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight in fp32, given this rank's shard `weight`."""
        a, b = self.factors(torch.float32)
        return torch.addmm(weight.float(), b, a, alpha=self.scaling)


class LinearAdapter(_Adapter):
    """Adapter of a linear layer with weight [outputs, inputs]."""

    def __init__(self, weight: Tensor, *shape: Any, dropout: float, dora: bool, bias: Tensor | None):
        super().__init__(weight, *shape)
        self.dropout = dropout
        self.magnitude = None
        if dora:
            # In fp32: rounding would change the model before training.
            self.magnitude = nn.Parameter(torch.empty(len(weight), dtype=torch.float32, device=weight.device))
            if self.sharding.split == 0:
                set_tensor_model_parallel_attributes(self.magnitude, is_parallel=True, dim=0, stride=1)
            is_partial = self.lora_B.sequence_parallel  # type: ignore[attr-defined]
            self.magnitude.sequence_parallel = is_partial  # type: ignore[attr-defined]
            # A list does not register them here. Transformer Engine's modules without a bias have an empty one.
            self._weight_and_bias = [weight, bias if bias is not None and bias.numel() else None]

    def forward(self, x: Tensor, output: Any) -> Any:
        """Return `output` with the adapter's product added.

        x: the layer's input. output: the layer's output, as megatron-core has it with or without a deferred bias.
        """
        if not self.enabled:
            return output
        y, *deferred_bias = output if isinstance(output, tuple) else (output,)
        a, b = self.factors(y.dtype)
        low_rank = self._to_output_tokens(F.linear(self._apply_dropout(x.to(y.dtype)), a))
        if self.magnitude is None:
            y = torch.addmm(y.flatten(0, -2), low_rank.flatten(0, -2), b.t(), alpha=self.scaling).view(y.shape)
        else:
            bias = self._weight_and_bias[1] if not deferred_bias or deferred_bias[0] is None else None
            y = y if bias is None else y - bias
            y = torch.add(y, F.linear(low_rank, b), alpha=self.scaling)
            y = (y * self._row_scale(self._weight_and_bias[0])).to(low_rank.dtype)
            y = y if bias is None else y + bias
        return (y, *deferred_bias) if isinstance(output, tuple) else y

    def _to_output_tokens(self, low_rank: Tensor) -> Tensor:
        """Communicate A's output [tokens ..., parts * rank] so that it has the tokens of the layer's output."""
        split, group, sequence_parallel, communicates = self.sharding
        if split is None or not communicates:
            return low_rank
        if split == 0:
            if sequence_parallel:
                return gather_from_sequence_parallel_region(low_rank, group=group)
            return copy_to_tensor_model_parallel_region(low_rank, group=group)
        if sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low_rank, group=group)
        return reduce_from_tensor_model_parallel_region(low_rank, group=group)

    def _apply_dropout(self, x: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return x
        if self.sharding.split == 1 or (self.sharding.sequence_parallel and self.sharding.communicates):
            # Each rank has different inputs, or different tokens.
            with get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)

    @torch.no_grad()
    def _row_norms(self, weight: Tensor) -> Tensor:
        """Return DoRA's norm of each row of weight + B A, fp32 [outputs], without gradients.

        |w + ba|^2 = |w|^2 + 2 b (a w) + b (a a^T) b^T, which avoids the product of B and A.
        """
        a, b = self.factors(torch.float32)
        b = self.scaling * b
        rows, width = b.shape
        # [outputs, 1 + parts * rank]
        sums = torch.cat([_squared_row_norms(weight).unsqueeze(1), _matmul_fp32(weight, a)], dim=1)
        gram = a @ a.t()
        if self.sharding.split == 1:
            summed = torch.cat([sums.flatten(), gram.flatten()])
            dist.all_reduce(summed, group=self.sharding.group)
            sums, gram = summed[: sums.numel()].view(rows, 1 + width), summed[sums.numel() :].view(width, width)
        squares = sums[:, 0] + 2 * (sums[:, 1:] * b).sum(1) + ((b @ gram) * b).sum(1)
        return squares.clamp(min=0).sqrt()

    def _row_scale(self, weight: Tensor) -> Tensor:
        """Return DoRA's factor on each row of weight + B A, fp32 [outputs]."""
        assert self.magnitude is not None
        scale = self.magnitude / self._row_norms(weight)
        return scale if self.mask is None else torch.where(self.mask.any(dim=1), scale, 1.0)

    @torch.no_grad()
    def init_magnitude(self) -> None:
        """Set DoRA's magnitude to the row norms, so that it does not change the model."""
        if self.magnitude is not None:
            self.magnitude.copy_(self._row_norms(self._weight_and_bias[0]))

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        weights = super().merged(weight)
        if self.magnitude is None:
            return weights
        return weights * self._row_scale(weight).unsqueeze(1)


class FusedLinearAdapter(LinearAdapter):
    """Adapter within the matrix product of a frozen linear layer of megatron-core: its `_forward_impl`.

    Without tensor parallelism and DoRA.
    """

    def forward(self, *, input: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> Tensor:
        """Return the layer's product and the adapter's: input [..., in], weight [out, in], bias [out] -> [..., out].

        Other arguments are about communication and gradients of the weight.
        """
        dropout = self.dropout if self.training else 0.0
        a, b = self.factors(input.dtype)
        if not self.enabled:
            y = F.linear(input, weight)
        elif dropout and not (usable(input) and is_narrow(a)):
            y = super().forward(input, F.linear(input, weight))
        else:
            y = adapted_linear(input, weight, a, b, self.scaling, dropout)
        # As in megatron-core, a bias gets no gradient from the product of a frozen weight: see model/build.py.
        return y if bias is None else y + bias.detach()


class ExpertsAdapter(_Adapter):
    """Adapter of the stacked weights [experts, outputs, inputs] of this rank's experts: their `_forward_impl`."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        """Return the product of x [rows, in] and `weight`, and the adapter's -> [rows, outputs].

        The rows are sorted by expert. ends, counts: as in layers/experts.py.
        """
        if not self.enabled:
            return grouped_product(x, weight, ends, counts)
        a, b = self.factors(x.dtype)
        if counts is None and is_narrow(a):
            return adapted_experts(x, weight, a, b, self.scaling, ends)
        if counts is None:  # grouped products need rows of at least 16 bytes
            padding = -a.shape[1] % 8
            a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        delta = grouped_product(grouped_product(x, a, ends, counts), b, ends, counts)
        return torch.add(grouped_product(x, weight, ends, counts), delta, alpha=self.scaling)

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int = 0) -> Tensor:
        """Return the merged weight of one expert, by its index on this rank."""
        a, b = self.factors(torch.float32)
        return torch.addmm(weight.float(), b[expert], a[expert], alpha=self.scaling)


class EmbeddingAdapter(nn.Module):
    """Adapter of an embedding: this rank's rows of lora_A [vocabulary, rank], and lora_B [hidden, rank]."""

    enabled = True

    def __init__(
        self, weight: Tensor, rank: int, scaling: float, dtype: torch.dtype, sharding: MatrixSharding, first_token: int
    ):
        """first_token: the first token id of this rank's rows."""
        super().__init__()
        self.scaling, self.sharding, self.first_token = scaling, sharding, first_token
        words, hidden = weight.shape
        self.lora_A = nn.Parameter(torch.empty(words, rank, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(hidden, rank, dtype=dtype, device=weight.device))
        set_tensor_model_parallel_attributes(self.lora_A, is_parallel=True, dim=0, stride=1)
        self.lora_B.sequence_parallel = sharding.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        """Return y plus the adapter's product for `tokens` [batch, sequence].

        y: [batch, sequence, hidden]; under sequence parallelism [sequence / TP, batch, hidden].
        """
        if not self.enabled:
            return y
        local_ids = tokens - self.first_token
        is_local = (local_ids >= 0) & (local_ids < len(self.lora_A))
        low_rank = F.embedding(local_ids * is_local, self.lora_A) * is_local.unsqueeze(-1)
        if self.sharding.sequence_parallel:
            low_rank = low_rank.transpose(0, 1).contiguous()
            low_rank = reduce_scatter_to_sequence_parallel_region(low_rank, group=self.sharding.group)
        else:
            low_rank = reduce_from_tensor_model_parallel_region(low_rank, group=self.sharding.group)
        return torch.add(y, F.linear(low_rank, self.lora_B).to(y.dtype), alpha=self.scaling)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight, as `_Adapter.merged` does."""
        return weight.float() + self.scaling * self.lora_A.float() @ self.lora_B.float().t()


def _squared_row_norms(weight: Tensor) -> Tensor:
    """Return the squared norm of each row, fp32, without an fp32 copy of the weight."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()


def _matmul_fp32(weight: Tensor, a: Tensor) -> Tensor:
    """Return weight @ a^T in fp32, for fp32 `a`."""
    if weight.dtype == torch.float32:
        return weight @ a.t()
    return torch.cat([part.float() @ a.t() for part in weight.split(4096)])
