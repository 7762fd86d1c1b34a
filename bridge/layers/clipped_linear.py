"""Linear layers that clip their inputs and outputs to ranges of the checkpoint (the tower of Gemma 4 E2B and E4B)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mapping.architecture import CLIP_BOUNDS
from .mergers import Linear


class ClippedLinear(Linear):
    """Linear layer of several matrices with ranges of their own: x [rows, inputs] -> [rows, outputs].

    parts: names of the matrices, before those of their bounds; blocks: the outputs are as many blocks, each with
    outputs of every part in turn
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        parts: Sequence[str] = ("",),
        blocks: int = 1,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(inputs, outputs, bias=False, dtype=dtype, device=device)
        self.parts, self.blocks = tuple(parts), blocks
        for part in parts:
            for bound in CLIP_BOUNDS:
                self.register_buffer(part + bound, torch.empty(1, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if self.parts == ("",):
            return self._clip(super().forward(self._clip(x, "input")), "output")
        weights = self.weight.unflatten(0, (self.blocks, len(self.parts), -1)).unbind(1)
        outputs = []
        for part, weight in zip(self.parts, weights, strict=True):
            output = F.linear(self._clip(x, part + "input"), weight.flatten(0, 1))
            outputs.append(self._clip(output, part + "output").unflatten(-1, (self.blocks, -1)))
        return torch.stack(outputs, dim=-2).flatten(-3)

    def _clip(self, x: Tensor, side: str) -> Tensor:
        return torch.clamp(x, self.get_buffer(side + "_min"), self.get_buffer(side + "_max"))
