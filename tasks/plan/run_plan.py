"""Memory plan of a training run by its options: whether it can fit on its GPUs, and the nearest layout that fits."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from ...bridge.checkpoint.hub import read_config, source_folder
from ...bridge.checkpoint.pretrained import load_config
from ...bridge.checkpoint.quantized import weight_reader
from ...bridge.families import family_of
from ...bridge.mapping.architecture import HfConfig
from ...bridge.option_groups import flag_value
from ...bridge.options import KernelOptions, MoEOptions, RecomputeOptions
from ...templates.plural import plural
from ..observability.run_logger import duration
from ..options import GkdOptions, GrpoOptions, PlanOptions, SftOptions
from ..system.memory import GIB, host_memory_share
from .further_models import divides_further_model, with_models_of_run
from .gpu_layout import GpuLayout, Recompute
from .make_workload import make_workload
from .memory import OUTSIDE, Memory, kept_patches, memory_of_rank
from .search import search, smallest_cluster
from .speed import Machine, seconds_per_step
from .task import NEXT_TOKENS, TaskWork, counts_documents, unplanned_task_flags
from .tower import IMAGE_SHARE, IMAGE_TOKENS
from .workload import Workload

logger = logging.getLogger(__name__)

# Flags of the builder beside which weights, gradients and the optimizer's state are as planned: those of `GpuLayout`,
# those without effect on memory, and those that change activations alone. Any other flag makes a run unplanned.
LAYOUT_FLAGS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
    "virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
NEUTRAL_FLAGS = (
    "ddp_backend", "ddp_timeout", "preflight", "overlap_grad_reduce", "overlap_param_gather", "overlap_p2p_comm",
    "batch_p2p_comm", "cp_comm_type", "mtp_loss_scaling_factor", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_load_balancing_type", "accumulate_allreduce_grads_in_fp32",
)  # fmt: skip
ACTIVATION_FLAGS = tuple(
    field.name for group in (RecomputeOptions, MoEOptions, KernelOptions) for field in fields(group)
)
FP8_FLAGS = "fp8_format", "fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather"
ADAPTER_FLAGS = "lora_rank", "lora_alpha", "lora_dropout", "use_rslora"
TOWER_FLAGS = "freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr", "vit_gradient_checkpointing"
STATES = "weights", "gradients", "optimizer"  # parts of the memory that do not depend on the batch
MEASURED_MODELS = "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gpt_oss"  # rows of docs/plan.md
MEASURED_FLAGS = (
    *NEUTRAL_FLAGS, *FP8_FLAGS, *LAYOUT_FLAGS, "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "moe_permute_fusion", "transformer_impl", "cpu_offloading", "cpu_offloading_num_layers",
)  # fmt: skip
MEASURED_GPUS = 4
# Planned memory without its reserve was at most 1.05 times what runs reserved.
MARGIN = 1.1


@dataclass(frozen=True)
class Gpu:
    """GPU of a run."""

    name: str  # torch's name
    memory: float  # bytes that a process sees
    per_node: int
    host_memory: float = math.inf  # bytes that a process may fill

    @classmethod
    def here(cls, name: str, memory: float, per_node: int) -> "Gpu":
        """Return a GPU of this machine, with its share of the host's memory."""
        return cls(name, memory, per_node, host_memory_share(per_node))

    @property
    def machine(self) -> Machine | None:
        """Speed of the GPU; None if it is not known."""
        return Machine.of(self.name, self.per_node, self.host_memory)


class UnplannedRunError(ValueError):
    """Run of which the memory is not planned. The text says why, after "not planned: "."""


@dataclass(frozen=True)
class RunPlan:
    """Model, batch and layout of a training run."""

    work: Workload
    layout: GpuLayout
    has_measured_activations: bool  # runs of this model with these flags were measured, with packing
    packs: bool

    @property
    def memory(self) -> Memory:
        """Return the memory of the rank that needs most."""
        return memory_of_rank(self.work, self.layout)

    @property
    def is_of_measured_kind(self) -> bool:
        """Return whether runs of this kind were measured, so that activations are known too."""
        return self.has_measured_activations and self.packs

    @property
    def is_measured(self) -> bool:
        """Return whether runs of this kind were measured on as many GPUs."""
        return self.is_of_measured_kind and self.layout.gpus <= MEASURED_GPUS

    @property
    def least_bytes(self) -> float:
        """Return the bytes without which the run cannot train, however its memory is packed."""
        memory = self.memory
        states = sum(getattr(memory, name) for name in STATES)
        return max(states, (memory.total - memory.reserve) / MARGIN) if self.is_measured else states


@dataclass(frozen=True)
class Images:
    """Images in the data of a run.

    share: visual tokens in all tokens; without any, no tower is built
    tokens: visual tokens of an image, in the mean
    """

    share: float
    tokens: float = IMAGE_TOKENS


TEXT, ASSUMED_IMAGES = Images(0.0), Images(IMAGE_SHARE)


def plan_run(
    options: SftOptions, world: int, images: Images = ASSUMED_IMAGES, gpu_bytes: float | None = None
) -> RunPlan:
    """Return the plan of a run on `world` GPUs. Downloads at most the small files of its model.

    images: for models with a tower
    gpu_bytes: memory of a GPU; None: Workload's default
    Raises UnplannedRunError.
    """
    if unplanned := next(_unplanned_flags(options), None):
        raise UnplannedRunError(unplanned)
    plan = _plan_model(options, world, images, gpu_bytes)
    if type(options) in NEXT_TOKENS:
        return plan
    if plan.work.tower:
        raise UnplannedRunError(f"{task_flag(options)} with a vision tower")
    return replace(plan, has_measured_activations=False)  # pairs share prompts, and packs of completions vary


def _plan_model(options: SftOptions, world: int, images: Images, gpu_bytes: float | None) -> RunPlan:
    """Return the plan of a run of any task, as of `plan_run`, as far as model, batch and layout determine it."""
    folder = source_folder(options, options.mcore_model, weights=False)
    hf_config = read_config(folder, mcore=bool(options.mcore_model))
    if images.share and (unplanned := _unplanned_tower(options, hf_config)):
        raise UnplannedRunError(unplanned)
    dtype = options.torch_dtype or hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    if dtype != "bfloat16":
        raise UnplannedRunError(f"weights in {dtype}")
    try:
        weight_reader(folder, hf_config)  # weights of a known quantization are read as bf16
        task = TaskWork.of(options)
        plan = plan_options(options, world, images)
        work = make_workload(hf_config, load_config(folder), plan, task)
        work = with_models_of_run(work, options, plan)
    except ValueError as error:
        raise UnplannedRunError(str(error)) from None
    layout = layout_of(options, world)
    if not divides_further_model(work, layout):
        raise UnplannedRunError("a critic or teacher that the layout does not divide")
    if gpu_bytes:
        work = replace(work, gpu_bytes=gpu_bytes)
    is_measured = _has_measured_activations(options, work, layout, hf_config["model_type"])
    return RunPlan(work, layout, is_measured, options.data.packing)


def pack_length(options: SftOptions) -> int | None:
    """Return the tokens of a pack, or of the longest sample, such as a pair; None if samples have no limit."""
    data = options.data
    if data.packing or data.max_length is None:
        return (data.packing and data.packing_length) or data.max_length
    return _longest_document(options, data.max_length) * TaskWork.of(options).documents


def _longest_document(options: SftOptions, max_length: int) -> int:
    """Return the tokens of the longest document: a prompt with its completion, where there are completions."""
    if isinstance(options, GrpoOptions | GkdOptions) and options.generates:
        return max_length + options.sampling.max_completion_length
    return max_length


def _packs_of_step(options: SftOptions) -> int:
    """Return the samples of a step: packs, or those that its documents fill if all are as long as can be."""
    size, data = options.training.global_batch_size, options.data
    if not (counts_documents(options) and data.packing and data.packing_length and data.max_length):
        return size
    per_pack = max(1, data.packing_length // _longest_document(options, data.max_length))
    return math.ceil(size / per_pack)


def plan_options(options: SftOptions, world: int, images: Images = ASSUMED_IMAGES) -> PlanOptions:
    """Return the options of `megatron plan` for the model, batch and tuner of a run."""
    return PlanOptions(
        options.model or options.mcore_model or "",
        gpus=world,
        max_length=pack_length(options) or 1,
        global_batch_size=_packs_of_step(options),
        tuner_type="lora" if options.tuner.has_adapters else "full",
        mtp_num_layers=options.build.mtp_num_layers,
        lora_rank=options.lora.lora_rank,
        lora_dropout=options.lora.lora_dropout,
        fp8_format=options.build.fp8_format,
        fp8_param_gather=options.build.fp8_param_gather,
        image_share=0.0 if options.vision.language_model_only else images.share,
        image_tokens=images.tokens,
        freeze_vit=options.vision.freeze_vit,
        freeze_aligner=options.vision.freeze_aligner,
        vit_gradient_checkpointing=options.vision.vit_gradient_checkpointing,
        optimizer_offload_fraction=options.optimizer.optimizer_offload_fraction,
        exp_avg_dtype=options.optimizer.exp_avg_dtype,
        exp_avg_sq_dtype=options.optimizer.exp_avg_sq_dtype,
        main_params_dtype=options.optimizer.main_params_dtype,
        accumulate_allreduce_grads_in_fp32=options.build.accumulate_allreduce_grads_in_fp32,
        cp_comm_type=_exchange(options.build.cp_comm_type),
    )


def _exchange(cp_comm_type: str | None) -> Literal["p2p", "all_gather"] | None:
    """Return the exchange of keys and values to plan: that of Transformer Engine counts as a ring."""
    return "p2p" if cp_comm_type in ("p2p", "a2a", "a2a+p2p") else cp_comm_type  # type: ignore[return-value]


def layout_of(options: SftOptions, world: int) -> GpuLayout:
    """Return the layout of a run on `world` GPUs."""
    build = options.build
    return GpuLayout(
        world,
        build.tensor_model_parallel_size,
        build.pipeline_model_parallel_size,
        build.context_parallel_size,
        build.expert_model_parallel_size,
        options.training.micro_batch_size,
        _recompute(build),
        options.optimizer.optimizer_cpu_offload,
        build.virtual_pipeline_model_parallel_size or 1,
        build.decoder_first_pipeline_num_layers,
        build.decoder_last_pipeline_num_layers,
        build.recompute_num_layers if build.recompute_method == "block" else None,
        build.cpu_offloading_num_layers if build.cpu_offloading else 0,
        build.expert_tensor_parallel_size,
    )


def _recompute(build: RecomputeOptions) -> Recompute:
    if build.recompute_granularity == "selective":
        return "mlp" if "mlp" in build.recompute_modules else "none"
    return build.recompute_granularity


def _unplanned_flags(options: SftOptions) -> Iterator[str]:
    """Yield the flags that change the size of the weights' states in ways that are not planned."""
    yield from unplanned_task_flags(options)
    if options.adapters or options.mcore_adapter:
        yield "--adapters"
    if options.optimizer.optimizer != "adam":
        yield f"--optimizer {options.optimizer.optimizer}"
    for group, planned in (
        (options.build, (*LAYOUT_FLAGS, *NEUTRAL_FLAGS, *ACTIVATION_FLAGS, *FP8_FLAGS, "mtp_num_layers")),
        (options.tuner, ("tuner_type",)),
        (options.lora, ADAPTER_FLAGS),
    ):
        yield from (f"--{name}" for name in _changed(group) if name not in planned)


def task_flag(options: SftOptions) -> str:
    """Return the flag that selects a task, with its value."""
    kind = "rlhf_type" if flag_value(options, "rlhf_type", None) else "task_type"
    return f"--{kind} {flag_value(options, kind, '')}"


def _unplanned_tower(options: SftOptions, hf_config: HfConfig) -> str | None:
    """Return what is not planned of a tower; None if it is planned or not built."""
    family = family_of(hf_config)
    if options.vision.language_model_only or not family.has_tower(hf_config):
        return None
    architecture = family.describe(hf_config, vision=True)
    if architecture.audio:
        return "an audio tower"
    if architecture.vision and architecture.vision.clips and not options.vision.freeze_vit:
        return "--freeze_vit false with a tower that clips"
    flags = [f"--{name}" for name in _changed(options.vision) if name not in TOWER_FLAGS]
    if options.tuner.has_adapters and not (options.vision.freeze_vit and options.vision.freeze_aligner):
        flags.append("adapters of a vision tower")
    return next(iter(flags), None)


def _changed(group: object) -> Iterator[str]:
    """Yield the names of a group's options that differ from the defaults."""
    default = type(group)()
    return (name for name, value in vars(group).items() if value != getattr(default, name))


def _has_measured_activations(options: SftOptions, work: Workload, layout: GpuLayout, model_type: str) -> bool:
    """Return whether the plan of the activations is held against runs of this kind (docs/plan.md), with packing."""
    return (
        model_type in MEASURED_MODELS
        and not (layout.context > 1 and (work.tower or model_type == "gpt_oss"))
        and not flag_value(options, "enable_dft_loss", False)
        and {"core_attn", "mlp"}.issuperset(options.build.recompute_modules)
        and not (layout.offloaded_layers and layout.recompute != "full")
        and layout.expert_tensor == 1
        and all(name in MEASURED_FLAGS for name in _changed(options.build))
    )


def check_fits(options: SftOptions, world: int, gpu: Gpu) -> None:
    """Raise ValueError, with the nearest layout that fits, if a run cannot fit on GPUs of this kind."""
    if gpu.machine is None:
        return
    try:
        plan = plan_run(options, world, TEXT, gpu.memory)  # for data without images builds no tower
    except UnplannedRunError:
        return
    except Exception as error:  # a fault of the plan must not stop a run that may fit
        logger.warning("The run's memory was not planned: %r", error)
        return
    if plan.least_bytes > gpu.memory:
        model = f"--model {options.model}" if options.model else f"--mcore_model {options.mcore_model}"
        raise ValueError(
            f"{model}: training needs at least {plan.least_bytes / GIB:.1f} GiB of each GPU, which has "
            f"{gpu.memory / GIB:.1f}. {_fix(plan, gpu.machine, gpu.memory - OUTSIDE)}. --plan off skips this check"
        )


def _fix(plan: RunPlan, machine: Machine, limit: float) -> str:
    """Return the change of fewest flags after which a run fits into `limit` bytes."""
    work, layout = plan.work, plan.layout
    pins = {"offloaded_layers": 0} if work.parameters.tower.total else {}  # planned without a tower
    plans = search(work, layout.gpus, machine, limit, pins).plans
    if not plans:
        cluster = smallest_cluster(work, machine, limit, pins)
        return f"It fits on {cluster} GPUs" if cluster else "Set a shorter --max_length, or --tuner_type lora"
    nearest = min(plans, key=lambda fit: (layout.changes(fit.layout).count("--"), fit.seconds))
    return f"Set {layout.changes(nearest.layout)}, for {nearest.memory.total / GIB:.1f} GiB by the plan"


def tower_patches(options: SftOptions, world: int, gpu_bytes: float) -> int:
    """Return the patches whose activations a trained tower keeps, as of VisionEncoder, by the plan.

    They depend on flags and the GPU's memory alone, not on the data. 0: the run's activations are not known.
    """
    try:
        plan = plan_run(options, world, gpu_bytes=gpu_bytes)
    except UnplannedRunError:
        return 0
    except Exception as error:  # a fault of the plan must not stop a run
        logger.warning("The memory of the run's vision tower was not planned: %r", error)
        return 0
    return kept_patches(plan.work, plan.layout) if plan.is_of_measured_kind else 0


def step_bytes(options: SftOptions, world: int, gpu_bytes: float, longest: int) -> float | None:
    """Return the bytes of a GPU that a training step takes beyond weights, gradients and optimizer's state.

    The task may be any that computes log-probabilities of text. None: they are not known.
    gpu_bytes: memory of a GPU; longest: tokens of the longest sequence
    """
    try:
        plan = _plan_model(options, world, TEXT, gpu_bytes)
    except UnplannedRunError:
        return None
    except Exception as error:  # a fault of the plan must not stop a run
        logger.warning("The memory of the run's steps was not planned: %r", error)
        return None
    if not plan.has_measured_activations:
        return None
    length = max(longest, plan.work.length) if plan.packs else longest
    memory = replace(plan, work=replace(plan.work, length=length, document_length=longest)).memory
    return (memory.total - sum(getattr(memory, name) for name in STATES)) * MARGIN


def memory_line(
    options: SftOptions, world: int, images: Images = ASSUMED_IMAGES, gpu_bytes: float | None = None
) -> str:
    """Return the planned memory of each GPU as text. gpu_bytes: as of `plan_run`"""
    try:
        plan = plan_run(options, world, images, gpu_bytes)
    except UnplannedRunError as error:
        return f"not planned: {error}"
    parts = plan.memory._asdict()
    longest = "--max_length and --max_completion_length" if options.generates else "--max_length"
    about = "by the plan" if options.data.packing else f"by the plan, if all samples have {longest} tokens"
    if options.generates:
        about += ", in training"
    if plan.work.tower:
        about += f", with {plan.work.tower.image_share:.0%} of the tokens in images"
    if pack_length(options) is None:
        about = "by the plan, and activations, which depend on lengths (--max_length is not set)"
        parts = {name: parts[name] for name in STATES}
    text = ", ".join(f"{name} {part / GIB:.1f}" for name, part in parts.items())
    return f"{sum(parts.values()) / GIB:.1f} GiB of each GPU {about}: {text}"


def time_line(
    options: SftOptions, world: int, images: Images, document_length: int | None, gpu: Gpu, steps: int
) -> str | None:
    """Return the expected time of a step and of all steps as text; None if that is not planned, as generation.

    document_length: tokens of a document in the mean; None: not known
    """
    if not options.data.packing or options.generates or gpu.machine is None:
        return None
    try:
        plan = plan_run(options, world, images, gpu.memory)
    except UnplannedRunError:
        return None
    work = plan.work
    work = replace(work, document_length=min(document_length or work.length, work.length))
    seconds = seconds_per_step(work, plan.layout, gpu.machine)
    speed = work.global_batch * work.length / seconds / world
    about = f"{seconds:.3g} s/step, {speed:,.0f} tokens/s/GPU by the plan, on {gpu.name.removeprefix('NVIDIA ')}"
    return f"{duration(steps * seconds)} for {plural(steps, 'step')}: {about}"
