"""FP8 training with Transformer Engine: matrix products and parameters.

The linear layers of attention, dense MLPs and shared experts compute in FP8. Core attention, routed experts, the
router, embedding, output layer and multi-token prediction stay in bf16.

With `--fp8_param_gather` these weights are FP8 parameters, and the optimizer's fp32 master weights have the exact
values. Checkpoints have bf16 only: `load_as_bf16` and `masters_as_bf16` convert.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from megatron.core import fp8_utils, parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from ..options import Fp8Options
from .architecture import TransformerArgs

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer

E4M3_MAX = 448.0
SCALARS_KEY = "numbers"  # key of the values of a module's scaling state that are not tensors, as JSON
PICKLE_VARIABLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
SIZE_MULTIPLE = 16  # FP8 matrix products need sizes that are multiples of it


class Fp8Parameter(nn.Parameter):
    """Attributes of Transformer Engine's FP8 parameters, and those that megatron-core and this file add."""

    _quantizer: Any
    main_grad: Tensor
    bf16_copy: Tensor
    get_high_precision_init_val: Callable[[], Tensor]
    quantize_: Callable[[Tensor], None]


class ExtraState(Protocol):
    """Transformer Engine module with FP8 scaling state."""

    def get_extra_state(self) -> Tensor | None: ...
    def set_extra_state(self, state: Tensor) -> None: ...


def check(options: Fp8Options, dtype: torch.dtype, *, transformer_engine: bool) -> None:
    """Raise ValueError if FP8 is requested and this machine does not support it."""
    if options.fp8_format is None:
        return
    flag = f"--fp8_format {options.fp8_format}"
    if dtype != torch.bfloat16:
        raise ValueError(f"{flag}: it needs weights in bf16. Set --torch_dtype bfloat16, or remove it")
    if not transformer_engine:
        raise ValueError(
            f"{flag}: it needs a GPU and Transformer Engine's layers. Run pip install 'megaswift[gpu]' and remove "
            "--transformer_impl local, or remove --fp8_format"
        )
    from transformer_engine.pytorch import quantization  # pyright: ignore[reportMissingImports]

    recipe = options.fp8_recipe
    availability = {"blockwise": quantization.is_fp8_block_scaling_available, "mxfp8": quantization.is_mxfp8_available}
    is_available, reason = availability.get(recipe, quantization.is_fp8_available)(return_reason=True)
    if not is_available:
        raise ValueError(
            f"--fp8_recipe {recipe}: {reason.rstrip('.')}. This is {torch.cuda.get_device_name()}: set another "
            "--fp8_recipe, or remove --fp8_format"
        )


def transformer_args(options: Fp8Options) -> TransformerArgs:
    """Return megatron-core's TransformerConfig arguments for the options."""
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
    """Raise ValueError if a Transformer Engine weight in `layers` has a size that FP8 does not support."""
    for name, module in layers.named_modules():
        if not isinstance(module, fp8_utils.TE_LINEAR_TYPES):
            continue
        sizes = cast(Tensor, module.weight).shape
        if any(size % SIZE_MULTIPLE for size in sizes):
            raise ValueError(
                f"--fp8_format needs sizes in multiples of {SIZE_MULTIPLE}, and {name} of the model is "
                f"{' x '.join(map(str, sizes))} on each process: lower --tensor_model_parallel_size, or remove "
                "--fp8_format"
            )


def fp8_params(chunks: Sequence[nn.Module]) -> list[Fp8Parameter]:
    """List the FP8 parameters of `chunks`."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return [cast(Fp8Parameter, parameter) for parameter in parameters if fp8_utils.is_float8tensor(parameter)]


def as_bf16(parameter: Tensor) -> Tensor:
    """Return the tensor of a parameter in a checkpoint: itself, or the bf16 copy of an FP8 parameter."""
    if not fp8_utils.is_float8tensor(parameter):
        return parameter
    values = getattr(parameter, "bf16_copy", None)
    if values is None:
        raise RuntimeError("a parameter in FP8 is read or written outside of load_as_bf16 and masters_as_bf16")
    return values


@contextmanager
@torch.no_grad()
def load_as_bf16(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Load weights into bf16 copies in host memory, the source of master weights; on exit quantize the parameters."""
    parameters = fp8_params(chunks)
    for parameter in parameters:
        parameter.bf16_copy = parameter.get_high_precision_init_val()
    try:
        yield
        for parameter in parameters:
            _quantize(parameter, parameter.bf16_copy.to(parameter.device))
    finally:
        for parameter in parameters:
            del parameter.bf16_copy


def _quantize(parameter: Fp8Parameter, values: Tensor) -> None:
    scale = getattr(parameter._quantizer, "scale", None)
    if scale is not None:
        # Delayed scaling: scale and maxima belong to earlier values of the weight.
        scale.copy_(E4M3_MAX / values.abs().amax().float().clamp(min=1e-30))
        parameter._quantizer.amax.zero_()
    parameter.quantize_(values)


@contextmanager
@torch.no_grad()
def masters_as_bf16(optimizer: "MegatronOptimizer", chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Save the FP8 parameters of `chunks` as their master weights, rounded to bf16.

    optimizer: megatron-core's distributed optimizer of `chunks` wrapped for data parallelism. Every rank calls this
    between two steps: the gradient buffers hold the gathered master weights.
    """
    parameters = fp8_params(chunks)
    for parameter in parameters:
        buffer = parameter.main_grad.view(-1).view(torch.bfloat16)  # twice as long if gradients are in fp32
        parameter.bf16_copy = buffer[: parameter.numel()].zero_().view(parameter.shape)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]) if parameters else ():
        _copy_masters(part)
    group = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
    for parameter in parameters:
        dist.all_reduce(parameter.bf16_copy, group=group)
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter.bf16_copy


def _copy_masters(optimizer: "DistributedOptimizer") -> None:
    """Copy this rank's shards of the master weights into the bf16 copies."""
    groups = (getattr(optimizer, name, []) for name in ("model_float16_groups", "shard_fp32_from_float16_groups"))
    for parameters, masters in zip(*groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            if hasattr(parameter, "bf16_copy"):
                part = optimizer._get_model_param_range_map(parameter)["param"]
                parameter.bf16_copy.view(-1)[part.start : part.end].copy_(master)


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move `model` to a device as `model.to` does, but keep FP8 parameters and megatron-core's attributes on them."""
    for module in model.modules():
        if not any(fp8_utils.is_float8tensor(parameter) for parameter in module.parameters(recurse=False)):
            module._apply(lambda tensor: tensor.to(device), recurse=False)


def read_scales(module: ExtraState) -> dict[str, Tensor]:
    """Return the FP8 scaling state of a Transformer Engine module by name (--fp8_recipe delayed), else {}."""
    payload = module.get_extra_state()
    if payload is None or not payload.numel():
        return {}
    state = pickle.loads(payload.numpy().tobytes())
    scalars = {name: value for name, value in state["extra_fp8_variables"].items() if isinstance(value, int | float)}
    scales = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return scales | {SCALARS_KEY: torch.frombuffer(bytearray(json.dumps(scalars).encode()), dtype=torch.uint8)}


def set_scales(module: ExtraState, scales: dict[str, Tensor], config: TransformerConfig) -> None:
    """Restore the scaling state that `read_scales` returned."""
    scalars = json.loads(scales[SCALARS_KEY].numpy().tobytes())
    state: dict[str, object] = {name: value for name, value in scales.items() if name != SCALARS_KEY}
    state |= {"recipe": fp8_utils.get_fp8_recipe(config), "extra_fp8_variables": scalars}
    payload = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    previous = os.environ.get(PICKLE_VARIABLE)
    os.environ[PICKLE_VARIABLE] = "1"  # safe: this pickle was made above, none comes from a file
    try:
        module.set_extra_state(payload)
    finally:
        os.environ.pop(PICKLE_VARIABLE)
        if previous is not None:
            os.environ[PICKLE_VARIABLE] = previous
