"""Turning adapters off for a while: the model is what it was before it had them, as a reference to train against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..mapping.local_params import ADAPTER
from .layers import EmbeddingAdapter, ExpertsAdapter, LinearAdapter


class AdapterSwitch:
    """Of the adapters of `chunks`. To be made when what is trained whole beside them still has its first values."""

    def __init__(self, chunks: Sequence[GPTModel]):
        kinds = LinearAdapter, ExpertsAdapter, EmbeddingAdapter
        self._adapters: list[Any] = [
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
        """Within, there are no adapters. Gradients are not to be asked for."""
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


def _unchanged(x: Tensor, output: Any, *more: Any) -> Any:
    return output


@torch.no_grad()
def _set(values: Any) -> None:
    for parameter, value in values:
        parameter.copy_(value)
