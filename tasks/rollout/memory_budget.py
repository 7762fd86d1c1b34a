"""Memory budget of a colocated vLLM: its share of a GPU, and the trainer state to offload meanwhile."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ...bridge.model.model import Model
from ..distributed.collectives import all_gather_objects
from ..options.rollout import EngineOptions
from ..run.context import Run
from ..system.memory import GIB

MAX_SHARE = 0.9  # of a GPU
BUCKET_BYTES = 2 * GIB  # buckets in flight during a weight sync
FRAGMENTED = 0.05  # share of a GPU lost to fragmentation
MIN_CACHE = 0.1  # share of a GPU for the KV cache, so that enough completions run at a time
ACTIVATIONS = 0.25  # share of a GPU for the activations of a step, beside a vLLM that never sleeps


@dataclass(frozen=True)
class EngineMemoryBudget:
    """vLLM's `share` of each GPU's memory, and whether to offload the trainer's weights and optimizer state."""

    share: float
    weights: bool
    optimizer: bool


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory of one GPU by user, in bytes."""

    total: float
    held: float  # in use: weights, reference models and the like
    weights: float  # the trained model's part of `held`
    gradients: float  # not allocated yet
    optimizer: float  # not allocated yet
    engine: float  # vLLM's weights


def memory_budget(
    needs: MemoryNeeds, options: EngineOptions, *, sleeps: bool, can_offload_model: bool = True
) -> EngineMemoryBudget:
    """Return the budget, choosing the options that are unset. Raises ValueError where vLLM's weights cannot fit."""
    share, offload = options.vllm_gpu_memory_utilization, (options.offload_model, options.offload_optimizer)
    if not can_offload_model:
        offload = False, options.offload_optimizer
    if not sleeps:  # both hold their memory all the time
        free = needs.total - needs.held - needs.gradients - needs.optimizer - (FRAGMENTED + ACTIVATIONS) * needs.total
        return _check(share, free, bool(offload[0]), bool(offload[1]), needs)
    target = needs.engine + MIN_CACHE * needs.total if share is None else share * needs.total
    free, weights, optimizer = 0.0, False, False
    for choice in ((False, False), (False, True), (True, True)):
        weights, optimizer = (
            default if requested is None else requested for default, requested in zip(choice, offload, strict=True)
        )
        stays = needs.held - weights * needs.weights + (not optimizer) * needs.optimizer
        free = needs.total * (1 - FRAGMENTED) - stays - BUCKET_BYTES
        if free >= target:
            break
    return _check(share, free, weights, optimizer, needs)


def _check(share: float | None, free: float, weights: bool, optimizer: bool, needs: MemoryNeeds) -> EngineMemoryBudget:
    if share is None:
        share = min(MAX_SHARE, math.floor(100 * free / needs.total) / 100)
    if share * needs.total > needs.engine:
        return EngineMemoryBudget(share, weights, optimizer)
    raise ValueError(
        f"vLLM's weights, {needs.engine / GIB:.1f} GiB of each GPU, do not fit beside the trainer: "
        f"{max(0.0, share * needs.total) / GIB:.1f} of {needs.total / GIB:.1f} GiB are left. Set a larger "
        "--vllm_tensor_parallel_size or --tensor_model_parallel_size, --offload_ref_model true with a reference "
        "model, or --vllm_mode server with a `swift rollout` on other GPUs"
    )


def plan_engine_memory(run: Run, model: Model, *, sleeps: bool) -> EngineMemoryBudget:
    """Return the budget of vLLM beside the model of this run, before its optimizer is made.

    Every rank calls this; all get the same budget, that of the fullest GPU.
    """
    options: Any = run.options
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    needs = MemoryNeeds(
        total,
        total - free,
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.numel() for parameter in trained)
        * (4 if options.build.accumulate_allreduce_grads_in_fp32 else 2),
        sum(parameter.numel() * _state_bytes(parameter, options, model.groups) for parameter in trained),
        _count_parameters(parameters, model.groups) * run.dtype.itemsize / options.engine.vllm_tensor_parallel_size,
    )
    fullest = max(all_gather_objects(needs), key=lambda needs: needs.held + needs.optimizer)
    return memory_budget(fullest, options.engine, sleeps=sleeps, can_offload_model=not options.build.fp8_param_gather)


def _state_bytes(parameter: torch.nn.Parameter, options: Any, groups: ProcessGroupCollection) -> float:
    """Return the bytes of optimizer state per element of a parameter."""
    state = (8 if options.optimizer.optimizer == "adam" else 4) + 4 * (parameter.dtype != torch.float32)
    if not options.build.use_distributed_optimizer:
        return state
    if _is_expert(parameter):
        return state / groups.expt_dp.size()
    return state / groups.dp_cp.size()


def _count_parameters(parameters: list[torch.nn.Parameter], groups: ProcessGroupCollection) -> float:
    """Estimate the number of parameters over all ranks, each counted once. Every rank calls this."""
    world = dist.get_world_size()
    pipeline, tensor, experts = groups.pp.size(), groups.tp.size(), groups.expt_dp.size()
    count = 0.0
    for parameter in parameters:
        split = tensor if getattr(parameter, "tensor_model_parallel", False) else 1
        count += parameter.numel() / (experts if _is_expert(parameter) else world / pipeline / split)
    return sum(all_gather_objects(count))


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
