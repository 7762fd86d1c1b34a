"""Weights that lie quantised in a checkpoint, read as fp32: a slice at a time, with the scales of that slice.

FP8 blocks (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): a matrix in e4m3, and in
`{its name}_scale_inv` a factor for each block of `weight_block_size` rows and columns; the last blocks may be cut.
"""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .safetensors_io import SafetensorsFolder, Stored

SCALES = "_scale_inv"


class Weights(Protocol):
    """A model folder's tensors, as they are or unquantised."""

    folder: Path
    tensors: dict[str, Stored]

    def read(self, name: str, dim: int, start: int, stop: int, place: int | None = None) -> Tensor: ...


def open_weights(folder: str | Path, hf_config: dict[str, Any]) -> Weights:
    """The tensors of a model folder, by the names and in the values that they have unquantised.

    Raises ValueError for a way of quantising that is not known, and as SafetensorsFolder does.
    """
    quantization = hf_config.get("quantization_config")
    if not quantization:
        return SafetensorsFolder(folder)
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size"):
        return Fp8Folder(folder, tuple(quantization["weight_block_size"]))
    how = f"quant_method {method!r}"
    if method == "fp8":
        how += " without weight_block_size"
    raise ValueError(
        f"{Path(folder) / 'config.json'}: quantization_config has {how}; known are 'fp8' with weight_block_size, and "
        "unquantised weights. Take the model's checkpoint in bfloat16"
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
            if scales.shape != (wanted := (*matrix.shape[:-2], *blocks)):
                raise ValueError(
                    f"{scales.file}: {name} has shape {list(scales.shape)}, and for {list(matrix.shape)} in blocks of "
                    f"{list(block)} it has {list(wanted)}"
                )

    def read(self, name: str, dim: int, start: int, stop: int, place: int | None = None) -> Tensor:
        """As SafetensorsFolder.read; in fp32 where the tensor is quantised."""
        found = self.stored.read(name, dim, start, stop, place)
        if name + SCALES not in self.stored.tensors:
            return found
        size, other = self.block[dim], 1 - dim
        first = start // size  # the slice's first block
        scales = self.stored.read(name + SCALES, dim, first, -(-stop // size), place).float()
        scales = scales.repeat_interleave(size, dim).narrow(dim, start - first * size, stop - start)
        return found.float() * scales.repeat_interleave(self.block[other], other).narrow(other, 0, found.shape[other])
