"""Reader of quantized checkpoints: dequantizes each slice with its scales.

FP8 blocks (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): a matrix in e4m3. `{its name}_scale_inv` has a
factor for each block of `weight_block_size` rows and columns; the last blocks may be smaller.

MXFP4 (https://arxiv.org/abs/2310.10537; GPT-OSS): rows in groups of 32 four-bit values, two per byte, the first in the
low half. `{its name}_blocks` [experts, out, groups, 16] has the bytes. `{its name}_scales` [experts, out, groups] has
each group's exponent of two, plus 127. The dequantized tensor is [experts, in, out].

INT4 of compressed-tensors (https://github.com/vllm-project/compressed-tensors, format pack-quantized; Kimi-K2-Thinking,
Kimi-K2.5): a matrix `weight` [out, in] of integers from -8 to 7. `weight_packed` [out, in / 8] int32 has eight of them,
plus 8 each, the first in the lowest bits. `weight_scale` [out, in / group_size] has the factor of each group in a row,
and `weight_shape` out and in.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..mapping.architecture import HfConfig
from .safetensors_io import SafetensorsFolder, StoredTensor, take_strided

SCALES = "_scale_inv"
GROUP = 32  # MXFP4 values per scale
PACKED = 8  # INT4 values per int32


class WeightSource(Protocol):
    """Tensors of a model folder, plain or dequantized."""

    folder: Path
    tensors: dict[str, StoredTensor]

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor: ...


def quantization_of(hf_config: HfConfig) -> HfConfig:
    """Return the `quantization_config` of a raw config.json, perhaps of its text model; {}: none."""
    text: HfConfig = hf_config.get("text_config") or {}
    return hf_config.get("quantization_config") or text.get("quantization_config") or {}


def open_weights(folder: str | Path, hf_config: HfConfig) -> WeightSource:
    """Open the tensors of a model folder by their unquantized names; reading dequantizes them.

    Raises ValueError for an unknown quantization, and as SafetensorsFolder does.
    """
    return weight_reader(folder, hf_config)(folder)


def weight_reader(folder: str | Path, hf_config: HfConfig) -> Callable[[str | Path], WeightSource]:
    """Return what opens a folder with the quantization of config.json. Raises ValueError for an unknown one."""
    quantization = quantization_of(hf_config)
    if not quantization:
        return SafetensorsFolder
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size"):
        return partial(Fp8Folder, block=tuple(quantization["weight_block_size"]))
    if method == "mxfp4":
        return Mxfp4Folder
    if method == "compressed-tensors":
        return partial(Int4Folder, group=_int4_group(folder, quantization))
    kind = f"quant_method {method!r}"
    if method == "fp8":
        kind += " without weight_block_size"
    raise ValueError(
        f"{Path(folder) / 'config.json'}: quantization_config has {kind}; known are 'fp8' with weight_block_size, "
        "'mxfp4', 'compressed-tensors' with INT4, and unquantised weights. Take the model's checkpoint in bfloat16"
    )


def _int4_group(folder: str | Path, quantization: HfConfig) -> int:
    """Return the size of the groups in rows. Raises ValueError for weights that are not packed INT4 in groups."""
    parts = (quantization.get("config_groups") or {}).values()
    settings = [part.get("weights") or {} for part in parts]
    expected = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    pairs = [(name, weights.get(name), value) for weights in settings for name, value in expected.items()]
    pairs += [("format", part.get("format") or quantization.get("format"), "pack-quantized") for part in parts]
    pairs += [("actorder", weights.get("actorder") or None, None) for weights in settings]
    size = settings[0].get("group_size") if settings else None
    pairs += [("group_size", weights.get("group_size"), size) for weights in settings]
    differing = [f"{name} {value!r}" for name, value, known in pairs if value != known]
    if not isinstance(size, int) or size <= 0 or size % PACKED:
        differing.append(f"group_size {size!r}")
    if differing:
        raise ValueError(
            f"{Path(folder) / 'config.json'}: quantization_config of compressed-tensors has {', '.join(differing)}; "
            f"known is the format pack-quantized of symmetric INT4 in groups of one size, a multiple of {PACKED}. Take "
            "the model's checkpoint in bfloat16"
        )
    assert isinstance(size, int)
    return size


class Fp8Folder:
    """Folder with matrices in FP8 blocks. Raises ValueError if the shape of a matrix's scales does not match it."""

    def __init__(self, folder: str | Path, block: tuple[int, ...]):
        self.stored = SafetensorsFolder(folder)
        self.folder, self.block = self.stored.folder, block
        self.tensors = {name: stored for name, stored in self.stored.tensors.items() if not name.endswith(SCALES)}
        for name in self.stored.tensors.keys() - self.tensors.keys():
            scales, matrix = self.stored.tensors[name], self.tensors.get(name.removesuffix(SCALES))
            if matrix is None:
                raise ValueError(f"{scales.file} has {name}, and the folder has no tensor that it is for")
            blocks = (-(-length // size) for length, size in zip(matrix.shape[-2:], block, strict=True))
            if scales.shape != (expected := (*matrix.shape[:-2], *blocks)):
                raise ValueError(
                    f"{scales.file}: {name} has shape {list(scales.shape)}, and for {list(matrix.shape)} in blocks of "
                    f"{list(block)} it has {list(expected)}"
                )

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read a slice, as `SafetensorsFolder.read` does; quantized tensors in fp32."""
        if name + SCALES not in self.stored.tensors:
            return self.stored.read(name, dim, start, stop, expert_index, step)
        values = self.stored.read(name, dim, start, stop, expert_index)
        size, across = self.block[dim], 1 - dim
        first = start // size  # first block of the slice
        scales = self.stored.read(name + SCALES, dim, first, -(-stop // size), expert_index)
        # Files store scales that are powers of two (ue8m0) as F8_E8M0 or as U8.
        scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        scales = scales.repeat_interleave(size, dim).narrow(dim, start - first * size, stop - start)
        scales = scales.repeat_interleave(self.block[across], across).narrow(across, 0, values.shape[across])
        return take_strided(values.float() * scales, dim, step)


class Mxfp4Folder:
    """Folder with stacked experts in MXFP4. Raises ValueError if the shapes of blocks and scales do not match."""

    def __init__(self, folder: str | Path):
        self.stored = SafetensorsFolder(folder)
        self.folder = self.stored.folder
        self.tensors: dict[str, StoredTensor] = {}
        for name, info in self.stored.tensors.items():
            base, _, part = name.rpartition("_")
            if part not in ("blocks", "scales"):
                self.tensors[name] = info
                continue
            blocks, scales = (self.stored.tensors.get(f"{base}_{suffix}") for suffix in ("blocks", "scales"))
            if blocks is None or scales is None:
                raise ValueError(f"{info.file} has {name}, and the folder has not both {base}_blocks and {base}_scales")
            if blocks.shape != (*scales.shape, GROUP // 2) or len(scales.shape) != 3:
                raise ValueError(
                    f"{info.file}: {base}_blocks has shape {list(blocks.shape)} and {base}_scales {list(scales.shape)}"
                    f": they are to be [experts, out, groups, {GROUP // 2}] and [experts, out, groups]"
                )
            experts, outputs, groups = scales.shape
            shape = (experts, groups * GROUP, outputs)
            self.tensors[base] = StoredTensor(blocks.file, blocks.offset, torch.bfloat16, shape)

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read a slice, as `SafetensorsFolder.read` does; quantized tensors in bf16, which holds every MXFP4 value."""
        if name in self.stored.tensors:
            return self.stored.read(name, dim, start, stop, expert_index, step)
        parts = name + "_blocks", name + "_scales"
        inner = 1 if expert_index is None else 0  # input dimension of the result
        if dim != inner:
            stored_dim = dim if dim < inner else inner  # the file has outputs before inputs
            values = mxfp4(*(self.stored.read(part, stored_dim, start, stop, expert_index, step) for part in parts))
            return values.transpose(-1, -2)
        first = start // GROUP
        values = mxfp4(*(self.stored.read(part, inner + 1, first, -(-stop // GROUP), expert_index) for part in parts))
        values = values.transpose(-1, -2).narrow(inner, start - first * GROUP, stop - start)
        return take_strided(values, inner, step)


class Int4Folder:
    """Folder with matrices in packed INT4. Raises ValueError if the shapes of values and scales do not match.

    group: values per scale
    """

    def __init__(self, folder: str | Path, group: int):
        self.stored = SafetensorsFolder(folder)
        self.folder, self.group = self.stored.folder, group
        self.tensors: dict[str, StoredTensor] = {}
        parts = ".weight_packed", ".weight_scale", ".weight_shape"
        for name, info in self.stored.tensors.items():
            base, _, part = name.rpartition(".weight_")
            if not base:
                self.tensors[name] = info
                continue
            packed, scales, shape = (self.stored.tensors.get(base + end) for end in parts)
            if ".weight_" + part not in parts or packed is None or scales is None or shape is None:
                raise ValueError(
                    f"{info.file} has {name}, and known are {base}{parts[0]}, {parts[1]} and {parts[2]} together, of "
                    "symmetric INT4"
                )
            if packed.dtype != torch.int32 or packed.shape != (scales.shape[0], scales.shape[-1] * group // PACKED):
                raise ValueError(
                    f"{packed.file}: {base}{parts[0]} is {packed.dtype} with shape {list(packed.shape)}, and for "
                    f"scales {list(scales.shape)} of groups of {group} it is int32 [out, in / {PACKED}]"
                )
            sizes = packed.shape[0], packed.shape[1] * PACKED
            self.tensors[base + ".weight"] = StoredTensor(packed.file, packed.offset, scales.dtype, sizes)

    def read(
        self, name: str, dim: int, start: int, stop: int, expert_index: int | None = None, step: int = 1
    ) -> Tensor:
        """Read a slice, as `SafetensorsFolder.read` does; quantized tensors in the dtype of their scales."""
        if name in self.stored.tensors:
            return self.stored.read(name, dim, start, stop, expert_index, step)
        packed, scales = name + "_packed", name + "_scale"
        if dim == 0:
            return int4(*(self.stored.read(part, 0, start, stop, step=step) for part in (packed, scales)))
        first, last = start // self.group, -(-stop // self.group)  # groups of the slice
        words = self.group // PACKED
        values = int4(
            self.stored.read(packed, 1, first * words, last * words), self.stored.read(scales, 1, first, last)
        )
        return take_strided(values.narrow(1, start - first * self.group, stop - start), 1, step)


def int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Dequantize int32 [out, in / 8] with scales [out, groups] to [out, in] of the scales' dtype."""
    values = (packed.unsqueeze(-1) >> torch.arange(0, 4 * PACKED, 4, dtype=torch.int32)) & 15
    values = (values.flatten(1) - 8).unflatten(1, (scales.shape[1], -1))
    return (values.float() * scales.float().unsqueeze(-1)).to(scales.dtype).flatten(1)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize uint8 blocks [..., groups, 16] with scales [..., groups] to bf16 [..., groups * 32]."""
    numbers = blocks.contiguous().flatten().view(torch.int16).long() & 0xFFFF
    values = _byte_pair_values().gather(0, numbers).view(torch.bfloat16).view(*scales.shape, GROUP)
    return values.mul_(torch.exp2(scales.float() - 127).bfloat16().unsqueeze(-1)).flatten(-2)


@cache
def _byte_pair_values() -> Tensor:
    """Return a lookup table, int64 [65536]: the four bf16 values of each pair of MXFP4 bytes, packed in an int64."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
    codes = torch.cat((sizes, -sizes))
    number = torch.arange(65536)
    return torch.stack([codes[number >> shift & 15] for shift in (0, 4, 8, 12)], dim=-1).view(torch.int64).squeeze(-1)
