"""Checks of options against each other and the machine. Each error names the flag, its value and a fix."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from ...bridge.option_groups import flag_paths, flag_value, group_of
from ...bridge.options import Fp8Options, RecomputeOptions
from ...bridge.pipeline_layout import virtual_pipeline_size
from ...tasks.observability.reporters import require_reporters
from ...tasks.options import InferOptions, RecipeOptions, ReportOptions, RolloutOptions, SftOptions
from ...tasks.options.groups import TEMPERATURES, CompletionOptions, LoggingOptions
from ...tasks.options.report import MAX_RUNS
from ...tasks.run.planning import ProcessLayout, shard_bytes
from ...tasks.run.resume import requested_checkpoint
from ...tasks.run.run_dir import check_idle, default_output_dir
from ...templates.plural import plural
from ..flags import UsageError, show, usage_errors
from .adjust import adjust_options
from .agreement import drop_second_model
from .data import check_data, check_media, check_paths, check_system
from .extra_kwargs import check_core_settings, check_engine_settings, check_quantization
from .generation import as_flag, check_key
from .indexer import check_indexer
from .lora import check_adapters, check_base, check_tuner, set_base_model
from .memory import check_memory
from .model import (
    WEIGHT_FILES,
    HfConfig,
    check_divisible,
    count_experts,
    engine_config,
    position_notes,
    rope_notes,
    supported_config,
)
from .muon import check_muon
from .new_tokens import check_new_tokens
from .pipeline import check_pipeline
from .resume import check_resume
from .tasks import check_generates, check_task, config_with_head
from .upload import check_upload
from .vision import check_vision
from .vllm_lora import check_max_lora_rank


def check_training(
    options: SftOptions, layout: ProcessLayout, gpus: int, processes: int, sources: Mapping[str, str]
) -> list[str]:
    """Raise UsageError for unusable options. Adjust redundant ones, and return notes for the user.

    gpus: number of GPUs visible on this machine (0: a CPU)
    processes: number of processes to run on this machine
    sources: source of each option's value
    """
    notes = [*drop_second_model(options), *adjust_options(options)]
    check_tuner(options, sources)
    notes += check_resume(options)
    notes += set_base_model(options, options)
    model = supported_config(
        options, weights=() if requested_checkpoint(options) else WEIGHT_FILES
    )  # a resumed run reads the checkpoint's weights
    check_data(options.data)
    notes += check_media(options.data, model)
    notes += check_vision(options, model, sources)
    _check_cache()
    _check_duration(options, layout)
    _check_schedule(options)
    _check_recompute(options.build)
    check_muon(options, model, sources)
    check_memory(options, sources)
    _check_overlap(options)
    _check_fp8(options, gpus)
    check_pipeline(options.build)
    check_core_settings(options, model)
    check_indexer(options, model)
    if options.tuner.has_adapters:
        notes += check_base(options, options, model)
        notes += check_adapters(options, sources, config_with_head(options, model))
    saves_config = not options.tuner.has_adapters or bool(options.merge_lora)
    notes += rope_notes(options, model, saves_config=saves_config)
    if model is not None:
        check_divisible(options.build, layout, model)
    notes += check_task(options, layout, model, sources)
    check_new_tokens(options, model)
    check_processes(layout, gpus, processes)
    _check_global_batch(options, layout)
    _check_lengths(options)
    notes += _position_notes(options, model)
    _check_output_dir(options)
    notes += check_upload(options)
    _check_reporters(options.logging)
    _check_profile(options, layout)
    return notes


def check_infer(options: InferOptions) -> list[str]:
    """Raise UsageError for unusable options of `swift infer`. Return notes for the user."""
    if options.merge_lora and not options.adapters:
        raise UsageError("--merge_lora true needs an adapter to merge. Set --adapters.")
    _check_engine_flags(options)
    check_engine_settings(options)
    check_paths("--val_dataset", options.val_dataset)
    check_system(options)
    _check_cache()
    if not options.val_dataset and not options.load_data_args:
        for name in ("metric", "write_batch_size", "result_path"):
            if getattr(options, name) is not None:
                raise UsageError(f"{as_flag(name, options)}: needs a dataset to answer. Set --val_dataset.")
    notes, model = list(set_base_model(options, options)), None
    if options.infer_backend == "vllm" and options.attention_backend != "auto":
        notes.append(f"--attention_backend {options.attention_backend} has no effect: vLLM chooses its kernel.")
    if options.model or not options.adapters:  # the task reads a hub adapter's base model
        model = engine_config(options)
        check_generates(options, model)
        notes += check_base(options, options, model)
    notes += check_media(options, model)
    low, high = TEMPERATURES
    if options.temperature and not low <= options.temperature <= high:
        raise UsageError(f"--temperature {options.temperature}: must be 0, or at least {low} and at most {high:g}.")
    notes += position_notes(f"--max_new_tokens {options.max_new_tokens}", options.max_new_tokens or 0, model)
    return notes


def _check_engine_flags(options: InferOptions) -> None:
    """Raise UsageError for flags of vLLM that are set for another engine."""
    if options.infer_backend == "vllm":
        return
    default = InferOptions()
    for name in flag_paths(InferOptions):
        if name.startswith("vllm_") and flag_value(options, name) != flag_value(default, name):
            raise UsageError(f"{as_flag(name, options)}: only for vLLM. Set --infer_backend vllm, or remove it.")


def check_rollout(options: RolloutOptions) -> list[str]:
    """Raise UsageError for unusable options of `swift rollout`. Return notes for the user."""
    model = engine_config(options)
    check_generates(options, model)
    check_max_lora_rank(options)
    check_engine_settings(options)
    check_quantization(options, model)
    check_key("api_key", options.api_key)
    if options.vllm_enable_return_routed_experts and model is not None and not count_experts(model):
        raise UsageError("--vllm_enable_return_routed_experts true: the model has no experts. Remove it.")
    return []


def check_recipe(options: RecipeOptions) -> list[str]:
    """Raise UsageError for unusable options of `swift prepare`. Return notes for the user."""
    for name, value in (("recipe", options.recipe), ("local_dir", options.local_dir)):
        if not value:
            raise UsageError(f"--{name}: missing. Set it, as in swift prepare gsm8k --local_dir data/gsm8k.")
    folder = Path(options.local_dir or "").expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--local_dir {folder}: it is a file. Set a folder.")
    if (path := options.local_dataset_path) and not Path(path).expanduser().exists():
        raise UsageError(f"--local_dataset_path {path}: no such file or folder. Fix the path.")
    return []


def check_report(options: ReportOptions) -> list[str]:
    """Raise UsageError for unusable options of `megatron report`. Return notes for the user."""
    if not options.runs:
        raise UsageError("--runs: missing. Set the folder of a run, as in megatron report megatron_output/model/v0-...")
    if len(options.runs) > MAX_RUNS:
        raise UsageError(f"--runs: {len(options.runs)} runs, of which a page compares {MAX_RUNS}. Set fewer.")
    if (path := options.report_path) and not Path(path).expanduser().absolute().parent.is_dir():
        raise UsageError(f"--report_path {path}: its folder does not exist. Make it, or set another path.")
    return []


def _check_cache() -> None:
    """Raise UsageError if the token cache cannot be made in the folder of MODELSCOPE_CACHE or HF_HOME."""
    name = "MODELSCOPE_CACHE" if os.environ.get("MODELSCOPE_CACHE") else "HF_HOME"
    if root := os.environ.get(name):
        try:
            (Path(root).expanduser() / "megaswift").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{name}={root}: the token cache cannot be made there ({error.strerror}). Set {name} to a folder that "
                "can be written, or unset it."
            ) from None


def check_lock(options: SftOptions) -> None:
    """Raise UsageError if another run on this machine writes to the run's folder."""
    if options.checkpoint.add_version or requested_checkpoint(
        options
    ):  # the run makes a new folder, or waits for the run that is ending in it
        return
    folder = output_folder(options)
    try:
        check_idle(folder)
    except ValueError as error:
        raise UsageError(f"--output_dir {folder}: {error}.") from None


def _check_duration(options: SftOptions, layout: ProcessLayout) -> None:
    if options.training.train_iters is None and options.training.num_train_epochs is None:
        raise UsageError("--train_iters, --num_train_epochs: missing. Set one of them.")
    if options.data.streaming and options.training.train_iters is None:
        raise UsageError("--streaming true: the length of a stream is unknown. Set --train_iters.")
    if options.checkpoint.save_strategy == "epoch" and options.data.streaming:
        raise UsageError("--save_strategy epoch cannot be used with --streaming true. Set --save_strategy steps.")


def _check_schedule(options: SftOptions) -> None:
    schedule = options.schedule
    if schedule.min_lr > schedule.lr:
        raise UsageError(f"--min_lr {schedule.min_lr}: above --lr {schedule.lr}. Set a lower one.")
    if schedule.lr_warmup_init > schedule.lr:
        raise UsageError(f"--lr_warmup_init {schedule.lr_warmup_init}: above --lr {schedule.lr}. Set a lower one.")
    if schedule.lr_warmup_iters and schedule.lr_warmup_fraction is not None:
        raise UsageError("--lr_warmup_iters cannot be used with --lr_warmup_fraction. Remove one of them.")
    steps = schedule.lr_decay_iters or options.training.train_iters
    warmup, final_decay = schedule.lr_warmup_iters or 0, schedule.lr_wsd_decay_iters or 0
    if steps and warmup >= steps:
        raise UsageError(
            f"--lr_warmup_iters {warmup}: not below the {plural(steps, 'step')} of the schedule. Set a lower one."
        )
    if steps and warmup + final_decay > steps:
        and_warmup = f" and --lr_warmup_iters {warmup}" if warmup else ""
        raise UsageError(
            f"--lr_wsd_decay_iters {final_decay}{and_warmup}: more than the {plural(steps, 'step')} of the schedule. "
            "Set a lower one."
        )


def _check_recompute(options: RecomputeOptions) -> None:
    if options.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(options, name) is None:
                example = "uniform" if name == "recompute_method" else "1"
                raise UsageError(f"--recompute_granularity full needs --{name}. Set it, as in --{name} {example}.")


def _check_overlap(options: SftOptions) -> None:
    build = options.build
    if build.overlap_param_gather and build.overlap_grad_reduce is False:
        raise UsageError(
            "--overlap_param_gather true cannot be used with --overlap_grad_reduce false. Remove one of them."
        )
    if build.overlap_param_gather and options.optimizer.optimizer == "sgd":
        raise UsageError(
            "--overlap_param_gather true cannot be used with --optimizer sgd, which gathers nothing. Remove it."
        )
    if build.overlap_param_gather and not build.use_distributed_optimizer:
        raise UsageError("--overlap_param_gather true needs --use_distributed_optimizer true. Set both, or none.")


def _check_fp8(options: SftOptions, gpus: int) -> None:
    """Raise UsageError for unusable options of FP8. bridge/mapping/fp8.py checks the GPU and the weights."""
    build = options.build
    if build.fp8_format is None:
        for field in fields(Fp8Options):
            if (value := getattr(build, field.name)) != field.default:
                raise UsageError(f"--{field.name} {show(value)} needs --fp8_format. Set it, as in --fp8_format hybrid.")
        return
    flag = f"--fp8_format {build.fp8_format}"
    if build.transformer_impl == "local":
        raise UsageError(
            f"{flag} cannot be used with --transformer_impl local: it needs Transformer Engine's layers. Remove one of "
            "them."
        )
    if not gpus and not options.training.dry_run:
        raise UsageError(f"{flag} needs a GPU, and none is visible. Remove it.")
    if options.torch_dtype not in (None, "bfloat16"):
        raise UsageError(
            f"{flag} cannot be used with --torch_dtype {options.torch_dtype}: it needs bfloat16. Remove one of them."
        )
    if build.fp8_recipe == "delayed":
        fix = "Set --fp8_recipe tensorwise or blockwise."
        if build.first_last_layers_bf16:
            raise UsageError(f"--fp8_recipe delayed cannot be used with --first_last_layers_bf16 true. {fix}")
        modules = {"moe_act", "layernorm"} & set(build.recompute_modules)
        if build.recompute_granularity == "selective" and modules:
            raise UsageError(f"--fp8_recipe delayed cannot be used with --recompute_modules {min(modules)}. {fix}")
    if build.fp8_param_gather and build.fp8_recipe == "mxfp8":
        raise UsageError(
            "--fp8_param_gather true cannot be used with --fp8_recipe mxfp8 in this version. Remove one of them."
        )
    if build.fp8_param_gather and not build.use_distributed_optimizer:
        raise UsageError(
            "--fp8_param_gather true needs the main parameters of --use_distributed_optimizer true (and --optimizer "
            "adam). Set both."
        )


def check_processes(layout: ProcessLayout, gpus: int, processes: int) -> None:
    """Raise UsageError if the number of processes does not fit the GPUs or the layout."""
    if gpus and processes > gpus:
        raise UsageError(
            f"NPROC_PER_NODE {processes}: more processes than the {plural(gpus, 'visible GPU')}. "
            f"Set NPROC_PER_NODE={gpus}, or show more with CUDA_VISIBLE_DEVICES."
        )
    for product, flags in (
        (layout.tensor * layout.pipeline * layout.context, _size_flags("tensor", "pipeline", "context")),
        (layout.expert * layout.expert_tensor * layout.pipeline, _size_flags("expert", "expert_tensor", "pipeline")),
    ):
        if layout.world % product:
            raise UsageError(
                f"{' x '.join(flags)} = {product}: does not divide the number of processes, {layout.world}. Set "
                f"NPROC_PER_NODE (and NNODES) to a multiple of {product}, or set a smaller size."
            )


def _check_global_batch(options: SftOptions, layout: ProcessLayout) -> None:
    training = options.training
    samples_per_pass = training.micro_batch_size * layout.data
    if training.global_batch_size % samples_per_pass:
        raise UsageError(
            f"--global_batch_size {training.global_batch_size}: not a multiple of --micro_batch_size "
            f"{training.micro_batch_size} x {layout.data} data-parallel processes = {samples_per_pass}. "
            f"Set {_nearest_multiple(training.global_batch_size, samples_per_pass)}."
        )
    _check_interleaving(options, training.global_batch_size // samples_per_pass)


def _size_flags(*sizes: str) -> list[str]:
    return [
        f"--{size}{'' if size == 'expert_tensor' or size == 'context' else '_model'}_parallel_size" for size in sizes
    ]


def _nearest_multiple(value: int, unit: int) -> int:
    return max(1, round(value / unit)) * unit


def _check_interleaving(options: SftOptions, micro_batches: int) -> None:
    """Raise UsageError if the micro batches do not fit megatron-core's interleaved schedule."""
    build = options.build
    stages, virtual = build.pipeline_model_parallel_size, virtual_pipeline_size(build)
    if virtual is None:
        return
    group = build.microbatch_group_size_per_vp_stage or stages
    if not stages <= group <= micro_batches or 0 < micro_batches % group < stages:
        flag = f"--virtual_pipeline_model_parallel_size {virtual}"
        if build.pipeline_model_parallel_layout:
            flag = f"--pipeline_model_parallel_layout {build.pipeline_model_parallel_layout}"
        if build.microbatch_group_size_per_vp_stage:
            flag = f"--microbatch_group_size_per_vp_stage {group}"
        raise UsageError(
            f"{flag}: {plural(micro_batches, 'micro batch')} per data-parallel process and step cannot pass {stages} "
            f"pipeline stages in groups of {group}. Set a --global_batch_size that makes a multiple of "
            f"{max(group, stages)}."
        )


def _check_lengths(options: SftOptions) -> None:
    """Raise UsageError if a sequence cannot be split into 2 x CP chunks, and by TP under sequence parallelism."""
    build = options.build
    context, fp8 = build.context_parallel_size, build.fp8_token_multiple
    tensor = build.tensor_model_parallel_size if build.sequence_parallel else 1
    for name in ("max_length", "packing_length"):
        if (length := flag_value(options, name)) is None:
            continue
        if context > 1 and length % (2 * context):
            raise UsageError(
                f"--{name} {length}: not a multiple of 2 x --context_parallel_size {context} = {2 * context}. "
                f"Set {_nearest_multiple(length, 2 * context)}."
            )
        if options.data.packing and length % (context * tensor * fp8):
            divisors = [
                *[f"{fp8} with --fp8_format (--fp8_recipe {build.fp8_recipe})"] * (fp8 > 1),
                *[f"--tensor_model_parallel_size {tensor} under --sequence_parallel true"] * (tensor > 1),
                *[f"--context_parallel_size {context}"] * (context > 1),
            ]
            raise UsageError(
                f"--{name} {length}: not a multiple of {' x '.join(divisors)}. "
                f"Set {_nearest_multiple(length, context * tensor * fp8 * (2 if context > 1 else 1))}."
            )


def _position_notes(options: SftOptions, model: HfConfig | None) -> Iterator[str]:
    data = options.data
    length = data.max_length or (data.packing_length if data.packing else None) or 0
    flags = f"--max_length {data.max_length}" if data.max_length else f"--packing_length {data.packing_length}"
    sampling = group_of(options, CompletionOptions)
    if sampling and options.generates:
        length = (data.max_length or 0) + sampling.max_completion_length
        flags = f"--max_completion_length {sampling.max_completion_length}"
        flags = f"--max_length {data.max_length} and {flags}" if data.max_length else flags
    yield from position_notes(flags, length, model)


def output_folder(options: SftOptions) -> Path:
    """Return the parent of the run's folder."""
    name = options.checkpoint.output_dir or default_output_dir(options.mcore_model or options.model)
    return Path(name).expanduser().absolute()


def _check_output_dir(options: SftOptions) -> None:
    """Raise UsageError for an output folder that cannot be made. Writes nothing."""
    if options.checkpoint.output_dir is not None and not options.checkpoint.output_dir.strip():
        raise UsageError("--output_dir '': is empty. Set a folder, or remove it.")
    with usage_errors():
        shard_bytes(options.checkpoint.max_shard_size)
    folder = output_folder(options)
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise UsageError(
            f"--output_dir {options.checkpoint.output_dir}: {error.strerror}. Set another folder."
        ) from None
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} cannot be written"
    else:
        return
    raise UsageError(f"--output_dir {folder}: {problem}. Set a writable folder.")


def check_writable(options: SftOptions) -> None:
    """Raise UsageError if a temporary folder cannot be made in the output folder."""
    folder = output_folder(options)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise UsageError(
            f"--output_dir {folder}: {existing} cannot be written ({error.strerror}). Set a writable folder."
        ) from None


def _check_reporters(options: LoggingOptions) -> None:
    with usage_errors():
        require_reporters(options)


def _check_profile(options: SftOptions, layout: ProcessLayout) -> None:
    if not options.profile.profile:
        return
    start, end = options.profile.profile_step_start, options.profile.profile_step_end
    if not 1 <= start <= end:
        raise UsageError(
            f"--profile_step_start {start}, --profile_step_end {end}: no such range. Set 1 <= start <= end."
        )
    steps = options.training.train_iters
    if steps and start > steps:
        raise UsageError(f"--profile_step_start {start}: the run has {plural(steps, 'step')}. Set an earlier one.")
    for rank in options.profile.profile_ranks:
        if not 0 <= rank < layout.world:
            raise UsageError(
                f"--profile_ranks {rank}: the run has {plural(layout.world, 'process')}. Set 0 to {layout.world - 1}."
            )
