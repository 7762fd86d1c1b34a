"""Dataclass of tensors that data loaders send from their workers."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass
class TensorDataclass:
    """Dataclass of tensors that are pickled as bytes.

    torch pickles each tensor as shared memory with a file descriptor. A step of many micro batches would exceed their
    limit.
    """

    def pin_memory(self) -> Self:
        pinnable = {name: value for name, value in vars(self).items() if isinstance(value, Tensor | TensorDataclass)}
        return replace(self, **{name: value.pin_memory() for name, value in pinnable.items()})

    def __getstate__(self) -> dict:
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()
        }
