"""CPU support for megatron-core. `enable()` does nothing where CUDA is available.

torch itself is unchanged: each module of megatron-core gets a proxy of torch in which `torch.cuda` describes the CPU
and `device="cuda"` means the CPU. transformers, PEFT and all other packages keep the real torch.
"""

import importlib
import os
import sys
import types
from typing import Any

import torch

# Modules that megatron-core imports late: `enable` imports them, so that they get the proxy too.
_LATE_MODULES = (
    "distributed",
    "models.gpt",
    "optimizer",
    "optimizer_param_scheduler",
    "pipeline_parallel",
    "transformer.moe.moe_layer",
    "transformer.multi_token_prediction",
)


class _ModuleProxy(types.ModuleType):
    """Proxy of a module in which the attributes in `overrides` are replaced."""

    def __init__(self, base: types.ModuleType, **overrides: Any):
        super().__init__(base.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


class _Event(torch.cpu.Event):
    def __init__(self, *_: object, **__: object):
        pass


class _Stream(torch.cpu.Stream):
    def __init__(self, *_: object, **__: object):
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _cpu_factory(factory):
    """Return a factory such as `torch.empty` that reads a CUDA device as the CPU and ignores `pin_memory`."""

    def create(*args: Any, device: torch.device | str | int | None = None, pin_memory: bool = False, **kwargs: Any):
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return create


def _tensor_type(self: torch.Tensor, dtype: torch.dtype | str | None = None, **kwargs: Any):
    """Return `Tensor.type()` with the CUDA names that megatron-core's optimizer compares: `torch.cuda.FloatTensor`."""
    result = _REAL_TYPE(self) if dtype is None else _REAL_TYPE(self, dtype, **kwargs)
    if isinstance(result, str) and result.startswith("torch.") and not result.startswith("torch.cuda."):
        return "torch.cuda." + result.removeprefix("torch.")
    return result


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Gather tensors whose first dimensions differ. NCCL supports this, gloo does not, so they are padded."""
    max_length = max(len(output) for output in outputs)
    padded = tensor.new_zeros(max_length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, padded_output in zip(outputs, gathered, strict=True):
        output.copy_(padded_output[: len(output)])


def _reduce_scatter(
    output: torch.Tensor, inputs: list[torch.Tensor], group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Reduce-scatter tensors whose first dimensions differ: all-reduce all of them, then keep this rank's."""
    total = torch.cat(inputs)
    torch.distributed.all_reduce(total, group=group)
    lengths = [len(tensor) for tensor in inputs]
    output.copy_(total.split(lengths)[torch.distributed.get_rank(group)])


_REAL_TYPE = torch.Tensor.type
_is_enabled = False


def device() -> torch.device:
    """Return the device of this process: its CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """Wait for the work queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def enable() -> None:
    """Make megatron-core run on the CPU if there is no CUDA. Call it before building anything."""
    global _is_enabled
    if _is_enabled or torch.cuda.is_available():
        return
    _is_enabled = True
    # megatron-core marks many small functions for torch.compile; on a CPU compiling costs more than it saves.
    if os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") == "1" and "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True  # it has read the variable when it was imported

    generator = torch.default_generator
    rng = {
        "manual_seed": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    cuda = _ModuleProxy(
        torch.cuda,
        current_device=torch.cpu.current_device,
        device_count=torch.cpu.device_count,
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        Stream=_Stream,
        Event=_Event,
        stream=torch.cpu.stream,
        current_stream=torch.cpu.current_stream,
        random=_ModuleProxy(torch.cuda.random, **rng),
        **rng,
    )
    factories = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros")
    collectives = _ModuleProxy(torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    torch_proxy = _ModuleProxy(
        torch, cuda=cuda, distributed=collectives, **{name: _cpu_factory(getattr(torch, name)) for name in factories}
    )

    for name in _LATE_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = torch_proxy  # type: ignore[attr-defined]

    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.Tensor.type = _tensor_type  # type: ignore[method-assign, assignment]

    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import token_dispatcher

    parallel_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: generator.get_state()
    parallel_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: generator.set_state(state)
    # Split sizes become numpy only `if tensor.is_cuda` upstream; the dispatcher needs numpy on the CPU too.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
