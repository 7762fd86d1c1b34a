"""Weights that lie quantised in a checkpoint, read unquantised: a slice at a time, with the scales of that slice.

FP8 blocks (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): a matrix in e4m3, and in
`{its name}_scale_inv` a factor for each block of `weight_block_size` rows and columns; the last blocks may be cut.

MXFP4 (https://arxiv.org/abs/2310.10537; GPT-OSS): a row in groups of 32 values of four bits, two in a byte, the first
in its low half. `{its name}_blocks` [experts, out, groups, 16] has the bytes, `{its name}_scales` [experts, out,
groups] an exponent of two, plus 127, for each group. Unquantised the tensor is [experts, in, out].
"""

from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..mapping.param_mapping import HfConfig
from .safetensors_io import SafetensorsFolder, StoredTensor, take_every

SCALES = "_scale_inv"
GROUP = 32  # values of MXFP4 that share a scale


class WeightSource(Protocol):
    """A model folder's tensors, as they are or unquantised."""

    folder: Path
    tensors: dict[str, StoredTensor]

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor: ...


def open_weights(folder: str | Path, hf_config: HfConfig) -> WeightSource:
    """Return the tensors of a model folder, by the names and in the values that they have unquantised.

    Raises ValueError for a way of quantising that is not known, and as SafetensorsFolder does.
    """
    quantization = hf_config.get("quantization_config")
    if not quantization:
        return SafetensorsFolder(folder)
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size"):
        return Fp8Folder(folder, tuple(quantization["weight_block_size"]))
    if method == "mxfp4":
        return Mxfp4Folder(folder)
    how = f"quant_method {method!r}"
    if method == "fp8":
        how += " without weight_block_size"
    raise ValueError(
        f"{Path(folder) / 'config.json'}: quantization_config has {how}; known are 'fp8' with weight_block_size, "
        "'mxfp4', and unquantised weights. Take the model's checkpoint in bfloat16"
    )


class Fp8Folder:
    """Matrices in FP8 blocks, other tensors as they are. Raises ValueError where a matrix's scales do not fit it."""

    def __init__(self, folder: str | Path, block: tuple[int, ...]):
        self.stored = SafetensorsFolder(folder)
        self.folder, self.block = self.stored.folder, block
        self.tensors = {name: at for name, at in self.stored.tensors.items() if not name.endswith(SCALES)}
        for name in self.stored.tensors.keys() - self.tensors.keys():
            scales, matrix = self.stored.tensors[name], self.tensors.get(name.removesuffix(SCALES))
            if matrix is None:
                raise ValueError(f"{scales.file} has {name}, and the folder has no tensor that it is for")
            blocks = (-(-length // each) for length, each in zip(matrix.shape[-2:], block, strict=True))
            if scales.shape != (expected := (*matrix.shape[:-2], *blocks)):
                raise ValueError(
                    f"{scales.file}: {name} has shape {list(scales.shape)}, and for {list(matrix.shape)} in blocks of "
                    f"{list(block)} it has {list(expected)}"
                )

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read as `SafetensorsFolder.read`; quantized tensors in fp32."""
        if name + SCALES not in self.stored.tensors:
            return self.stored.read(name, dim, start, stop, expert_index, step)
        values = self.stored.read(name, dim, start, stop, expert_index)
        size, other = self.block[dim], 1 - dim
        first = start // size  # the slice's first block
        scales = self.stored.read(name + SCALES, dim, first, -(-stop // size), expert_index)
        # Exponents of two alone (ue8m0) come under either name.
        scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        scales = scales.repeat_interleave(size, dim).narrow(dim, start - first * size, stop - start)
        scales = scales.repeat_interleave(self.block[other], other).narrow(other, 0, values.shape[other])
        return take_every(values.float() * scales, dim, step)


class Mxfp4Folder:
    """Stacked experts in MXFP4, other tensors as they are. Raises ValueError where blocks and scales do not fit."""

    def __init__(self, folder: str | Path):
        self.stored = SafetensorsFolder(folder)
        self.folder = self.stored.folder
        self.tensors: dict[str, StoredTensor] = {}
        for name, at in self.stored.tensors.items():
            base, _, part = name.rpartition("_")
            if part not in ("blocks", "scales"):
                self.tensors[name] = at
                continue
            blocks, scales = (self.stored.tensors.get(f"{base}_{each}") for each in ("blocks", "scales"))
            if blocks is None or scales is None:
                raise ValueError(f"{at.file} has {name}, and the folder has not both {base}_blocks and {base}_scales")
            if blocks.shape != (*scales.shape, GROUP // 2) or len(scales.shape) != 3:
                raise ValueError(
                    f"{at.file}: {base}_blocks has shape {list(blocks.shape)} and {base}_scales {list(scales.shape)}: "
                    f"they are to be [experts, out, groups, {GROUP // 2}] and [experts, out, groups]"
                )
            experts, outputs, groups = scales.shape
            shape = (experts, groups * GROUP, outputs)
            self.tensors[base] = StoredTensor(blocks.file, blocks.offset, torch.bfloat16, shape)

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read as `SafetensorsFolder.read`; quantized tensors in bf16, which holds every value of MXFP4."""
        if name in self.stored.tensors:
            return self.stored.read(name, dim, start, stop, expert_index, step)
        parts = name + "_blocks", name + "_scales"
        inputs = 1 if expert_index is None else 0  # the dimension of them in what is asked for
        if dim != inputs:
            across = dim if dim < inputs else inputs  # outputs come before inputs in the file
            values = mxfp4(*(self.stored.read(part, across, start, stop, expert_index, step) for part in parts))
            return values.transpose(-1, -2)
        first = start // GROUP
        values = mxfp4(*(self.stored.read(part, inputs + 1, first, -(-stop // GROUP), expert_index) for part in parts))
        values = values.transpose(-1, -2).narrow(inputs, start - first * GROUP, stop - start)
        return take_every(values, inputs, step)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., groups, 16] and [..., groups] -> bf16 [..., groups * 32]"""
    numbers = blocks.contiguous().flatten().view(torch.int16).long() & 0xFFFF
    values = _four_values().gather(0, numbers).view(torch.bfloat16).view(*scales.shape, GROUP)
    return values.mul_(torch.exp2(scales.float() - 127).bfloat16().unsqueeze(-1)).flatten(-2)


@cache
def _four_values() -> Tensor:
    """int64 [65536]: for every two bytes of MXFP4 their four values in bf16, as one number to be looked up."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
    codes = torch.cat((sizes, -sizes))
    number = torch.arange(65536)
    return torch.stack([codes[number >> shift & 15] for shift in (0, 4, 8, 12)], dim=-1).view(torch.int64).squeeze(-1)
