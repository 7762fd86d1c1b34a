"""Quantization of linear layers to FP8 in blocks, when a checkpoint is written: the format of DeepSeek-V3.

A matrix is stored in e4m3; `{its name}_scale_inv` has a factor for each block of 128 rows and columns (the
last may be smaller). quantized.py reads it, transformers' FineGrainedFP8 and vLLM too.
Source: https://arxiv.org/abs/2412.19437, section 3.3.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lora.adapter_mapping import LINEAR_MODULES
from ..mapping.architecture import HfConfig
from ..mapping.param_mapping import MappingEntry, ParamKey
from .quantized import SCALES
from .safetensors_io import TensorSpec

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
# vLLM computes their parts as one matrix, of which no block may lie in two parts.
FUSED_MODULES = ("linear_qkv", "linear_fc1")
EMBEDDING = "embed_tokens.weight"


def quantized_names(key: ParamKey, entry: MappingEntry, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the Hugging Face names of the parts of a megatron-core tensor that FP8 checkpoints store in e4m3.

    shapes: of `MappingEntry.hf_shapes`. The matrices of linear layers are, if they have at least a block of rows and
    columns; embeddings, the output layer, routers and norms are not.
    """
    module, _, leaf = key.name.rpartition(".")
    module = module.rpartition(".")[2]
    if leaf != "weight" or module not in LINEAR_MODULES or entry.fp32 or entry.transposed:
        return set()
    names = {name for name, shape in shapes.items() if len(shape) == 2 and min(shape) >= BLOCK}
    if module in FUSED_MODULES:
        # Gate and up of stacked experts are the halves of one part.
        parts = 2 if module == "linear_fc1" and len(shapes) == 1 and entry.expert_index is not None else 1
        if len(names) < len(shapes) or any(shape[0] % (BLOCK * parts) for shape in shapes.values()):
            return set()
    return names


def fp8_specs(name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """Return the specs of a quantized matrix (or of a stack of them) and of its scales, in this order."""
    *stack, rows, columns = spec.shape
    blocks = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    return {name: TensorSpec(torch.float8_e4m3fn, spec.shape), name + SCALES: TensorSpec(torch.float32, blocks)}


def quantize_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [rows, columns] to e4m3. Returns it and the fp32 scales [row blocks, column blocks]."""
    rows, columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    values = (blocks / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns], scales[:, 0, :, 0]


def quantization_config(specs: Mapping[str, TensorSpec]) -> HfConfig:
    """Return the `quantization_config` for config.json. specs: all tensors of the checkpoint.

    Raises RuntimeError if none of them is quantized.
    """
    if not any(name.endswith(SCALES) for name in specs):
        raise RuntimeError(
            f"--quant_method fp8: no linear layer of this model has the {BLOCK} rows and columns of a block. Remove it"
        )
    kept = {"lm_head"}  # also where it is tied: transformers has a linear layer for it
    for name, spec in specs.items():
        if name + SCALES not in specs and len(spec.shape) > 1 and name.endswith(".weight"):
            kept |= set() if name.endswith(EMBEDDING) else {name.removesuffix(".weight")}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept),
    }
