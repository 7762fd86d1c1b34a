"""Switch that disables adapters, so that the model is its own reference model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..mapping.local_params import ADAPTER
from .layers import EmbeddingAdapter, ExpertsAdapter, LinearAdapter


class AdapterSwitch:
    """Switch of the adapters in `chunks`. It copies the fully trained modules, so create it before training."""

    def __init__(self, chunks: Sequence[GPTModel]):
        kinds = LinearAdapter, ExpertsAdapter, EmbeddingAdapter
        self._adapters: list[LinearAdapter | ExpertsAdapter | EmbeddingAdapter] = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)
        ]
        self._initial: list[tuple[Tensor, Tensor]] = [
            (parameter, parameter.detach().clone())
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and ADAPTER not in name
        ]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters and restore the initial values of fully trained modules. Run no backward pass inside."""
        current = [parameter.detach().clone() for parameter, _ in self._initial]
        for adapter in self._adapters:
            adapter.enabled = False
        _assign(zip((parameter for parameter, _ in self._initial), (value for _, value in self._initial), strict=True))
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.enabled = True
            _assign(zip((parameter for parameter, _ in self._initial), current, strict=True))


@torch.no_grad()
def _assign(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in values:
        parameter.copy_(value)
