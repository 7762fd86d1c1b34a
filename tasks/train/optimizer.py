"""Data parallelism, optimizer and learning-rate schedule of a run."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.mtp import reduce_embedding_gradients
from ...bridge.layers.tower_part import TOWER_MODULES
from ...bridge.layers.vision_tower import MERGERS
from ...bridge.mapping.param_mapping import TOWERS
from ...bridge.model.model import Model
from ...bridge.options import ParallelOptions, VisionOptions
from ...bridge.parallel import ProcessGroups
from ...templates.plural import plural
from ..distributed.collectives import run_on_all_ranks
from ..options.groups import OptimizerOptions, ScheduleOptions
from .adamw import AdamW
from .hybrid_adamw import HybridAdamW, StatePlacement, check_host_memory
from .layer_wise import ParameterOwners
from .muon import Matrix, Muon, find_matrices
from .state_tensor import StateTensor


class TowerModule(NamedTuple):
    """Vision tower wrapped for data parallelism, and the groups of its layout, in which all ranks are replicas."""

    module: DistributedDataParallel
    groups: ProcessGroups


def wrap_for_data_parallelism(
    model: Model, options: ParallelOptions, *, bucket_size: int | None = None
) -> list[DistributedDataParallel]:
    """Wrap the model's chunks in DistributedDataParallel, and set the pipeline schedule's hooks in `model.config`.

    bucket_size: number of parameters per communication bucket; None: megatron-core's choice.
    """
    dense_dp_size, expert_dp_size = model.groups.dp_cp.size(), model.groups.expt_dp.size()
    dp_size = max(dense_dp_size, expert_dp_size if model.config.num_moe_experts else 1)
    overlap_reduce, overlap_gather = _overlaps(options, dp_size)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=overlap_gather,
        align_param_gather=len(model.chunks) > 1,  # the interleaved schedule starts it by param_sync_func
        use_distributed_optimizer=options.use_distributed_optimizer,
        # Saves a separate pass that divides. gloo cannot average, and megatron-core asserts this equality in floats.
        average_in_collective=dist.get_backend() == "nccl"
        and expert_dp_size / dense_dp_size / expert_dp_size == 1 / dense_dp_size,
        fp8_param_gather=model.config.fp8_param,
        bucket_size=bucket_size,
    )
    chunks = [
        # Only the first chunk needs buckets: the others' gradients are ready long before the step ends.
        DistributedDataParallel(
            model.config, config, chunk, disable_bucketing=number > 0 and not _needs_separate_buckets(chunk)
        )
        for number, chunk in enumerate(model.chunks)
    ]
    for chunk in model.chunks if overlap_reduce else ():
        for parameter in chunk.parameters():
            parameter.has_overlapped_reduction = True  # type: ignore[attr-defined]
    single_or_list = (lambda hooks: hooks[0]) if len(chunks) == 1 else (lambda hooks: hooks)
    model.config.finalize_model_grads_func = _finalize_gradients
    if overlap_reduce:
        model.config.no_sync_func = single_or_list([chunk.no_sync for chunk in chunks])
        model.config.grad_sync_func = single_or_list([chunk.start_grad_sync for chunk in chunks])
    if overlap_gather:
        model.config.param_sync_func = single_or_list([chunk.start_param_sync for chunk in chunks])
    return chunks


def _needs_separate_buckets(chunk: torch.nn.Module) -> bool:
    """Return whether the buckets of a chunk cannot be exchanged together: gloo takes them all for one type."""
    types = {parameter.dtype for parameter in chunk.parameters() if parameter.requires_grad}
    return dist.get_backend() == "gloo" and len(types) > 1


def _finalize_gradients(chunks: list[DistributedDataParallel], *arguments: Any, **settings: Any) -> None:
    finalize_model_grads(chunks, *arguments, **settings)  # pyright: ignore[reportArgumentType]
    reduce_embedding_gradients(chunks)


def wrap_tower(model: Model, options: ParallelOptions) -> TowerModule | None:
    """Wrap the trained parameters of the vision tower, which every rank holds whole; None without any.

    All ranks are its data-parallel group, over which its optimizer's state is sharded. Every rank calls this.
    """
    if model.vision is None or not model.vision.trains:
        return None
    groups = ProcessGroups(ParallelOptions(ddp_timeout=options.ddp_timeout))
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=options.use_distributed_optimizer,
        average_in_collective=dist.get_backend() == "nccl",
    )
    with groups.entered():
        return TowerModule(DistributedDataParallel(model.config, config, model.vision.part), groups)


def _overlaps(options: ParallelOptions, dp_size: int) -> tuple[bool, bool]:
    """Return whether to overlap gradient reduction with the backward pass, and parameter gathering with the forward."""
    reduce, gather = options.overlap_grad_reduce, options.overlap_param_gather
    if reduce is None:
        reduce = dp_size > 1 or bool(gather)
    if gather is None:
        gather = dp_size > 1 and reduce and options.use_distributed_optimizer
    return reduce, gather


def build_optimizer(
    model: Model,
    chunks: list[DistributedDataParallel],
    options: OptimizerOptions,
    schedule: ScheduleOptions,
    vision: VisionOptions | None = None,
    tower: TowerModule | None = None,
) -> MegatronOptimizer:
    """Return AdamW, SGD or Muon over the trained parameters, with fp32 masters of half-precision ones.

    Biases and one-dimensional parameters have no weight decay. --lorap_lr_ratio: LoRA+
    (https://arxiv.org/abs/2402.12354).
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="sgd" if options.optimizer == "sgd" else "adam",
        lr=schedule.lr,
        min_lr=min(schedule.min_lr, schedule.lr),
        weight_decay=options.weight_decay,
        clip_grad=options.clip_grad,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        sgd_momentum=options.sgd_momentum,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        apply_wd_to_qk_layernorm=options.apply_wd_to_qk_layernorm,
        initial_loss_scale=2.0**16,  # for fp16; megatron-core's default 2**32 would skip the first dozen steps
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        fp8_recipe=model.config.fp8_recipe if model.config.fp8_param else None,
    )
    if options.apply_wd_to_qk_layernorm and not model.config.qk_layernorm:
        raise ValueError("--apply_wd_to_qk_layernorm true: the model has no norms of queries and keys. Remove it")
    groups = get_standard_config_overrides(config)
    groups[ParamKey(name="*.A_log")] = {"wd_mult": 0.0}  # as of other vectors: Kimi-Linear's has four dimensions
    if (ratio := options.lorap_lr_ratio) is not None:  # not for embeddings, where A is initialised to zero
        lora_b_rates = {"max_lr": ratio * schedule.lr, "min_lr": ratio * min(schedule.min_lr, schedule.lr)}
        groups[ParamKey(name="*decoder.layers.*.lora_B")] = lora_b_rates  # pyright: ignore[reportArgumentType]
    matrices = {}
    if options.optimizer in ("muon", "dist_muon"):
        matrices = find_matrices(model, split_qkv=options.muon_split_qkv)
        max_lr = schedule.lr if options.muon_lr is None else options.muon_lr
        min_lr = min(schedule.min_lr if options.muon_min_lr is None else options.muon_min_lr, max_lr)
        key = ParamKey(predicate=ParamPredicate(name="muon", fn=lambda parameter: parameter in matrices))
        groups[key] = {"max_lr": max_lr, "min_lr": min_lr, "muon": True}  # pyright: ignore[reportArgumentType]
    owners = ParameterOwners(model) if options.optimizer == "dist_muon" else None
    modules = [*chunks, *([tower.module] if tower else [])]
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    weights = next((parameter.dtype for parameter in parameters if parameter.dtype != torch.float32), torch.float32)
    placement, in_fp8 = _state_placement(options, has_masters=weights != torch.float32), model.config.fp8_param
    with warnings.catch_warnings(), owners.only_own() if owners else nullcontext(), placement.masters(in_fp8=in_fp8):
        warnings.filterwarnings("ignore", "WARNING: there is no optimizer")  # where all dense weights are frozen
        optimizer = get_megatron_optimizer(config, list(chunks), groups, use_gloo_process_groups=False)
    if tower:
        rates = _tower_rates(vision, schedule) if vision else {}
        with placement.masters(in_fp8=in_fp8):
            optimizer = _add_tower(optimizer, tower, config, groups | rates)
    if placement.host_fraction:
        sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
        # Together, before any rank allocates its states: each counts those of all ranks of the machine.
        run_on_all_ranks(lambda: check_host_memory(placement, sum(sizes), weights))
    for part in chained_optimizers(optimizer):
        _replace_optimizer(part, in_fp8=in_fp8, matrices=matrices, options=options, placement=placement)
    if owners:
        _send_after_steps(optimizer, owners)
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _state_placement(options: OptimizerOptions, *, has_masters: bool) -> StatePlacement:
    """Return where AdamW's states are, and in which types. Raises ValueError for types of masters without masters."""
    if options.main_params_dtype != "fp32" and not has_masters:
        raise ValueError(
            f"--main_params_dtype {options.main_params_dtype}: weights in fp32 have no masters. Remove it, or set "
            "--torch_dtype bfloat16"
        )
    return StatePlacement(
        options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0,
        options.exp_avg_dtype,
        options.exp_avg_sq_dtype,
        options.main_params_dtype,
    )


def _tower_rates(options: VisionOptions, schedule: ScheduleOptions) -> dict[Any, Any]:
    """Return the overrides of the learning rates of the vision tower and of its mergers."""
    rates: dict[Any, Any] = {}
    for rate, modules in ((options.vit_lr, TOWER_MODULES), (options.aligner_lr, MERGERS)):
        if rate is not None:
            min_rate = rate * min(schedule.min_lr / schedule.lr, 1.0) if schedule.lr else 0.0
            names = tuple(f"*{tower}{module}.*" for tower in TOWERS for module in modules)
            rates[ParamKey(name=names)] = {"max_lr": rate, "min_lr": min_rate}  # pyright: ignore[reportArgumentType]
    return rates


def _add_tower(
    optimizer: MegatronOptimizer, tower: TowerModule, config: OptimizerConfig, groups: dict[Any, Any]
) -> MegatronOptimizer:
    """Return an optimizer of the language model's parameters and of the vision tower's."""
    with tower.groups.entered():
        tower_optimizer = get_megatron_optimizer(config, [tower.module], groups, use_gloo_process_groups=False)
        tensor_group = parallel_state.get_tensor_model_parallel_group()
    parts = chained_optimizers(tower_optimizer)
    for part in parts:
        part.tp_group = tensor_group  # group of this rank alone: its gradients count in the norm
    return ChainedOptimizer([*chained_optimizers(optimizer), *parts])


def _send_after_steps(optimizer: Any, owners: ParameterOwners) -> None:
    """Have the owners send their parameters after each step."""
    step = optimizer.step_with_ready_grads

    def step_and_send() -> bool:
        is_successful = step()
        owners.send()
        return is_successful

    optimizer.step_with_ready_grads, optimizer.owners = step_and_send, owners
    for part in chained_optimizers(optimizer):
        part.has_own_parameters, part.grad_stats_parallel_group = True, dist.group.WORLD


def _replace_optimizer(
    part: Any,
    *,
    in_fp8: bool,
    matrices: dict[Tensor, Matrix],
    options: OptimizerOptions,
    placement: StatePlacement,
) -> None:
    """Replace the torch optimizer within a megatron-core optimizer by one that never waits for the device.

    megatron-core's waits for the gradient norm, and depends on whether Transformer Engine is installed.
    """
    if part.optimizer is None:  # no parameters on this rank
        return
    groups, config = part.optimizer.param_groups, part.config
    if config.optimizer == "sgd":
        sgd = torch.optim.SGD([{"params": []}], lr=config.lr, momentum=config.sgd_momentum, fused=True)
        sgd.param_groups = [{**sgd.defaults, **group, "fused": True, "foreach": None} for group in groups]
        if config.sgd_momentum:  # created before the first step, so that loading finds it
            for param in (parameter for group in groups for parameter in group["params"]):
                sgd.state[param] = {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}
        part.optimizer = sgd
        return
    prefix = "shard_" if isinstance(part, DistributedOptimizer) else ""
    half_params, masters = (
        [param for group in getattr(part, name, []) for param in group]
        for name in (f"{prefix}float16_groups", f"{prefix}fp32_from_float16_groups")
    )
    copies = {} if in_fp8 else dict(zip(masters, half_params, strict=True))
    settings: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    if matrices:
        updated = {main: matrices[param] for param, main in _params_with_masters(part) if param in matrices}
        part.optimizer = Muon(groups, copies, updated, options, **settings)  # pyright: ignore[reportAttributeAccessIssue]
    elif placement.is_plain:
        part.optimizer = AdamW(groups, copies, **settings)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        part.optimizer = HybridAdamW(groups, copies, placement, **settings)  # pyright: ignore[reportAttributeAccessIssue]
    if not in_fp8:  # AdamW writes the copies; megatron-core writes FP8 weights
        part._copy_main_params_to_model_params = lambda: None


def build_schedule(
    optimizer: MegatronOptimizer, options: ScheduleOptions, weight_decay: float, max_steps: int
) -> OptimizerParamScheduler:
    """Return the learning-rate schedule. Raises ValueError if the warmup does not fit into the run."""
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
        warmup_steps = decay_steps - 1  # the fraction rounds up in a very short run
    wsd_decay_steps = options.lr_wsd_decay_iters or max(1, decay_steps // 10)
    if options.lr_decay_style == "WSD" and options.lr_wsd_decay_iters and warmup_steps + wsd_decay_steps > decay_steps:
        raise ValueError(
            f"--lr_wsd_decay_iters {wsd_decay_steps} and {warmup_steps} steps of warmup are more than the "
            f"{decay_steps} steps of the run: lower one of them"
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
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


@torch.no_grad()
def update(
    optimizer: MegatronOptimizer, clip_grad: float, should_skip: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor] | None:
    """Clip gradients and step. A non-finite gradient norm skips the update on the device; the host does not wait.

    should_skip: maps the norm to 1.0 to skip the update, else 0.0: fp32 [] on the device.
    Returns the gradient norm before clipping, and the norm of this rank's shard, which shows the rank of a non-finite
    gradient: fp32 [] on the device. Returns None if fp16 gradients overflow: the loss scale is lowered, and the weights
    do not change.
    """
    if optimizer.prepare_grads():  # waits for the device, only in fp16
        return None
    norm, rank_norm = _gradient_norm(optimizer)
    grad_scale = ((norm + 1e-6) / clip_grad).clamp(min=1.0) if clip_grad > 0 else torch.ones_like(norm)
    found_inf = (~norm.isfinite()).float()
    if should_skip is not None:
        found_inf = found_inf.maximum(should_skip(norm))
    for part in chained_optimizers(optimizer):
        if part.optimizer is not None:
            part.optimizer.grad_scale, part.optimizer.found_inf = grad_scale, found_inf
    optimizer.step_with_ready_grads()
    return norm, rank_norm


def _gradient_norm(optimizer: MegatronOptimizer) -> tuple[Tensor, Tensor]:
    """Return the gradient norm over all ranks, and over this rank's shard of the parameters."""
    squares: dict[Any, Tensor] = {}  # by process group over which parameters are split; experts may have another
    for part in chained_optimizers(optimizer):
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
    start: int  # index of the shard's first element in the flat parameter
    # fp32 [elements]: the optimizer's state by name, and "param", the fp32 master of a parameter in another dtype
    state: dict[str, Tensor]
    sharded: bool  # whether data-parallel ranks hold different elements, else each holds all
    copies: Sequence[tuple[StateTensor, Tensor]] = ()  # those of `state` that are copies, and their originals

    def store(self) -> None:
        """Bring changes of the state into the optimizer, where it is not a view."""
        for state, values in self.copies:
            state.write(values.to(state.values.device))


def shards(optimizer: MegatronOptimizer) -> Iterator[Shard]:
    """Yield the optimizer's state on this rank: views, or fp32 copies of states in scaled types."""
    for part in chained_optimizers(optimizer):
        if part.optimizer is None:
            continue
        is_distributed = isinstance(part, DistributedOptimizer)
        sharded = is_distributed or getattr(part, "has_own_parameters", False)
        for parameter, main in _params_with_masters(part):
            start = part._get_model_param_range_map(parameter)["param"].start if is_distributed else 0
            if isinstance(part.optimizer, HybridAdamW):
                state, copies = part.optimizer.plain_state(main)
                if parameter.dtype != torch.float32:
                    state.setdefault("param", main.detach().view(-1))  # the master of an FP8 weight
                yield Shard(parameter, start, state, sharded, copies)
                continue
            state = part.optimizer.state[main] | ({"param": main} if parameter.dtype != torch.float32 else {})
            yield Shard(parameter, start, {name: value.detach().view(-1) for name, value in state.items()}, sharded)


def _params_with_masters(part: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield each model parameter with the tensor that the optimizer updates: an fp32 master or (a shard of) itself."""
    if isinstance(part, FP32Optimizer):
        yield from ((param, param) for group in part.param_groups for param in group["params"])
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
def copy_masters_to_model(optimizer: MegatronOptimizer, chunks: list[DistributedDataParallel]) -> None:
    """Copy the fp32 masters to the model's parameters, on every rank."""
    for part in chained_optimizers(optimizer):
        if isinstance(part.optimizer, HybridAdamW) and part.optimizer.copies:
            part.optimizer.write_copies()
        elif part.optimizer is not None and not isinstance(part, FP32Optimizer):
            type(part)._copy_main_params_to_model_params(part)  # _replace_optimizer may disable the instance's method
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    if owners := getattr(optimizer, "owners", None):
        owners.send()


def chained_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return megatron-core's optimizers: of the dense parameters, and of experts if there are any."""
    return getattr(optimizer, "chained_optimizers", [optimizer])
