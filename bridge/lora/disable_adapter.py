"""Temporarily disable adapters: the model is its own reference, as before training."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from ..mapping.local_params import ADAPTER
from .layers import EmbeddingAdapter, ExpertsAdapter, LinearAdapter


class AdapterSwitch:
    """A switch of the adapters of `chunks`; made while the parameters trained beside them have their first values."""

    def __init__(self, chunks: Sequence[GPTModel]):
        kinds = LinearAdapter, ExpertsAdapter, EmbeddingAdapter
        self._adapters: list[nn.Module] = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)
        ]
        self._first: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.detach().clone())
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and ADAPTER not in name
        ]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters. There must be no backward pass within."""
        now = [parameter.detach().clone() for parameter, _ in self._first]
        for adapter in self._adapters:
            adapter.forward = _unchanged
        _set(zip((parameter for parameter, _ in self._first), (first for _, first in self._first), strict=True))
        try:
            yield
        finally:
            for adapter in self._adapters:
                del adapter.forward
            _set(zip((parameter for parameter, _ in self._first), now, strict=True))


def _unchanged[T](x: Tensor, output: T, *_: object) -> T:
    return output


@torch.no_grad()
def _set(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in values:
        parameter.copy_(value)
