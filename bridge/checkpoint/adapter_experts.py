"""PEFT's fused adapters of experts: read as one adapter per expert, and written.

PEFT trains one adapter for the fused matrices of all experts of a layer: lora_A [experts * rank, inputs] and lora_B
[outputs, rank * experts]. Expert e owns the columns e, e + experts, ... of lora_B. Gate and up are one matrix with
one A. If PEFT fused separate adapters, the adapter of gate and up has twice the rank of the other modules. All adapters
then get this rank, padded with zero rows and columns.
"""

import re
from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from ..lora.adapter_mapping import FUSED_EXPERTS, PREFIX, AdapterPlan
from .safetensors_io import SafetensorsFolder, StoredTensor, take_strided


def fuse_experts(name: str, stacked: Tensor) -> Tensor:
    """Return PEFT's form of a stack of the experts' matrices, lora_A or lora_B by the tensor's name.

    lora_A: [experts, rank, inputs] -> [experts * rank, inputs]
    lora_B: [experts, outputs, rank] -> [outputs, rank * experts]
    """
    return stacked.flatten(0, 1) if _is_a(name) else stacked.permute(1, 2, 0).flatten(1)


def fused_shape(name: str, stacked: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of `fuse_experts`, given that of the stack."""
    experts, rows, columns = stacked
    return (experts * rows, columns) if _is_a(name) else (rows, columns * experts)


def _is_a(name: str) -> bool:
    return name.endswith("lora_A.weight")


class _FusedSource:
    """View of `source`, of which whole tensors are read."""

    def __init__(self, source: SafetensorsFolder):
        self.folder, self._source = source.folder, source

    @lru_cache(maxsize=8)  # noqa: B019  (freed with this object once the adapter is loaded)
    def _read_all(self, name: str) -> Tensor:
        return self._source.read_whole(name)


class StackedExperts(_FusedSource):
    """View of `source` in which fused adapters of experts are stacks, [experts, rank, inputs] and so on."""

    def __init__(self, source: SafetensorsFolder, plan: AdapterPlan):
        super().__init__(source)
        self._stacked = plan.stacked & source.tensors.keys()
        self._experts = max(entry.num_experts for entry in plan.entries.values())
        self.tensors = dict(source.tensors)
        for name in self._stacked:
            (rows, columns), experts = source.tensors[name].shape, self._experts
            shape = (experts, rows // experts, columns) if _is_a(name) else (experts, rows, columns // experts)
            self.tensors[name] = source.tensors[name]._replace(shape=shape)

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read a slice, as `SafetensorsFolder.read` does."""
        if name not in self._stacked:
            return self._source.read(name, dim, start, stop, expert_index, step)
        fused, experts = self._read_all(name), self._experts
        stack = fused.unflatten(0, (experts, -1)) if _is_a(name) else fused.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return take_strided(stack[expert_index].narrow(dim, start, stop - start), dim, step)


class SeparatedExperts(_FusedSource):
    """View of `source` with one adapter per expert, under the tensor names of `plan`."""

    def __init__(self, source: SafetensorsFolder, plan: AdapterPlan, rank: int):
        super().__init__(source)
        self._rank = rank
        self._experts = 1 + max(key.expert or 0 for key in plan.adapted)
        self.tensors: dict[str, StoredTensor] = {}
        self._fused: dict[str, tuple[str, int, int]] = {}  # our name -> fused tensor, expert, part
        fused = {}
        for name, stored in source.tensors.items():
            module, leaf = re.fullmatch(r"(.+?)(\.lora_[AB]\.weight)?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            if leaf and (match := FUSED_EXPERTS.fullmatch(module.removeprefix(PREFIX))):
                fused[int(match[1]), "linear_fc1" if match[2] else "linear_fc2", leaf[6]] = name
            else:
                self.tensors[name] = stored._replace(shape=self._widen(name, stored.shape))
        for key, entry in plan.entries.items():
            _, matrix, _, leaf = key.name.rsplit(".", 3)
            name = fused.get((key.layer, matrix, leaf[-1]))
            if key.expert is None or name is None:
                continue
            rows, columns = source.tensors[name].shape
            shape = (rows // self._experts, columns)
            if leaf == "lora_B":
                shape = rows // len(entry.hf), columns // self._experts
            for part, hf in enumerate(entry.hf):
                self.tensors[hf] = source.tensors[name]._replace(shape=self._widen(hf, shape))
                self._fused[hf] = name, key.expert, part

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read a slice, as `SafetensorsFolder.read` does."""
        shape = self.tensors[name].shape
        if name in self._fused:
            values = self._read_expert(name)
        elif shape == self._source.tensors[name].shape:
            return self._source.read(name, dim, start, stop, expert_index, step)
        else:
            values = self._read_all(name)
        padding = [pad for old, new in zip(values.shape[::-1], shape[::-1], strict=True) for pad in (0, new - old)]
        return take_strided(F.pad(values, padding).narrow(dim, start, stop - start), dim, step)

    def _read_expert(self, name: str) -> Tensor:
        fused, expert, part = self._fused[name]
        values = self._read_all(fused)
        if _is_a(name):
            return values.unflatten(0, (self._experts, -1))[expert]
        return values.unflatten(1, (-1, self._experts))[:, :, expert].split(self.tensors[name].shape[0])[part]

    def _widen(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `shape` with the adapter rank raised to the common rank."""
        if name.endswith(("lora_A.weight", "lora_embedding_A")):
            return (max(self._rank, shape[0]), *shape[1:])
        if name.endswith(("lora_B.weight", "lora_embedding_B")):
            return (shape[0], max(self._rank, shape[1]))
        return shape
