"""FP8: which matrix products Transformer Engine computes in it, and weights that are held in it.

The matrices of attention, of dense MLPs and of shared experts are multiplied in FP8. Attention itself, routed experts,
the router, embedding, output layer and layers of multi-token prediction stay in bf16.

With `--fp8_param_gather` these matrices are parameters in FP8, and their exact values are the optimizer's fp32 masters.
Checkpoints know bf16 alone: `reading_in_bf16` and `masters_in_bf16`.
"""

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import fp8_utils, parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from ..options import Fp8Options

E4M3_MAX = 448.0
NUMBERS = "numbers"  # among the scales of a module: what is no tensor, as JSON
PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
OF_GEMM = 16  # every size of a matrix product in FP8 divides by it


def check(options: Fp8Options, dtype: torch.dtype, *, transformer_engine: bool) -> None:
    """Raise ValueError where FP8 is asked for and cannot be computed here."""
    if options.fp8_format is None:
        return
    asked = f"--fp8_format {options.fp8_format}"
    if dtype != torch.bfloat16:
        raise ValueError(f"{asked} needs weights in bf16: give --torch_dtype bfloat16, or leave it out")
    if not transformer_engine:
        raise ValueError(
            f"{asked} needs a GPU and Transformer Engine's layers: pip install 'megaswift[gpu]', and no "
            "--transformer_impl local; or leave it out"
        )
    from transformer_engine.pytorch import quantization  # pyright: ignore[reportMissingImports]

    recipe = options.fp8_recipe
    special = {"blockwise": quantization.is_fp8_block_scaling_available, "mxfp8": quantization.is_mxfp8_available}
    here, reason = special.get(recipe, quantization.is_fp8_available)(return_reason=True)
    if not here:
        raise ValueError(
            f"--fp8_recipe {recipe}: {reason.rstrip('.')}. This is {torch.cuda.get_device_name()}: give another "
            "--fp8_recipe, or leave --fp8_format out"
        )


def settings(options: Fp8Options) -> dict[str, Any]:
    """megatron-core's names of the same."""
    if options.fp8_format is None:
        return {}
    return {
        "fp8": options.fp8_format,
        "fp8_recipe": options.fp8_recipe,
        "fp8_param": options.fp8_param_gather,
        "fp8_amax_history_len": options.fp8_amax_history_len,
        "fp8_amax_compute_algo": options.fp8_amax_compute_algo,
        "first_last_layers_bf16": options.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": options.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": options.num_layers_at_end_in_bf16,
    }


def check_sizes(layers: nn.Module) -> None:
    """Raise ValueError where a matrix of Transformer Engine's in `layers` has a size that FP8 does not divide into."""
    for name, module in layers.named_modules():
        if not isinstance(module, fp8_utils.TE_LINEAR_TYPES):
            continue
        sizes = cast(Tensor, module.weight).shape
        if any(size % OF_GEMM for size in sizes):
            raise ValueError(
                f"--fp8_format needs sizes in multiples of {OF_GEMM}, and {name} of the model is "
                f"{' x '.join(map(str, sizes))} on each process: lower --tensor_model_parallel_size, or leave "
                "--fp8_format out"
            )


def held_in_fp8(model: nn.Module) -> Iterator[Any]:
    """The parameters of `model` whose values are in FP8."""
    return (parameter for parameter in model.parameters() if fp8_utils.is_float8tensor(parameter))


def in_bf16(parameter: Tensor) -> Tensor:
    """A parameter as a checkpoint has it: itself, or what stands for it while weights are read or written."""
    if not fp8_utils.is_float8tensor(parameter):
        return parameter
    values = getattr(parameter, "in_bf16", None)
    if values is None:
        raise RuntimeError("a parameter in FP8 was to be read or written without its values in bf16")
    return values


@contextmanager
@torch.no_grad()
def reading_in_bf16(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, weights that are read are kept in bf16 (in the host's memory): masters are made of these. Then they are
    put into the parameters in FP8."""
    parameters = [parameter for chunk in chunks for parameter in held_in_fp8(chunk)]
    for parameter in parameters:
        parameter.in_bf16 = parameter.get_high_precision_init_val()
    try:
        yield
        for parameter in parameters:
            _quantize(parameter, parameter.in_bf16.to(parameter.device))
    finally:
        for parameter in parameters:
            del parameter.in_bf16


def _quantize(parameter: Any, values: Tensor) -> None:
    scale = getattr(parameter._quantizer, "scale", None)
    if scale is not None:
        # Delayed scaling: its scale is of past steps, and what it has seen so far are no weights.
        scale.copy_(E4M3_MAX / values.abs().amax().float().clamp(min=1e-30))
        parameter._quantizer.amax.zero_()
    parameter.quantize_(values)


@contextmanager
@torch.no_grad()
def masters_in_bf16(optimizer: Any, chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, the parameters in FP8 of `chunks` are written as their masters, rounded to bf16.

    `optimizer` is megatron-core's distributed one, of `chunks` wrapped for data parallelism. Every rank calls this
    between two steps: the masters are gathered where the gradients have been.
    """
    parameters = [parameter for chunk in chunks for parameter in held_in_fp8(chunk)]
    for parameter in parameters:
        room = parameter.main_grad.view(-1).view(torch.bfloat16)  # twice as much as needed, where gradients are in fp32
        parameter.in_bf16 = room[: parameter.numel()].zero_().view(parameter.shape)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]) if parameters else ():
        _put_masters(part)
    for parameter in parameters:
        dist.all_reduce(parameter.in_bf16, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter.in_bf16


def _put_masters(optimizer: Any) -> None:
    """The shards of masters that this rank has, to their places in `in_bf16`."""
    groups = (getattr(optimizer, name, []) for name in ("model_float16_groups", "shard_fp32_from_float16_groups"))
    for parameters, masters in zip(*groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            if hasattr(parameter, "in_bf16"):
                part = optimizer._get_model_param_range_map(parameter)["param"]
                parameter.in_bf16.view(-1)[part.start : part.end].copy_(master)


def place(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)`, which would make parameters in FP8 anew, and lose what megatron-core has noted on them."""
    for module in model.modules():
        if not any(fp8_utils.is_float8tensor(own) for own in module.parameters(recurse=False)):
            module._apply(lambda tensor: tensor.to(device), recurse=False)


def scales_of(module: Any) -> dict[str, Tensor]:
    """What a module of Transformer Engine has kept of past micro batches (--fp8_recipe delayed), by name; else {}."""
    payload = module.get_extra_state()
    if payload is None or not payload.numel():
        return {}
    state = pickle.loads(payload.numpy().tobytes())
    numbers = {name: value for name, value in state["extra_fp8_variables"].items() if isinstance(value, int | float)}
    scales = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return scales | {NUMBERS: torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)}


def set_scales(module: Any, scales: dict[str, Tensor], config: TransformerConfig) -> None:
    """Give a module what `scales_of` gave."""
    numbers = json.loads(scales[NUMBERS].numpy().tobytes())
    state: dict[str, Any] = {name: value for name, value in scales.items() if name != NUMBERS}
    state |= {"recipe": fp8_utils.get_fp8_recipe(config), "extra_fp8_variables": numbers}
    payload = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    before = os.environ.get(PICKLES)
    os.environ[PICKLES] = "1"  # this one has just been made here: files of checkpoints have none
    try:
        module.set_extra_state(payload)
    finally:
        os.environ.pop(PICKLES)
        if before is not None:
            os.environ[PICKLES] = before
