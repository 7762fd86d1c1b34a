"""Recording of the experts that transformers' models choose during generation."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

LAYER = re.compile(r"\.layers\.(\d+)\.(.+\.)?experts$")


class ExpertRecorder:
    """Recorder of the chosen experts in one call of `generate`.

    It reads the inputs of each layer's module `experts`: hidden states, expert ids of each row, and expert weights.
    """

    def __init__(self, layers: int):
        self._layers = layers
        self._ids: dict[int, list[Tensor]] = {}  # per layer, [rows, tokens, topk] of each forward pass
        self._rows = 1

    @contextmanager
    def record(self, model: nn.Module, rows: int) -> Iterator[None]:
        """Record within the context. Raises ValueError if the model's expert modules do not receive expert ids."""
        self._rows, hooks = rows, []
        for name, module in model.named_modules():
            if (match := LAYER.search(name)) is not None:
                hooks.append(module.register_forward_pre_hook(partial(self._record_ids, int(match[1]))))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if not self._ids:
            raise ValueError(
                f"--router_replay_mode R3: transformers' {type(model).__name__} does not expose the chosen experts. "
                "Set R2"
            )

    def _record_ids(self, layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs) > 1 and not inputs[1].is_floating_point() and inputs[1].dtype != torch.bool:
            self._ids.setdefault(layer, []).append(inputs[1].unflatten(0, (self._rows, -1)).short())

    def experts(self) -> np.ndarray:
        """Return int16 [rows, tokens, layers, topk] for all processed tokens; -1 in dense layers."""
        by_layer = {layer: torch.cat(steps, dim=1) for layer, steps in self._ids.items()}
        dense = torch.full_like(next(iter(by_layer.values())), -1)
        return torch.stack([by_layer.get(layer, dense) for layer in range(self._layers)], dim=2).cpu().numpy()
