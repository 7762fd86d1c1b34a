"""What options cannot be together, found before anything heavy is imported. Each error names flag, value and cure."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...bridge.options import Fp8Options, ParallelOptions, RecomputeOptions
from ...tasks.observability.reporters import require_reporters
from ...tasks.options import GkdOptions, InferOptions, RolloutOptions, SftOptions
from ...tasks.options.groups import TEMPERATURES, CompletionOptions, LoggingOptions
from ...tasks.run.planning import ProcessLayout, shard_bytes
from ...tasks.run.resume import requested_checkpoint
from ...tasks.run.run_dir import check_idle, default_output_dir
from ...templates.formats.dataset_names import check_exists, split_count, text_of
from ...templates.options import PrepareOptions
from ...templates.plural import plural
from ..flags import UsageError, show
from .generation import check_key, check_vllm
from .lora import check_adapters, check_base, check_tuner, take_base
from .model import READ, SAFETENSORS, beyond_positions, check_divisible, experts_of, known_model, read_model_config
from .resume import check_resume
from .tasks import check_speaks, check_task, with_its_head
from .vllm_lora import check_room


def check_training(
    options: SftOptions, layout: ProcessLayout, gpus: int, processes: int, sources: Mapping[str, str]
) -> list[str]:
    """Raise UsageError for what cannot run; what can be put right is put right, and told in the notes returned.

    `gpus`: those that this machine shows (0: a CPU); `processes`: those that are to run on this machine; `sources`:
    where each value came from.
    """
    notes = list(_put_right(options))
    check_tuner(options, sources)
    notes += check_resume(options)
    notes += take_base(options, options)
    model = known_model(options, weights=() if requested_checkpoint(options) else READ)  # a run that goes on has others
    _data(options)
    _cache()
    _batch(options, layout)
    _schedule(options)
    _recompute(options)
    _overlap(options)
    _fp8(options, gpus)
    check_pipeline(options)
    if options.tuner_type == "lora":
        notes += check_base(options, options, model)
        notes += check_adapters(options, sources, with_its_head(options, model))
    if model is not None:
        check_divisible(options, layout, model)
    notes += check_task(options, layout, model, sources)
    check_processes(layout, gpus, processes)
    _global_batch(options, layout)
    _lengths(options)
    notes += _positions(options, model)
    _output(options)
    _reporters(options)
    _profile(options, layout)
    return notes


def check_infer(options: InferOptions) -> list[str]:
    """Raise UsageError for what cannot be; notes for the user."""
    if options.merge_lora and not options.adapters:
        raise UsageError("--merge_lora true needs --adapters: what is to be merged.")
    _check_there("--val_dataset", options.val_dataset)
    _check_system(options)
    _cache()
    notes, model = list(take_base(options, options)), None
    if options.model or not options.adapters:  # of a hub's adapter the task finds the model
        model = read_model_config(options, weights=SAFETENSORS)
        check_speaks(options, model)
        notes += check_base(options, options, model)
    least, most = TEMPERATURES
    if options.temperature and not least <= options.temperature <= most:
        raise UsageError(f"--temperature {options.temperature}: must be 0, or from {least} to {most:g}.")
    notes += beyond_positions(f"--max_new_tokens {options.max_new_tokens}", options.max_new_tokens or 0, model)
    return notes


def check_rollout(options: RolloutOptions) -> list[str]:
    """Raise UsageError for what cannot be; notes for the user."""
    model = read_model_config(options, weights=SAFETENSORS)
    check_speaks(options, model)
    check_vllm(options)
    check_room(options)
    check_key("api_key", options.api_key)
    if options.vllm_enable_return_routed_experts and model is not None and not experts_of(model):
        raise UsageError("--vllm_enable_return_routed_experts true: the model has no experts. Leave it out.")
    return []


def _put_right(options: SftOptions) -> Iterator[str]:
    if options.sequence_parallel and options.tensor_model_parallel_size == 1:
        options.sequence_parallel = False
        yield "--sequence_parallel true is switched off: --tensor_model_parallel_size is 1, nothing is to be split."
    if options.train_iters is not None and options.num_train_epochs is not None:
        epochs, steps = options.num_train_epochs, options.train_iters
        yield f"--num_train_epochs {epochs:g} is left out: --train_iters {steps} is given."
        options.num_train_epochs = None
    if options.virtual_pipeline_model_parallel_size == 1:
        options.virtual_pipeline_model_parallel_size = None  # one chunk a stage is plain pipelining
    if options.optimizer == "sgd" and options.use_distributed_optimizer:
        options.use_distributed_optimizer = False
        yield "--use_distributed_optimizer true is switched off: with --optimizer sgd there is none to share."


def _data(options: PrepareOptions) -> None:
    if not options.dataset:
        raise UsageError("--dataset is needed: files, folders or hub ids.")
    _check_there("--dataset", options.dataset)
    _check_there("--val_dataset", options.val_dataset)
    _check_system(options)
    if options.packing and options.max_length is None and options.packing_length is None:
        raise UsageError("--packing true needs the length of a pack: give --max_length.")
    if options.packing and not options.padding_free:
        raise UsageError("--packing true needs --padding_free true: a pack is documents laid end to end.")
    if options.packing_length and options.max_length and options.packing_length < options.max_length:
        raise UsageError(f"--packing_length {options.packing_length}: shorter than --max_length {options.max_length}.")


def _cache() -> None:
    """Raise UsageError if the folder of cached tokens cannot be made where the user's variable puts it."""
    name = "MODELSCOPE_CACHE" if os.environ.get("MODELSCOPE_CACHE") else "HF_HOME"
    if root := os.environ.get(name):
        try:
            (Path(root).expanduser() / "megaswift").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{name}={root}: the cache of tokens cannot be made there ({error.strerror}). Set {name} to a folder "
                "that can be written, or unset it."
            ) from None


def check_lock(options: SftOptions) -> None:
    """Raise UsageError if another run of this machine writes to the run's folder, before any process starts."""
    if options.add_version or requested_checkpoint(
        options
    ):  # then the run chooses a folder, or waits for one that is ending
        return
    folder = folder_of(options)
    try:
        check_idle(folder)
    except ValueError as error:
        raise UsageError(f"--output_dir {folder}: {error}.") from None


def _check_there(flag: str, names: Iterable[str]) -> None:
    """What a hub has, the run finds."""
    for name in names:
        try:
            check_exists(split_count(name)[0])
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None


def _check_system(options: PrepareOptions | InferOptions) -> None:
    try:
        text_of("--system", options.system)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _batch(options: SftOptions, layout: ProcessLayout) -> None:
    if options.train_iters is None and options.num_train_epochs is None:
        raise UsageError("--train_iters or --num_train_epochs is needed: how long to train.")
    if options.streaming and options.train_iters is None:
        raise UsageError("--streaming true needs --train_iters: the length of a stream is not known.")
    if options.save_strategy == "epoch" and options.streaming:
        raise UsageError("--save_strategy epoch cannot be with --streaming true. Give --save_strategy steps.")


def _schedule(options: SftOptions) -> None:
    if options.min_lr > options.lr:
        raise UsageError(f"--min_lr {options.min_lr}: above --lr {options.lr}. Make it smaller.")
    if options.lr_warmup_init > options.lr:
        raise UsageError(f"--lr_warmup_init {options.lr_warmup_init}: above --lr {options.lr}. Make it smaller.")
    if options.lr_warmup_iters and options.lr_warmup_fraction is not None:
        raise UsageError("--lr_warmup_iters and --lr_warmup_fraction: give one of them.")
    steps = options.lr_decay_iters or options.train_iters
    warmup, last_part = options.lr_warmup_iters or 0, options.lr_wsd_decay_iters or 0
    if steps and warmup >= steps:
        raise UsageError(
            f"--lr_warmup_iters {warmup}: not less than the {plural(steps, 'step')} of the schedule. Set a smaller one."
        )
    if steps and warmup + last_part > steps:
        and_warmup = f" and --lr_warmup_iters {warmup}" if warmup else ""
        raise UsageError(
            f"--lr_wsd_decay_iters {last_part}{and_warmup}: more than the {plural(steps, 'step')} of the schedule. "
            "Make it smaller."
        )


def _recompute(options: RecomputeOptions) -> None:
    if options.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(options, name) is None:
                example = "uniform" if name == "recompute_method" else "1"
                raise UsageError(f"--recompute_granularity full needs --{name}, as in --{name} {example}.")


def _overlap(options: SftOptions) -> None:
    if options.overlap_param_gather and options.overlap_grad_reduce is False:
        raise UsageError("--overlap_param_gather true needs --overlap_grad_reduce true.")
    if options.overlap_param_gather and options.optimizer == "sgd":
        raise UsageError(
            "--overlap_param_gather true cannot be with --optimizer sgd: nothing is gathered. Leave it out."
        )
    if options.overlap_param_gather and not options.use_distributed_optimizer:
        raise UsageError(
            "--overlap_param_gather true needs --use_distributed_optimizer true: else nothing is gathered."
        )


def _fp8(options: SftOptions, gpus: int) -> None:
    """What can be seen without torch; what the chip and the weights are, bridge/mapping/fp8.py sees."""
    if options.fp8_format is None:
        for name, default in ((each.name, each.default) for each in fields(Fp8Options)):
            if (value := getattr(options, name)) != default:
                raise UsageError(f"--{name} {show(value)} needs --fp8_format, as in --fp8_format hybrid.")
        return
    asked = f"--fp8_format {options.fp8_format}"
    if options.transformer_impl == "local":
        raise UsageError(f"{asked} is for Transformer Engine's layers, not --transformer_impl local. Leave one out.")
    if not gpus and not options.dry_run:
        raise UsageError(f"{asked} needs a GPU, and none is visible. Leave it out.")
    if options.torch_dtype not in (None, "bfloat16"):
        raise UsageError(f"{asked} needs weights in bf16, not --torch_dtype {options.torch_dtype}. Leave one out.")
    if options.fp8_recipe == "delayed":
        cure = "Give --fp8_recipe tensorwise or blockwise."
        if options.first_last_layers_bf16:
            raise UsageError(f"--fp8_recipe delayed cannot be with --first_last_layers_bf16 true. {cure}")
        apart = {"moe_act", "layernorm"} & set(options.recompute_modules)
        if options.recompute_granularity == "selective" and apart:
            raise UsageError(f"--fp8_recipe delayed cannot be with --recompute_modules {min(apart)}. {cure}")
    if options.fp8_param_gather and options.fp8_recipe == "mxfp8":
        raise UsageError("--fp8_param_gather true cannot be with --fp8_recipe mxfp8 in this version. Leave it out.")
    if options.fp8_param_gather and not options.use_distributed_optimizer:
        raise UsageError(
            "--fp8_param_gather true needs --use_distributed_optimizer true (and --optimizer adam): it has the masters."
        )


def check_pipeline(options: ParallelOptions) -> None:
    """Raise UsageError for flags of pipelining where there is one stage."""
    if options.pipeline_model_parallel_size > 1:
        return
    for name in (
        "virtual_pipeline_model_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ):
        if (value := getattr(options, name)) is not None and (name[0] == "d" or value > 1):
            raise UsageError(
                f"--{name} {value}: there is one pipeline stage. Give --pipeline_model_parallel_size 2 or more, "
                f"or leave --{name} out."
            )


def check_processes(layout: ProcessLayout, gpus: int, processes: int) -> None:
    """Raise UsageError where `processes` on this machine, with its `gpus`, cannot be laid out so."""
    if gpus and processes > gpus:
        raise UsageError(
            f"NPROC_PER_NODE {processes}: more processes than the {plural(gpus, 'visible GPU')}. "
            f"Set NPROC_PER_NODE={gpus}, or show more by CUDA_VISIBLE_DEVICES."
        )
    for product, names in (
        (layout.tensor * layout.pipeline * layout.context, _names("tensor", "pipeline", "context")),
        (layout.expert * layout.expert_tensor * layout.pipeline, _names("expert", "expert_tensor", "pipeline")),
    ):
        if layout.world % product:
            raise UsageError(
                f"{' x '.join(names)} = {product}: does not divide the number of processes, {layout.world}. Set "
                f"NPROC_PER_NODE (and NNODES) so that there are a multiple of {product}, or make a size smaller."
            )


def _global_batch(options: SftOptions, layout: ProcessLayout) -> None:
    share = options.micro_batch_size * layout.data
    if options.global_batch_size % share:
        raise UsageError(
            f"--global_batch_size {options.global_batch_size}: not a multiple of --micro_batch_size "
            f"{options.micro_batch_size} x {layout.data} data-parallel processes = {share}. "
            f"Give {_multiple_near(options.global_batch_size, share)}."
        )
    _schedule_of_chunks(options, options.global_batch_size // share)


def _names(*sizes: str) -> list[str]:
    return [
        f"--{size}{'' if size == 'expert_tensor' or size == 'context' else '_model'}_parallel_size" for size in sizes
    ]


def _multiple_near(value: int, unit: int) -> int:
    return max(1, round(value / unit)) * unit


def _schedule_of_chunks(options: SftOptions, micro_batches: int) -> None:
    """Under VPP, micro batches go through a chunk in groups of at least PP (megatron-core's interleaved schedule)."""
    stages = options.pipeline_model_parallel_size
    if (options.virtual_pipeline_model_parallel_size or 1) == 1:
        return
    group = options.microbatch_group_size_per_vp_stage or stages
    if not stages <= group <= micro_batches or 0 < micro_batches % group < stages:
        flag = "microbatch_group_size_per_vp_stage" if options.microbatch_group_size_per_vp_stage else None
        named = (
            f"--{flag} {group}"
            if flag
            else f"--virtual_pipeline_model_parallel_size {options.virtual_pipeline_model_parallel_size}"
        )
        raise UsageError(
            f"{named}: a step has {plural(micro_batches, 'micro batch')} on each data-parallel process, and they "
            "go through "
            f"{stages} pipeline stages in groups of {group}. Give a --global_batch_size for which they are a multiple "
            f"of {max(group, stages)}."
        )


def _lengths(options: SftOptions) -> None:
    """A sequence is cut into 2 x CP pieces (each rank takes an early and a late one), and those by TP under SP."""
    context, fp8 = options.context_parallel_size, options.fp8_token_multiple
    tensor = options.tensor_model_parallel_size if options.sequence_parallel else 1
    for name in ("max_length", "packing_length"):
        if (length := getattr(options, name)) is None:
            continue
        if context > 1 and length % (2 * context):
            raise UsageError(
                f"--{name} {length}: does not divide by 2 x --context_parallel_size {context} = {2 * context}. "
                f"Give {_multiple_near(length, 2 * context)}."
            )
        if options.packing and length % (context * tensor * fp8):
            by = [
                *[f"{fp8} with --fp8_format (--fp8_recipe {options.fp8_recipe})"] * (fp8 > 1),
                *[f"--tensor_model_parallel_size {tensor} under --sequence_parallel true"] * (tensor > 1),
                *[f"--context_parallel_size {context}"] * (context > 1),
            ]
            raise UsageError(
                f"--{name} {length}: a pack must divide by {' x '.join(by)}. "
                f"Give {_multiple_near(length, context * tensor * fp8 * (2 if context > 1 else 1))}."
            )


def _positions(options: SftOptions, model: dict[str, Any] | None) -> Iterator[str]:
    length = options.max_length or (options.packing_length if options.packing else None) or 0  # of a document
    given = f"--max_length {options.max_length}" if options.max_length else f"--packing_length {options.packing_length}"
    if isinstance(options, CompletionOptions) and (
        not isinstance(options, GkdOptions) or options.lmbda > 0 or options.seq_kd
    ):
        length = (options.max_length or 0) + options.max_completion_length
        given = f"--max_completion_length {options.max_completion_length}"
        given = f"--max_length {options.max_length} and {given}" if options.max_length else given
    yield from beyond_positions(given, length, model)


def folder_of(options: SftOptions) -> Path:
    """Where a run's folders are to be made."""
    given = options.output_dir or default_output_dir(options.mcore_model or options.model)
    return Path(given).expanduser().absolute()


def _output(options: SftOptions) -> None:
    """Writing is tried by `check_writable`; this finds what can be seen without writing."""
    if options.output_dir is not None and not options.output_dir.strip():
        raise UsageError("--output_dir '': no folder. Set one, or remove the flag.")
    try:
        shard_bytes(options.max_shard_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    folder = folder_of(options)
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise UsageError(f"--output_dir {options.output_dir}: {error.strerror}. Set another folder.") from None
    if not existing.is_dir():
        problem = f"{existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} cannot be written"
    else:
        return
    raise UsageError(f"--output_dir {folder}: {problem}. Give a folder that you may write.")


def check_writable(options: SftOptions) -> None:
    """Raise UsageError where the output folder cannot be written. Makes a temporary folder there, and removes it."""
    folder = folder_of(options)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        raise UsageError(
            f"--output_dir {folder}: {existing} cannot be written ({error.strerror}). Set a folder that you may write."
        ) from None


def _reporters(options: LoggingOptions) -> None:
    try:
        require_reporters(options)
    except ImportError as error:
        raise UsageError(str(error)) from None


def _profile(options: SftOptions, layout: ProcessLayout) -> None:
    if not options.profile:
        return
    start, end = options.profile_step_start, options.profile_step_end
    if not 1 <= start <= end:
        raise UsageError(f"--profile_step_start {start}, --profile_step_end {end}: give 1 or more, and then no less.")
    if options.train_iters and start > options.train_iters:
        raise UsageError(
            f"--profile_step_start {start}: the run has {plural(options.train_iters, 'step')}. Set an earlier one."
        )
    for rank in options.profile_ranks:
        if not 0 <= rank < layout.world:
            raise UsageError(
                f"--profile_ranks {rank}: the run has {plural(layout.world, 'process')}, and the first is 0."
            )
