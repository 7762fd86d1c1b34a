"""Data parallelism, optimizer and learning-rate schedule, from the options."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..bridge.build import Model
from ..bridge.options import ParallelOptions
from .options import OptimizerOptions, ScheduleOptions


def wrap_for_data_parallelism(
    model: Model, options: ParallelOptions, *, bucket_size: int | None = None
) -> list[DistributedDataParallel]:
    """The model's chunks with their gradient buffers, and the schedule's hooks in `model.config`.

    `bucket_size`: parameters that are reduced and gathered together; None: megatron-core's choice.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
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
    if options.overlap_grad_reduce:
        model.config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        model.config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
    if options.overlap_param_gather:
        model.config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
    return chunks


def build_optimizer(
    model: Model, chunks: list[DistributedDataParallel], options: OptimizerOptions, rates: ScheduleOptions
) -> MegatronOptimizer:
    """AdamW or SGD over the chunks' parameters, with fp32 master weights where these are in half precision."""
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
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_schedule(
    optimizer: MegatronOptimizer, options: ScheduleOptions, weight_decay: float, max_steps: int
) -> OptimizerParamScheduler:
    """The learning rate of each step. Raises ValueError where the warmup does not fit into the run."""
    decay_steps = options.lr_decay_iters or max_steps
    warmup_steps = options.lr_warmup_iters
    if options.lr_warmup_fraction is not None:
        warmup_steps = math.ceil(options.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        if options.lr_warmup_fraction is None:
            raise ValueError(
                f"--lr_warmup_iters {warmup_steps} must be less than the {decay_steps} steps of the run: lower it"
            )
        warmup_steps = decay_steps - 1  # a fraction of a very short run
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
        wsd_decay_steps=options.lr_wsd_decay_iters or max(1, decay_steps // 10),
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


@torch.no_grad()
def update(optimizer: MegatronOptimizer, clip_grad: float) -> float | None:
    """Clip and step. Returns the gradient norm before clipping; None where fp16's loss scale was too high: the scale is
    lowered and the weights stay. A norm that is not finite is returned, and the weights stay as well."""
    if optimizer.prepare_grads():
        return None
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    if clip_grad > 0 and norm > clip_grad:
        parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        for part in parts:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, clip_grad, norm)
    optimizer.step_with_ready_grads()
    return norm
