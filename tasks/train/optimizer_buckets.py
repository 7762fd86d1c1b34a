"""Buckets of parameters that an optimizer updates together, and the memory through which they pass."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .state_tensor import BLOCK, StateTensor


class Piece(NamedTuple):
    """Range of a parameter's elements, and their state."""

    group: int  # number of the parameter group
    parameter: Tensor  # target of the update: an fp32 master, or the model's fp32 parameter
    start: int
    stop: int
    states: dict[str, StateTensor]  # exp_avg, exp_avg_sq, and param of a master

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def gradient(self) -> Tensor:
        gradient = self.parameter.grad
        assert gradient is not None
        return self.of(gradient)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.start : self.stop]


@dataclass
class Workspace:
    """Memory for one bucket of at most `size` elements, allocated when it is first used."""

    device: torch.device
    size: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, offset: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = f"{name} {dtype}"
        if key not in self.tensors:
            self.tensors[key] = torch.empty(self.size, dtype=dtype, device=self.device)
        return self.tensors[key][offset : offset + size]


def divide(parameters: list[tuple[int, Tensor, dict[str, StateTensor]]], size: int) -> list[list[Piece]]:
    """Divide parameters into pieces, and these into buckets of at most `size` elements.

    parameters: the number of the parameter group, the parameter, and its states
    size: a multiple of state_tensor.BLOCK
    """
    assert not size % BLOCK
    buckets: list[list[Piece]] = []
    room = 0
    for group, parameter, states in parameters:
        for start in range(0, parameter.numel(), size):
            stop = min(start + size, parameter.numel())
            if stop - start > room:
                buckets.append([])
                room = size
            parts = {name: state.part(start, stop) for name, state in states.items()}
            buckets[-1].append(Piece(group, parameter, start, stop, parts))
            room -= stop - start
    return buckets
