"""Adapters of experts as PEFT saves those that it has trained: one for the fused matrices of all experts of a layer.

It has lora_A [experts * rank, inputs] and lora_B [outputs, rank * experts], of which an expert has every experts-th
column; gates and ups are one matrix, with one A. Where adapters that stood one by one were made into this form, that
matrix has twice the rank of the other modules' adapters: here all get its rank, the others with rows and columns of 0.
"""

import re
from functools import lru_cache

import torch.nn.functional as F
from torch import Tensor

from ..lora.adapter_mapping import FUSED_EXPERTS, PREFIX, AdapterPlan
from .safetensors_io import SafetensorsFolder, StoredTensor, take_every


class SeparatedExperts:
    """The tensors of `source` under the names that they have in `plan`: `tensors`, and `read` for slices of them."""

    def __init__(self, source: SafetensorsFolder, plan: AdapterPlan, rank: int):
        self.folder, self._source, self._rank = source.folder, source, rank
        self._experts = 1 + max(key.expert or 0 for key in plan.adapted)
        self.tensors: dict[str, StoredTensor] = {}
        self._of: dict[str, tuple[str, int, int]] = {}  # our name -> the fused tensor's, the expert, the part
        fused = {}
        for name, stored in source.tensors.items():
            module, leaf = re.fullmatch(r"(.+?)(\.lora_[AB]\.weight)?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            if leaf and (found := FUSED_EXPERTS.fullmatch(module.removeprefix(PREFIX))):
                fused[int(found[1]), "linear_fc1" if found[2] else "linear_fc2", leaf[6]] = name
            else:
                self.tensors[name] = stored._replace(shape=self._widened(name, stored.shape))
        for key, entry in plan.entries.items():
            _, matrix, _, leaf = key.name.rsplit(".", 3)
            name = fused.get((key.layer, matrix, leaf[-1]))
            if key.expert is None or name is None:
                continue
            rows, columns = source.tensors[name].shape
            one = (rows // self._experts, columns)
            if leaf == "lora_B":
                one = rows // len(entry.hf), columns // self._experts
            for part, own in enumerate(entry.hf):
                self.tensors[own] = source.tensors[name]._replace(shape=self._widened(own, one))
                self._of[own] = name, key.expert, part

    def read(self, name: str, dim: int, start: int, stop: int, place: int | None = None, step: int = 1) -> Tensor:
        """As SafetensorsFolder's."""
        shape = self.tensors[name].shape
        if name in self._of:
            values = self._expert(name)
        elif shape == self._source.tensors[name].shape:
            return self._source.read(name, dim, start, stop, place, step)
        else:
            values = self._whole(name)
        missing = [
            size for had, wanted in zip(values.shape[::-1], shape[::-1], strict=True) for size in (0, wanted - had)
        ]
        return take_every(F.pad(values, missing).narrow(dim, start, stop - start), dim, step)

    def _expert(self, name: str) -> Tensor:
        fused, expert, part = self._of[name]
        whole = self._whole(fused)
        if name.endswith("lora_A.weight"):
            return whole.unflatten(0, (self._experts, -1))[expert]
        return whole.unflatten(1, (-1, self._experts))[:, :, expert].split(self.tensors[name].shape[0])[part]

    @lru_cache(maxsize=8)  # noqa: B019  (it goes with this object, once an adapter is read)
    def _whole(self, name: str) -> Tensor:
        return self._source.read(name, 0, 0, self._source.tensors[name].shape[0])

    def _widened(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape`, of the rank that all adapters have here."""
        if name.endswith(("lora_A.weight", "lora_embedding_A")):
            return (max(self._rank, shape[0]), *shape[1:])
        if name.endswith(("lora_B.weight", "lora_embedding_B")):
            return (shape[0], max(self._rank, shape[1]))
        return shape
