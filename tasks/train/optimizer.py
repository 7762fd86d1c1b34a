"""Data parallelism, optimizer and learning-rate schedule, from the options."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from ...bridge import runtime
from ...bridge.model.model import Model
from ...bridge.options import ParallelOptions
from ...templates.plural import plural
from ..options.groups import OptimizerOptions, ScheduleOptions
from .adamw import AdamW


def wrap_for_data_parallelism(
    model: Model, options: ParallelOptions, *, bucket_size: int | None = None
) -> list[DistributedDataParallel]:
    """Return the model's chunks with their gradient buffers, and the schedule's hooks in `model.config`.

    `bucket_size`: parameters that are reduced and gathered together; None: megatron-core's choice.
    """
    data_parallel, experts = model.groups.dp_cp.size(), model.groups.expt_dp.size()
    shared = max(data_parallel, experts if model.config.num_moe_experts else 1)
    overlap_reduce, overlap_gather = _overlaps(options, shared)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=overlap_gather,
        align_param_gather=len(model.chunks) > 1,  # the interleaved schedule begins it, by param_sync_func
        use_distributed_optimizer=options.use_distributed_optimizer,
        # Else a pass of its own divides. gloo cannot, and megatron-core asks that rounding leaves the second as it is.
        average_in_collective=dist.get_backend() == "nccl" and experts / data_parallel / experts == 1 / data_parallel,
        fp8_param_gather=model.config.fp8_param,
        bucket_size=bucket_size,
    )
    chunks = [
        # Only the first chunk is worth bucketing: the others' gradients are ready long before the step ends.
        DistributedDataParallel(model.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    one_or_all = (lambda hooks: hooks[0]) if len(chunks) == 1 else (lambda hooks: hooks)
    model.config.finalize_model_grads_func = finalize_model_grads
    if overlap_reduce:
        model.config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        model.config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
    if overlap_gather:
        model.config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
    return chunks


def _overlaps(options: ParallelOptions, shared: int) -> tuple[bool, bool]:
    """Return whether to overlap gradient reduction with the backward pass, and parameter gathering with the forward."""
    reduce, gather = options.overlap_grad_reduce, options.overlap_param_gather
    if reduce is None:
        reduce = shared > 1 or bool(gather)
    if gather is None:
        gather = shared > 1 and reduce and options.use_distributed_optimizer
    return reduce, gather


def build_optimizer(
    model: Model, chunks: list[DistributedDataParallel], options: OptimizerOptions, rates: ScheduleOptions
) -> MegatronOptimizer:
    """AdamW or SGD over the parameters of the chunks that are trained, with fp32 masters of those in half precision.

    Biases and what has one dimension do not decay. --lorap_lr_ratio: LoRA+ (https://arxiv.org/abs/2402.12354).
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer=options.optimizer,
        lr=rates.lr,
        min_lr=min(rates.min_lr, rates.lr),
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        sgd_momentum=options.sgd_momentum,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        initial_loss_scale=2.0**16,  # fp16's; megatron-core's own 2**32 would skip the first dozen steps
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        fp8_recipe=model.config.fp8_recipe if model.config.fp8_param else None,
    )
    groups = get_standard_config_overrides(config)
    if (ratio := options.lorap_lr_ratio) is not None:  # not of an embedding, whose A begins with zeros
        rates_of_b = {"max_lr": ratio * rates.lr, "min_lr": ratio * min(rates.min_lr, rates.lr)}
        groups[ParamKey(name="*decoder.layers.*.lora_B")] = rates_of_b  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "WARNING: there is no optimizer")  # of dense weights, where all are frozen
        optimizer = get_megatron_optimizer(config, list(chunks), groups, use_gloo_process_groups=False)
    for part in parts(optimizer):
        _use_our_own(part, in_fp8=model.config.fp8_param)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _use_our_own(part: Any, *, in_fp8: bool) -> None:
    """Give a part of megatron-core's optimizer what updates on the device alone: its own waits for the gradient norm,
    and is another one where Transformer Engine is not installed."""
    if part.optimizer is None:  # this rank has none of its parameters
        return
    groups, config = part.optimizer.param_groups, part.config
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD([{"params": []}], lr=config.lr, momentum=config.sgd_momentum, fused=True)
        sgd.param_groups = [{**sgd.defaults, **group, "fused": True, "foreach": None} for group in groups]
        if config.sgd_momentum:  # from the first step on, as it is after a load
            for each in (parameter for group in groups for parameter in group["params"]):
                sgd.state[each] = {"momentum_buffer": torch.zeros_like(each, requires_grad=False)}
        part.optimizer = sgd
        return
    kind = "shard_" if isinstance(part, DistributedOptimizer) else ""
    halves, masters = (
        [each for group in getattr(part, name, []) for each in group]
        for name in (f"{kind}float16_groups", f"{kind}fp32_from_float16_groups")
    )
    copies = {} if in_fp8 else dict(zip(masters, halves, strict=True))
    part.optimizer = AdamW(  # pyright: ignore[reportAttributeAccessIssue]
        groups, copies, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps
    )
    if not in_fp8:  # AdamW has written them; weights in FP8 are megatron-core's to write
        part._copy_main_params_to_model_params = lambda: None


def build_schedule(
    optimizer: MegatronOptimizer, options: ScheduleOptions, weight_decay: float, max_steps: int
) -> OptimizerParamScheduler:
    """Return the learning rate of each step. Raises ValueError where the warmup does not fit into the run."""
    decay_steps = options.lr_decay_iters or max_steps
    warmup_steps = options.lr_warmup_iters
    if options.lr_warmup_fraction is not None:
        warmup_steps = math.ceil(options.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        if options.lr_warmup_fraction is None:
            raise ValueError(
                f"--lr_warmup_iters {warmup_steps} must be less than the {plural(decay_steps, 'step')} of the run: "
                "lower it"
            )
        warmup_steps = decay_steps - 1  # a fraction of a very short run
    last_part = options.lr_wsd_decay_iters or max(1, decay_steps // 10)
    if options.lr_decay_style == "WSD" and options.lr_wsd_decay_iters and warmup_steps + last_part > decay_steps:
        raise ValueError(
            f"--lr_wsd_decay_iters {last_part} and {warmup_steps} steps of warmup are more than the {decay_steps} "
            "steps of the run: lower one of them"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=min(options.lr_warmup_init, options.lr),
        max_lr=options.lr,
        min_lr=min(options.min_lr, options.lr),
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=max_steps,
        wd_incr_style="constant",
        wsd_decay_steps=last_part,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer, clip_grad: float, skips: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Clip and step. Where the gradients' norm is not finite nothing changes; the host does not wait to know.

    skips: from the norm, 1.0 where the weights are to stay as they are, else 0.0: fp32 [] on the device.
    Returns the norm before clipping, and that of the gradients which this rank updates by (so that the ranks with one
    that is not finite can be told): fp32 [] on the device. None where fp16's loss scale was too high: the scale is
    lowered, and the weights stay.
    """
    if optimizer.prepare_grads():  # of fp16 alone: waits for the device
        return None
    norm, rank_norm = _gradient_norm(optimizer)
    grad_scale = ((norm + 1e-6) / clip_grad).clamp(min=1.0) if clip_grad > 0 else torch.ones_like(norm)
    found_inf = (~norm.isfinite()).float()
    if skips is not None:
        found_inf = found_inf.maximum(skips(norm))
    for part in parts(optimizer):
        if part.optimizer is not None:
            part.optimizer.grad_scale, part.optimizer.found_inf = grad_scale, found_inf
    optimizer.step_with_ready_grads()
    return norm, rank_norm


def _gradient_norm(optimizer: MegatronOptimizer) -> tuple[Tensor, Tensor]:
    """Return the gradient norm over all ranks, and over this rank's share of the parameters."""
    squares: dict[Any, Tensor] = {}  # for each group of processes that share parameters out: experts may have their own
    for part in parts(optimizer):
        group, gradients = part.get_grad_stats_parallel_group(), part.get_grads_for_grad_norm()
        total = squares.setdefault(group, torch.zeros((), device=runtime.device()))
        if gradients and isinstance(part.optimizer, AdamW):
            total += part.optimizer.sum_of_squares(gradients)
        elif gradients:
            total += torch.nn.utils.get_total_norm(gradients).square()
    rank_norm = torch.stack(list(squares.values())).sum().sqrt()
    for group, square in squares.items():
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    return torch.stack(list(squares.values())).sum().sqrt(), rank_norm


class Shard(NamedTuple):
    """Part of a parameter that this rank's optimizer updates."""

    parameter: Tensor  # the model's
    start: int  # the first of its elements
    # fp32 [elements]: the optimizer's, by its names, and, of a parameter that is not in fp32 itself, its master: param.
    state: dict[str, Tensor]
    sharded: bool  # each data-parallel rank has elements of its own; else all have all


def shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yield the state of `optimizer`: views of what it updates."""
    for part in parts(optimizer):
        if part.optimizer is None:
            continue
        sharded = isinstance(part, DistributedOptimizer)
        for parameter, main in _with_mains(part):
            start = part._get_model_param_range_map(parameter)["param"].start if sharded else 0
            state = part.optimizer.state[main] | ({"param": main} if parameter.dtype != torch.float32 else {})
            yield Shard(parameter, start, {name: each.detach().view(-1) for name, each in state.items()}, sharded)


def _with_mains(part: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter of the model with what is updated for it: a master in fp32, or (a part of) itself."""
    if isinstance(part, FP32Optimizer):
        yield from ((each, each) for group in part.param_groups for each in group["params"])
        return
    pairs = [("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups", "fp32_from_fp32_groups")]
    if isinstance(part, DistributedOptimizer):
        pairs = [
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        ]
    for names in pairs:
        for groups in zip(*(getattr(part, name) for name in names), strict=True):
            yield from zip(*groups, strict=True)


@torch.no_grad()
def put_masters(optimizer: MegatronOptimizer, chunks: list[DistributedDataParallel]) -> None:
    """Write the fp32 masters, which have changed, into the model's parameters, on every rank."""
    for part in parts(optimizer):
        if part.optimizer is not None and not isinstance(part, FP32Optimizer):
            type(part)._copy_main_params_to_model_params(part)  # its own has been replaced where AdamW does this
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """megatron-core chains two: of the dense parameters, and of experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
