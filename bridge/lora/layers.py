"""Adapters: what stands beside a matrix of megatron-core's, and adds to what the matrix gives.

An adapter is a child of the matrix's module, and is called behind it. Its parameters are split as the matrix is; what
goes from A to B has a few numbers a token, so that what tensor parallelism exchanges is little.
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

from ..layers.experts import grouped_product


class MatrixSharding(NamedTuple):
    """Distribution of a matrix over processes."""

    split: int | None  # the dimension of the matrix [outputs, inputs] that is split over `group`; None: it is whole
    group: ProcessGroup
    sequence_parallel: bool  # outside the matrix each process of the group has its own tokens
    exchanges: bool  # the matrix's module sends between processes; else others do it, before and behind the module


class _Adapter(nn.Module):
    """lora_A [..., parts * rank, inputs], lora_B [..., outputs, rank], this process's shards.

    `parts` [outputs, parts]: which part of lora_A each output has. Where it has none, lora_B stays 0.
    """

    mask: Tensor | None

    def __init__(
        self, weight: Tensor, parts: Tensor, rank: int, scaling: float, dtype: torch.dtype, sharding: MatrixSharding
    ):
        super().__init__()
        self.scaling, self.sharding = scaling, sharding
        *lead, outputs, inputs = weight.shape
        rows = parts.shape[1] * rank
        self.lora_A = nn.Parameter(torch.empty(*lead, rows, inputs, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(*lead, outputs, rank, dtype=dtype, device=weight.device))
        self.register_buffer("mask", None if parts.all() else parts.to(self.lora_B), persistent=False)
        self._mark()

    def _mark(self) -> None:
        """Set megatron-core's marks on parameters: whether they are split, and whether their gradients are partial."""
        for parameter, dim in ((self.lora_A, 1), (self.lora_B, 0)):
            split = self.sharding.split == dim
            if split:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
            partial = self.sharding.sequence_parallel and self.sharding.exchanges and not split
            parameter.sequence_parallel = partial  # type: ignore[attr-defined]

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [..., parts * rank, inputs] and B [..., outputs, parts * rank] of weight + scaling * B @ A."""
        a, b = self.lora_A, self.lora_B
        if not self.sharding.exchanges and self.sharding.split is not None:
            # Each process has a part of the outputs, or of their sum: so is the gradient of what is not split.
            if self.sharding.split == 0:
                a = copy_to_tensor_model_parallel_region(a, group=self.sharding.group)
            else:
                b = copy_to_tensor_model_parallel_region(b, group=self.sharding.group)
        if self.mask is not None:
            b = (b.unsqueeze(-2) * self.mask.unsqueeze(-1)).flatten(-2)
        return a.to(dtype), b.to(dtype)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """`weight`, this process's shard, with the adapter in it: a copy in fp32."""
        a, wide = self.factors(torch.float32)
        return torch.addmm(weight.float(), wide, a, alpha=self.scaling)


class LinearAdapter(_Adapter):
    """Beside a matrix [outputs, inputs]."""

    def __init__(self, weight: Tensor, *shape: Any, dropout: float, dora: bool, bias: Tensor | None):
        super().__init__(weight, *shape)
        self.dropout = dropout
        self.magnitude = None
        if dora:
            # In fp32: rounded it would change the model at the beginning.
            self.magnitude = nn.Parameter(torch.empty(len(weight), dtype=torch.float32, device=weight.device))
            if self.sharding.split == 0:
                set_tensor_model_parallel_attributes(self.magnitude, is_parallel=True, dim=0, stride=1)
            partial = self.lora_B.sequence_parallel  # type: ignore[attr-defined]
            self.magnitude.sequence_parallel = partial  # type: ignore[attr-defined]
            # In a list: they are not this module's. Transformer Engine's modules without a bias have an empty one.
            self._matrix = [weight, bias if bias is not None and bias.numel() else None]

    def forward(self, x: Tensor, output: Any) -> Any:
        """x, what went into the matrix, and what came out of it (with or without megatron-core's second value, a bias
        to be added later) -> the same with the adapter"""
        y, *later = output if isinstance(output, tuple) else (output,)
        a, wide = self.factors(y.dtype)
        inner = self._exchange(F.linear(self._drop(x.to(y.dtype)), a))
        if self.magnitude is None:
            y = torch.addmm(y.flatten(0, -2), inner.flatten(0, -2), wide.t(), alpha=self.scaling).view(y.shape)
        else:
            bias = self._matrix[1] if not later or later[0] is None else None
            y = y if bias is None else y - bias
            y = torch.add(y, F.linear(inner, wide), alpha=self.scaling)
            y = (y * self._growth(self._matrix[0])).to(inner.dtype)
            y = y if bias is None else y + bias
        return (y, *later) if isinstance(output, tuple) else y

    def _exchange(self, inner: Tensor) -> Tensor:
        """Exchange A's output [tokens ..., parts * rank] for B's input: all tokens of the matrix's output."""
        split, group, sequence_parallel, exchanges = self.sharding
        if split is None or not exchanges:
            return inner
        if split == 0:
            if sequence_parallel:
                return gather_from_sequence_parallel_region(inner, group=group)
            return copy_to_tensor_model_parallel_region(inner, group=group)
        if sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return reduce_from_tensor_model_parallel_region(inner, group=group)

    def _drop(self, x: Tensor) -> Tensor:
        if not self.dropout or not self.training:
            return x
        if self.sharding.split == 1 or (self.sharding.sequence_parallel and self.sharding.exchanges):
            # Each process has its own inputs, or its own tokens.
            with get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """DoRA: the length of each row of weight + B A, fp32 [outputs]; no gradient goes through it.

        |w + ba|^2 = |w|^2 + 2 b (a w) + b (a a^T) b^T: without the product of B and A.
        """
        a, wide = self.factors(torch.float32)
        wide = self.scaling * wide
        rows, width = wide.shape
        sums = torch.cat([_squares(weight).unsqueeze(1), _product(weight, a)], dim=1)  # [outputs, 1 + parts * rank]
        gram = a @ a.t()
        if self.sharding.split == 1:
            both = torch.cat([sums.flatten(), gram.flatten()])
            dist.all_reduce(both, group=self.sharding.group)
            sums, gram = both[: sums.numel()].view(rows, 1 + width), both[sums.numel() :].view(width, width)
        squares = sums[:, 0] + 2 * (sums[:, 1:] * wide).sum(1) + ((wide @ gram) * wide).sum(1)
        return squares.clamp(min=0).sqrt()

    def _growth(self, weight: Tensor) -> Tensor:
        """DoRA: by what each row of weight + B A is multiplied, fp32 [outputs]."""
        assert self.magnitude is not None
        growth = self.magnitude / self._lengths(weight)
        return growth if self.mask is None else torch.where(self.mask.any(dim=1), growth, 1.0)

    @torch.no_grad()
    def measure(self) -> None:
        """DoRA: set the magnitude to the rows' lengths, at which it changes nothing."""
        if self.magnitude is not None:
            self.magnitude.copy_(self._lengths(self._matrix[0]))

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        weights = super().merged(weight)
        if self.magnitude is None:
            return weights
        return weights * self._growth(weight).unsqueeze(1)


class ExpertsAdapter(_Adapter):
    """Beside the stacked matrices [experts, outputs, inputs] of this process's experts."""

    def forward(self, x: Tensor, y: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        """x, y [rows, inputs and outputs], sorted by expert; ends and counts as in layers/experts.py"""
        a, wide = self.factors(y.dtype)
        if counts is None:  # rows of grouped products are of 16 bytes at least
            padding = -self.lora_A.shape[1] % 8
            a, wide = F.pad(a, (0, 0, 0, padding)), F.pad(wide, (0, padding))
        added = grouped_product(grouped_product(x, a, ends, counts), wide, ends, counts)
        return torch.add(y, added, alpha=self.scaling)

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int = 0) -> Tensor:
        """Return the same of one expert, by its number in this process."""
        a, wide = self.factors(torch.float32)
        return torch.addmm(weight.float(), wide[expert], a[expert], alpha=self.scaling)


class EmbeddingAdapter(nn.Module):
    """Beside an embedding [words, hidden]: lora_A [words, rank], this process's words, and lora_B [hidden, rank]."""

    def __init__(
        self, weight: Tensor, rank: int, scaling: float, dtype: torch.dtype, sharding: MatrixSharding, first: int
    ):
        """`first`: the first of this process's words."""
        super().__init__()
        self.scaling, self.sharding, self.first = scaling, sharding, first
        words, hidden = weight.shape
        self.lora_A = nn.Parameter(torch.empty(words, rank, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(hidden, rank, dtype=dtype, device=weight.device))
        set_tensor_model_parallel_attributes(self.lora_A, is_parallel=True, dim=0, stride=1)
        self.lora_B.sequence_parallel = sharding.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        """Token ids [batch, sequence]; y [batch, sequence, hidden], under sequence parallelism [sequence / TP, batch,
        hidden] -> the shape of y"""
        local = tokens - self.first
        mine = (local >= 0) & (local < len(self.lora_A))
        inner = F.embedding(local * mine, self.lora_A) * mine.unsqueeze(-1)
        if self.sharding.sequence_parallel:
            inner = inner.transpose(0, 1).contiguous()
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.sharding.group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.sharding.group)
        return torch.add(y, F.linear(inner, self.lora_B).to(y.dtype), alpha=self.scaling)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Merge as `_Adapter.merged`."""
        return weight.float() + self.scaling * self.lora_A.float() @ self.lora_B.float().t()


def _squares(weight: Tensor) -> Tensor:
    """Return the sum of each row's squares, fp32, without a copy of the whole in fp32."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()


def _product(weight: Tensor, a: Tensor) -> Tensor:
    """weight @ a^T in fp32, for fp32 `a`."""
    if weight.dtype == torch.float32:
        return weight @ a.t()
    return torch.cat([part.float() @ a.t() for part in weight.split(4096)])
