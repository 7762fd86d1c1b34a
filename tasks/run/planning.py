"""Plan of a run before anything is loaded: process layout, data, number of steps."""

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...bridge.option_groups import flag_value, flag_values, group_of, with_flags
from ...bridge.options import BuildOptions, LayoutOptions, ParallelOptions, PredictionLayers
from ...bridge.pipeline_layout import LAYOUT, UNEVEN, merged_layout
from ...templates.plural import plural
from ..options import ExportOptions, SftOptions
from ..options.groups import CompletionOptions, SamplingOptions, TrainingOptions

if TYPE_CHECKING:
    from ...templates.batching.dataloader import Batches
    from ...templates.batching.prompt_dataloader import Prompts
    from ...templates.batching.streaming import TokenStream
    from ...templates.dataset.store import TokenStore
    from ...templates.media.processor import VisionProcessor
    from ...templates.prepare import Prepared

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class ProcessLayout:
    """Number of processes, and how they share the model and the data."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, options: ParallelOptions, world: int) -> "ProcessLayout":
        return cls(
            world=world,
            tensor=options.tensor_model_parallel_size,
            pipeline=options.pipeline_model_parallel_size,
            context=options.context_parallel_size,
            expert=options.expert_model_parallel_size,
            expert_tensor=options.expert_tensor_parallel_size,
        )

    @property
    def data(self) -> int:
        """Data-parallel size of the dense weights; 0 if there are too few processes."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts' weights."""
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    def __str__(self) -> str:
        split = f"TP {self.tensor} x PP {self.pipeline} x CP {self.context} x DP {self.data}"
        text = f"{plural(self.world, 'process')} = {split}"
        if self.expert == self.expert_tensor == 1:
            return text
        experts = f"EP {self.expert} x ETP {self.expert_tensor} x PP {self.pipeline} x DP {self.expert_data}"
        return f"{text}; experts: {experts}"


RoleName = Literal["ref", "critic", "teacher"]  # prefix of a role's flags
SIZES = "tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"  # <size>_parallel_size


def role_layout[T: SftOptions](options: T, role: RoleName) -> T | None:
    """Return the options with a role's layout; None if it is the run's.

    Its stages have one chunk of layers each, as many as the policy's where a reference has as many stages. Otherwise
    they are split evenly.
    """
    sizes: dict[str, int] = {}
    for size in SIZES:
        value = flag_value(options, f"{role}_{size}_parallel_size", None)
        sizes[f"{size}_parallel_size"] = getattr(options.build, f"{size}_parallel_size") if value is None else value
    if all(value == getattr(options.build, name) for name, value in sizes.items()):
        return None
    one_chunk = dict.fromkeys(("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"))
    if role == "ref" and sizes["pipeline_model_parallel_size"] == options.build.pipeline_model_parallel_size:
        division = {LAYOUT: merged_layout(options.build)}
    else:  # its model may have another number of layers, its layout another number of stages
        division = dict.fromkeys((*UNEVEN, LAYOUT))
    has_tensor_parallelism = sizes["tensor_model_parallel_size"] > 1
    return with_flags(options, **sizes, **one_chunk, **division, sequence_parallel=has_tensor_parallelism)


def build_options(options: ExportOptions) -> BuildOptions:
    """Return the build options of an export: the flags of `megatron export`, or one process."""
    names = [field.name for options_class in (LayoutOptions, PredictionLayers) for field in fields(options_class)]
    return BuildOptions(**{name: value for name, value in flag_values(options).items() if name in names})


def is_upload_only(options: ExportOptions) -> bool:
    """Return whether an export only uploads a folder."""
    return options.push_to_hub and not (options.to_hf or options.to_mcore or options.merge_lora)


def uploaded_folder(options: ExportOptions) -> str:
    """Return the folder that is uploaded as it is; "" if none is set."""
    return next(iter(options.adapters), options.mcore_adapter or options.mcore_model or options.model)


def export_folder(options: ExportOptions) -> Path:
    """Return the output folder of an export: `--output_dir`, else a folder beside the source.

    The source is the adapter if there is one. For a hub id the folder is in the working directory.
    """
    if options.output_dir:
        # Resolved, so that a symbolic link is kept and points to the result.
        return Path(options.output_dir).expanduser().resolve()
    adapter = next(iter(options.adapters), options.mcore_adapter)
    source, ending = adapter or options.mcore_model or options.model, "mcore" if options.to_mcore else "hf"
    if adapter and options.merge_lora:
        ending = "merged-mcore" if options.to_mcore else "merged"
    if options.quant_method:
        ending = f"{ending}-{options.quant_method}".removeprefix("hf-")
    folder = Path(source).expanduser().absolute()
    return (
        folder.with_name(f"{folder.name}-{ending}")
        if folder.exists()
        else Path(f"{Path(source).name}-{ending}").absolute()
    )


@dataclass(frozen=True)
class DataPlan:
    steps_per_epoch: int | None  # None: a stream of unknown length
    steps: int
    prepared: "Prepared"
    tokenizer: Any


def plan_data(options: SftOptions, layout: ProcessLayout) -> DataPlan:
    """Tokenize the dataset or read its cache, and count the steps of an epoch. Needs no process group."""
    from ...bridge.checkpoint.hub import read_config, source_folder
    from ...bridge.checkpoint.new_tokens import extend_tokenizer, read_tokens
    from ...bridge.checkpoint.pretrained import load_tokenizer
    from ...bridge.checkpoint.rope_scaling import scale_rope
    from .prompt_sharing import role_configs, share_pairs

    folder = source_folder(options, options.mcore_model, weights=False)
    tokenizer = load_tokenizer(folder)
    if tokens := options.tuner.new_special_tokens:
        extend_tokenizer(tokenizer, read_tokens(tokens))
    vision = open_vision(options, folder, tokenizer)
    prepared = tokens_of(options, tokenizer, vision)
    if options.stage == "preference":
        config = scale_rope(read_config(folder, mcore=bool(options.mcore_model)), options)
        share_pairs(options, prepared, [config, *role_configs(options)])
    batches = batches_of(options, prepared.train, layout, vision=vision, shares_prompts=prepared.shares_prompts)
    steps_per_epoch = None if batches.samples is None else -(-batches.samples // options.training.global_batch_size)
    return DataPlan(steps_per_epoch, steps_of(options.training, batches.samples), prepared, tokenizer)


def open_vision(options: SftOptions, folder: Path, tokenizer: Any) -> "VisionProcessor | None":
    """Return the processor of images and videos of the model in `folder`; None if it takes none."""
    from ...templates.media.processor import VisionProcessor

    return None if options.vision.language_model_only else VisionProcessor.open(folder, tokenizer, options.data)


def tokens_of(
    options: SftOptions, tokenizer: Any, vision: "VisionProcessor | None" = None, *, verify: bool = True
) -> "Prepared":
    """Return the tokens of the datasets for the task, from the cache or newly made."""
    from ...templates.prepare import prepare
    from ..multi_turn.load import prompt_tools

    return prepare(
        options.data,
        tokenizer,
        stage=options.stage,
        use_hf=options.use_hf,
        hub_token=options.hub_token,
        tools=prompt_tools(options),
        verify=verify,
        vision=vision,
    )


def batches_of(
    options: SftOptions,
    store: "TokenStore | TokenStream",
    layout: ProcessLayout,
    *,
    data_rank: int = 0,
    context_rank: int = 0,
    encoder_rank: int = 0,
    vision: "VisionProcessor | None" = None,
    shuffle: bool = True,
    pad_token_id: int = 0,
    shares_prompts: bool = False,
) -> "Batches | Prompts":
    """Return the micro batches of one rank of a layout, or the prompts for a task that generates.

    encoder_rank: rank within the replica, which shares the encoding of images.
    shares_prompts: as of Prepared
    """
    from ...templates.batching.collator import BatchLayout, StepDivision
    from ...templates.batching.dataloader import Batches
    from ...templates.batching.prompt_dataloader import Prompts

    data = options.data
    if sampling := group_of(options, CompletionOptions):
        per_prompt = sampling.num_generations * sampling.num_iterations if isinstance(sampling, SamplingOptions) else 1
        return Prompts(store, completions_per_prompt=per_prompt, shuffle=shuffle, seed=data.data_seed)  # type: ignore[arg-type]

    training = options.training
    return Batches(
        store,
        BatchLayout(
            padding_free=data.padding_free,
            pack_length=(data.packing_length or data.max_length) if data.packing else None,
            length_multiple=length_multiple(options.build),
            context_parallel_rank=context_rank,
            context_parallel_size=layout.context,
            pad_token_id=pad_token_id,
            stage=store.stage,
            shares_prompts=shares_prompts,
            vision=vision,
            encoder_rank=encoder_rank,
            encoder_ranks=layout.tensor * layout.context * layout.pipeline,
            strict=data.strict,
        ),
        StepDivision(
            training.micro_batch_size,
            training.global_batch_size,
            rank=data_rank,
            ranks=layout.data,
            equal_lengths=layout.pipeline > 1,
            equal_over_ranks=layout.expert > 1 and options.build.exchanges_equal_rows,
        ),
        shuffle=shuffle,
        seed=data.data_seed,
        # A stream's number of workers decides which rows each worker reads, so it must be equal on all ranks.
        num_workers=data.dataloader_num_workers
        if data.streaming
        else min(data.dataloader_num_workers, cores_of_a_rank()),
        by_length=data.group_by_length,
    )


def length_multiple(options: BuildOptions) -> int:
    """Return the divisor of a micro batch's tokens per context-parallel rank, required by SP and FP8."""
    split = options.tensor_model_parallel_size if options.sequence_parallel else 1
    return split * options.fp8_token_multiple


def cores_of_a_rank() -> int:
    """Return the number of CPU cores per rank on this machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def steps_of(options: TrainingOptions, samples: int | None) -> int:
    """Return the number of optimizer steps. The last one is filled from a further pass over the samples."""
    if options.train_iters is not None:
        return options.train_iters
    if samples is None or options.num_train_epochs is None:
        raise ValueError("--num_train_epochs: a stream has no known length. Set --train_iters instead")
    return max(1, math.ceil(options.num_train_epochs * samples / options.global_batch_size - 1e-9))


def shard_bytes(size: str) -> int:
    """Return '5GB' or '500MB' in bytes. Raises ValueError for other formats."""
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)I?B?\s*", size.upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"--max_shard_size {size}: not a size. Set one such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])
