"""What vLLM in the training processes may have of a GPU, and what of the trainer has to leave it meanwhile."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...bridge.model.model import Model
from ..options.rollout import EngineOptions
from ..run.context import Run
from ..system.memory import GIB

GREATEST = 0.9  # share of a GPU
ON_THE_WAY = 2 * GIB  # bytes of buckets of weights, while these are sent
LOST = 0.05  # share of a GPU that is in pieces too small for use
CACHE = 0.1  # share of a GPU without which vLLM generates few completions at a time
TRAINING = 0.25  # share of a GPU for the activations of a step, beside a vLLM that does not sleep


@dataclass(frozen=True)
class Room:
    """`share`: of each GPU's memory, for vLLM. What has to leave it: the weights, the optimizer's state."""

    share: float
    weights: bool
    optimizer: bool


@dataclass(frozen=True)
class Needs:
    """Of a GPU, in bytes."""

    total: float
    held: float  # now: the weights, reference models and the like
    weights: float  # of `held`, the trained model's
    gradients: float  # to come
    optimizer: float  # to come
    engine: float  # of vLLM's weights


def room_of(needs: Needs, options: EngineOptions, *, sleeps: bool) -> Room:
    """What is left out of the options, chosen. Raises ValueError where vLLM has no room whatever leaves it."""
    share, asked = options.vllm_gpu_memory_utilization, (options.offload_model, options.offload_optimizer)
    if getattr(options, "fp8_param_gather", False):  # weights in two parts
        asked = False, options.offload_optimizer
    if not sleeps:  # both have their memory all the time
        free = needs.total - needs.held - needs.gradients - needs.optimizer - (LOST + TRAINING) * needs.total
        return _checked(share, free, bool(asked[0]), bool(asked[1]), needs)
    wanted = needs.engine + CACHE * needs.total if share is None else share * needs.total
    free, weights, optimizer = 0.0, False, False
    for choice in ((False, False), (False, True), (True, True)):
        weights, optimizer = (own if given is None else given for own, given in zip(choice, asked, strict=True))
        stays = needs.held - weights * needs.weights + (not optimizer) * needs.optimizer
        free = needs.total * (1 - LOST) - stays - ON_THE_WAY
        if free >= wanted:
            break
    return _checked(share, free, weights, optimizer, needs)


def _checked(share: float | None, free: float, weights: bool, optimizer: bool, needs: Needs) -> Room:
    if share is None:
        share = min(GREATEST, math.floor(100 * free / needs.total) / 100)
    if share * needs.total > needs.engine:
        return Room(share, weights, optimizer)
    raise ValueError(
        f"vLLM's weights, {needs.engine / GIB:.1f} GiB of each GPU, do not fit beside the trainer: "
        f"{max(0.0, share * needs.total) / GIB:.1f} of {needs.total / GIB:.1f} GiB are left. Give a larger "
        "--vllm_tensor_parallel_size or --tensor_model_parallel_size, --offload_ref_model true where there is a "
        "reference, or --vllm_mode server with a `swift rollout` on other GPUs"
    )


def room_beside(run: Run, model: Model, *, sleeps: bool) -> Room:
    """For vLLM beside the model of this run, whose optimizer is yet to be made. Every rank calls this: all get the
    same, which is what the fullest GPU allows."""
    options: Any = run.options
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    own = Needs(
        total,
        total - free,
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.numel() for parameter in trained) * (4 if options.accumulate_allreduce_grads_in_fp32 else 2),
        sum(parameter.numel() * _state_bytes(parameter, options) for parameter in trained),
        _whole_model(parameters) * run.dtype.itemsize / options.vllm_tensor_parallel_size,
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    fullest = max(everyone, key=lambda needs: needs.held + needs.optimizer)
    return room_of(fullest, options, sleeps=sleeps)


def _state_bytes(parameter: torch.nn.Parameter, options: Any) -> float:
    """Of the optimizer, for an element."""
    state = (8 if options.optimizer == "adam" else 4) + 4 * (parameter.dtype != torch.float32)
    if not options.use_distributed_optimizer:
        return state
    if _is_expert(parameter):
        return state / parallel_state.get_expert_data_parallel_world_size()
    return state / parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def _whole_model(parameters: list[torch.nn.Parameter]) -> float:
    """About how many parameters there are over all ranks, each once. Every rank calls this."""
    world = dist.get_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    experts = parallel_state.get_expert_data_parallel_world_size()
    own = 0.0
    for parameter in parameters:
        split = tensor if getattr(parameter, "tensor_model_parallel", False) else 1
        own += parameter.numel() / (experts if _is_expert(parameter) else world / pipeline / split)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, own)
    return sum(everyone)


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
