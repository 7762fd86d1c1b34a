"""Memory budget of a colocated vLLM: its share of a GPU, and the trainer state to offload during generation."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from ...bridge.model.model import Model
from ..distributed.collectives import all_gather_objects
from ..options import GrpoOptions
from ..options.rollout import EngineOptions
from ..plan.make_workload import TYPE_BYTES
from ..plan.memory import BYTES, OUTSIDE, key_values, memory_of_rank
from ..plan.run_plan import TEXT, Images, UnplannedRunError, plan_run, step_bytes
from ..run.context import Run
from ..system.memory import GIB

MAX_SHARE = 0.9  # maximum share of a GPU for vLLM
BUCKET_BYTES = 2 * GIB  # of weight buckets in flight during a weight sync
FRAGMENTATION = 0.05  # share of a GPU lost to fragmentation
MIN_CACHE = 0.1  # minimum share of a GPU for the KV cache, so that enough completions run concurrently
ACTIVATIONS = 0.25  # share of a GPU for a training step whose memory is not known, beside a vLLM that never sleeps
WORKSPACE = 6 * GIB  # vLLM's, beside weights and KV cache: activations, logits and CUDA graphs


@dataclass(frozen=True)
class EngineMemoryBudget:
    """vLLM's `share` of each GPU's memory, and whether to offload the trainer's weights and optimizer state.

    sleeps: whether vLLM frees its memory during training
    """

    share: float
    offload_weights: bool
    offload_optimizer: bool
    sleeps: bool

    def __str__(self) -> str:
        parts = ["the model"] * self.offload_weights + ["the optimizer's state"] * self.offload_optimizer
        offloaded = f"; {' and '.join(parts)} offloaded to the host meanwhile" if parts else ""
        return f"{self.share:.2f} of the GPU, {'by turns with' if self.sleeps else 'beside'} training{offloaded}"


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory of one GPU by purpose, in bytes."""

    total: float
    used: float  # by weights, reference models and others
    weights: float  # the trained model's part of `used`
    gradients: float  # not allocated yet
    optimizer: float  # not allocated yet
    engine: float  # vLLM's weights
    step: float | None = None  # a training step's, beyond weights, gradients and optimizer; None: not known
    cache: float | None = None  # KV cache of all completions generated at a time; None: not known


def memory_budget(
    needs: MemoryNeeds, options: EngineOptions, *, sleeps: bool | None, can_offload_model: bool = True
) -> EngineMemoryBudget:
    """Return the budget, with defaults for unset options. Raises ValueError where vLLM's weights cannot fit.

    sleeps: None: unless vLLM and a training step are known to fit at once
    """
    share, requests = options.vllm_gpu_memory_utilization, (options.offload_model, options.offload_optimizer)
    if not can_offload_model:
        requests = False, options.offload_optimizer
    step = ACTIVATIONS * needs.total if needs.step is None else needs.step
    beside_training = (
        needs.total * (1 - FRAGMENTATION) - needs.used - needs.gradients - needs.optimizer - step - BUCKET_BYTES
    )
    if sleeps is None:
        shared = None if any(requests) else _share_beside_training(needs, beside_training, share)
        share, sleeps = shared or share, shared is None
    if not sleeps:  # vLLM and the trainer use their memory at the same time
        return _check(share, beside_training, bool(requests[0]), bool(requests[1]), needs, sleeps=False)
    needed = needs.engine + MIN_CACHE * needs.total if share is None else share * needs.total
    free, offload_weights, offload_optimizer = 0.0, False, False
    for defaults in ((False, False), (False, True), (True, True)):
        offload_weights, offload_optimizer = (
            default if requested is None else requested for default, requested in zip(defaults, requests, strict=True)
        )
        remaining = needs.used - offload_weights * needs.weights + (not offload_optimizer) * needs.optimizer
        free = needs.total * (1 - FRAGMENTATION) - remaining - BUCKET_BYTES
        if free >= needed:
            break
    return _check(share, free, offload_weights, offload_optimizer, needs, sleeps=True)


def _share_beside_training(needs: MemoryNeeds, free: float, share: float | None) -> float | None:
    """Return vLLM's share of a GPU where it fits into the bytes that training leaves free; None where it may not.

    share: the share that is asked for
    """
    if needs.step is None:
        return None
    if share is not None:
        return share if share * needs.total <= free else None
    if needs.cache is None:
        return None
    needed = needs.engine + needs.cache + WORKSPACE
    if needed > free:
        return None
    return round((needed + free) / 2 / needs.total, 2)  # half of the spare memory is left to training


def _check(
    share: float | None,
    free: float,
    offload_weights: bool,
    offload_optimizer: bool,
    needs: MemoryNeeds,
    *,
    sleeps: bool,
) -> EngineMemoryBudget:
    if share is None:
        share = min(MAX_SHARE, math.floor(100 * free / needs.total) / 100)
    if share * needs.total > needs.engine:
        return EngineMemoryBudget(share, offload_weights, offload_optimizer, sleeps)
    raise ValueError(
        f"vLLM's weights, {needs.engine / GIB:.1f} GiB of each GPU, do not fit beside the trainer: "
        f"{max(0.0, share * needs.total) / GIB:.1f} of {needs.total / GIB:.1f} GiB are left. Set a larger "
        "--vllm_tensor_parallel_size or --tensor_model_parallel_size, --offload_ref_model true with a reference "
        "model, or --vllm_mode server with a `swift rollout` on other GPUs"
    )


def plan_engine_memory(run: Run, model: Model, *, sleeps: bool | None) -> EngineMemoryBudget:
    """Return vLLM's budget beside the model of this run, before the run's optimizer exists.

    Every rank calls this, and gets the budget of the fullest GPU. sleeps: as of `memory_budget`
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
        *(() if sleeps else _step_and_cache(run, model, total)),
    )
    fullest = max(all_gather_objects(needs), key=lambda needs: needs.used + needs.optimizer)
    return memory_budget(fullest, options.engine, sleeps=sleeps, can_offload_model=not options.build.fp8_param_gather)


def planned_engine_memory(
    options: GrpoOptions, world: int, gpu_bytes: float, images: Images = TEXT
) -> EngineMemoryBudget | None:
    """Return vLLM's budget beside a run on `world` GPUs by its plan, as of `plan_engine_memory`; None: not planned.

    gpu_bytes: memory of a GPU; images: of the data
    Raises ValueError where vLLM's weights cannot fit.
    """
    if type(options) is not GrpoOptions:  # a critic comes and goes
        return None
    try:
        plan = plan_run(options, world, images, gpu_bytes)
    except UnplannedRunError:
        return None
    work, memory, engine = plan.work, plan.memory, options.engine
    sleeps = None if engine.sleep_level is None else True  # else there is no plan
    step = cache = None
    if not sleeps and options.data.max_length is not None:
        longest = options.data.max_length + options.sampling.max_completion_length
        step = step_bytes(options, world, gpu_bytes, longest)
        cache = _cache_bytes(options, world, work.config, longest)
    needs = MemoryNeeds(
        gpu_bytes,
        memory.weights + OUTSIDE,
        memory_of_rank(work.alone, plan.layout).weights,
        memory.gradients,
        memory.optimizer,
        BYTES * work.parameters.language / engine.vllm_tensor_parallel_size,
        step,
        cache,
    )
    return memory_budget(needs, engine, sleeps=sleeps, can_offload_model=not options.build.fp8_param_gather)


def _step_and_cache(run: Run, model: Model, total: float) -> tuple[float | None, float | None]:
    """Return `MemoryNeeds.step` and `MemoryNeeds.cache`. Those of models with a critic or images are not known."""
    options, world = run.options, dist.get_world_size()
    if type(options) is not GrpoOptions or run.builds_tower or options.data.max_length is None:
        return None, None
    longest = options.data.max_length + options.sampling.max_completion_length
    step = step_bytes(options, world, total, longest)
    return step, _cache_bytes(options, world, model.chunks[0].config, longest)


def _cache_bytes(options: GrpoOptions, world: int, config: TransformerConfig, longest: int) -> float:
    """Return the bytes of a GPU's KV cache of all completions generated at a time. longest: tokens of a sequence"""
    tensor, sampling = options.engine.vllm_tensor_parallel_size, options.sampling
    heads = min(tensor, config.num_query_groups or config.num_attention_heads)  # further ranks hold copies
    completions = math.ceil((sampling.generation_batch_size or 0) * tensor / world)
    token_bytes = BYTES * config.num_layers * key_values(config) / heads
    return completions * (options.engine.vllm_max_model_len or longest) * token_bytes


def _state_bytes(parameter: torch.nn.Parameter, options: Any, groups: ProcessGroupCollection) -> float:
    """Return the bytes of optimizer state per element of a parameter."""
    optimizer = options.optimizer.optimizer
    is_matrix = parameter.ndim > 1 and not getattr(parameter, "is_embedding_or_output_parameter", False)
    has_two_moments = optimizer == "adam" or (optimizer != "sgd" and not is_matrix)  # else Muon's matrix, or SGD
    state = (8 if has_two_moments else 4) + 4 * (parameter.dtype != torch.float32)
    if optimizer == "adam":
        names = ["exp_avg_dtype", "exp_avg_sq_dtype"] + ["main_params_dtype"] * (parameter.dtype != torch.float32)
        on_gpu = 1 - options.optimizer.optimizer_cpu_offload * options.optimizer.optimizer_offload_fraction
        state = on_gpu * sum(TYPE_BYTES[getattr(options.optimizer, name)] for name in names)
    if not options.build.use_distributed_optimizer and optimizer != "dist_muon":
        return state
    if _is_expert(parameter):
        return state / groups.expt_dp.size()
    return state / groups.dp_cp.size()


def _count_parameters(parameters: list[torch.nn.Parameter], groups: ProcessGroupCollection) -> float:
    """Estimate the number of the model's parameters, each counted once. Every rank calls this."""
    world = dist.get_world_size()
    pipeline, tensor, experts = groups.pp.size(), groups.tp.size(), groups.expt_dp.size()
    count = 0.0
    for parameter in parameters:
        split = tensor if getattr(parameter, "tensor_model_parallel", False) else 1
        count += parameter.numel() / (experts if _is_expert(parameter) else world / pipeline / split)
    return sum(all_gather_objects(count))


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
