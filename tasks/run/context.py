"""Context of a run: process groups, folder, tokenizer and data, shared by every task that trains."""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ...bridge import runtime
from ...bridge.checkpoint import hub
from ...bridge.checkpoint.new_tokens import read_tokens, with_tokens
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.checkpoint.rope_scaling import scale_rope
from ...bridge.checkpoint.vision import adapts_tower, has_tower, needs_tower
from ...bridge.model.build import DTYPES
from ...bridge.option_groups import flag_value, with_flags
from ...bridge.options import ModelOptions, VisionOptions
from ...bridge.parallel import current_groups, initialize
from ...bridge.pipeline_layout import ACCOUNTED, LAYOUT, virtual_pipeline_size
from ...templates.batching.collator import Batch, BatchLayout
from ...templates.batching.episode_batches import BatchPlan
from ...templates.batching.streaming import TokenStream
from ...templates.cache import cache_root
from ...templates.dataset.store import TokenStore
from ...templates.formats.medium import MediaKind
from ...templates.json_types import JsonObject
from ...templates.media.processor import VisionProcessor
from ...templates.prepare import Prepared
from ..distributed.collectives import (
    all_gather_objects,
    broadcast_from_rank0,
    check_shared_folder,
    gloo_group,
    local_rank0_first,
    one_rank_per_cache,
    run_on_all_ranks,
)
from ..options import SftOptions
from ..plan.run_plan import Gpu, check_fits
from ..system import console
from .args_json import save_args
from .head_config import configure_head
from .planning import ProcessLayout, batches_of, length_multiple, open_vision, tokens_of
from .preflight import preflight
from .prompt_sharing import prompts_unshared_because, role_configs, share_pairs
from .resume import Resumed, open_run_dir
from .verification import broadcast_from_rank0_with_verify

CHUNKS = (
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


@dataclass
class Run:
    """State of an opened run, before anything is built."""

    options: SftOptions
    model_folder: Path
    weights_folder: Path  # folder of the weights to load: the model's, or the resumed checkpoint's
    adapter_folder: Path | None  # the initial adapter
    hf_config: JsonObject
    folder: Path  # the run folder, v{N}-{time}
    dtype: torch.dtype
    tokenizer: Any
    data: Prepared
    resumed: Resumed | None
    vision: VisionProcessor | None = None
    builds_tower: bool = False  # the vision tower is built: for images and videos
    role_configs: Sequence[JsonObject] = ()  # config.json of reference, critic and teacher, where flags name them

    @property
    def writes(self) -> bool:
        """Return whether this process writes the logs."""
        return dist.get_rank() == 0

    @property
    def layout(self) -> JsonObject:
        """Return the settings that decide each rank's shards and random numbers, for JSON."""
        chunks = {name: getattr(self.options.build, name) for name in CHUNKS}
        # Unset ones are left out, as in checkpoints of earlier versions.
        chunks |= {name: value for name in (*ACCOUNTED, LAYOUT) if (value := getattr(self.options.build, name))}
        device = {"device": runtime.device().type}
        return asdict(ProcessLayout.of(self.options.build, dist.get_world_size())) | chunks | device

    @property
    def vision_options(self) -> VisionOptions:
        """Return the options of the vision tower, which is frozen without images."""
        if self.sees_media:
            return self.options.vision
        return replace(self.options.vision, freeze_vit=True, freeze_aligner=True)

    @property
    def sees_media(self) -> bool:
        """Return whether there are images or videos: in the data, or from tools and schedulers."""
        return self.data.has_media or turn_images(self.options) > 0

    @property
    def most_images(self) -> int:
        """Return the largest number of images of a document, those of tools and schedulers included."""
        return most_media(self.data, "image") + turn_images(self.options)

    @property
    def base(self) -> str:
        """Return the base model's name in adapter files: an absolute folder, or a hub id."""
        return _absolute(self.options.mcore_model or self.options.model)

    @property
    def began_from(self) -> dict[str, str]:
        """Return the options that name the model before any training, also for a resumed run."""
        initial_model = {
            "model": _absolute(self.options.model),
            "mcore_model": _absolute(self.options.mcore_model or ""),
        }
        return self.resumed.state["began_from"] if self.resumed else initial_model


def _absolute(model: str) -> str:
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def _model_folder(options: SftOptions) -> Path:
    folder = hub.source_folder(options, options.mcore_model)
    if not options.tuner.new_special_tokens:
        return folder
    return with_tokens(folder, read_tokens(options.tuner.new_special_tokens), cache_root())


def open_run(options: SftOptions, sources: dict[str, str]) -> Run:
    """Open process groups, folder, tokenizer and tokens. Every rank calls this; errors reach every rank."""
    if options.build.deterministic_mode:
        _use_deterministic_kernels()
    initialize(options.build, seed=options.training.seed)
    if options.training.manual_gc:
        gc.disable()
    if options.build.preflight:
        lines = preflight(Path(options.checkpoint.output_dir or ".").expanduser().absolute())
        if dist.get_rank() == 0:
            print(*lines, sep="\n", flush=True)
    if options.training.plan != "off" and torch.cuda.is_available():
        broadcast_from_rank0(lambda: _check_fits(options))
    model_folder = local_rank0_first(lambda: _model_folder(options))
    adapter_folder = local_rank0_first(lambda: hub.adapter_folder(options, options.adapters))
    if options.mcore_adapter:
        adapter_folder = Path(options.mcore_adapter).expanduser()
    config = scale_rope(hub.read_config(model_folder, mcore=bool(options.mcore_model)), options)
    dtype = dtype_of(options, config)
    tokenizer = load_tokenizer(model_folder)
    vision = run_on_all_ranks(lambda: open_vision(options, model_folder, tokenizer))
    if (most := turn_images(options)) and vision is None:
        raise ValueError(f"--turn_images {most}: the model takes no images. Remove it")

    # Other ranks read the cache that the first rank has built, even with `--load_from_cache_file false`.
    cached_options = with_flags(options, load_from_cache_file=True)
    data = one_rank_per_cache(
        cache_root(),
        lambda: tokens_of(options, tokenizer, vision),
        then=lambda: tokens_of(cached_options, tokenizer, vision, verify=False),
    )
    hf_config = run_on_all_ranks(lambda: configure_head(options, config, data, tokenizer.pad_token_id))
    configs_beside = local_rank0_first(lambda: role_configs(options))
    run_on_all_ranks(lambda: share_pairs(options, data, [hf_config, *configs_beside]))
    folder, resumed = broadcast_from_rank0_with_verify(lambda faults: open_run_dir(options, faults))
    broadcast_from_rank0(lambda: _write_first_files(folder, options, sources))
    check_shared_folder(folder)
    console.open_log(folder)
    weights_folder = model_folder
    if resumed and options.tuner.has_adapters:
        adapter_folder = resumed.checkpoint
    elif resumed:
        weights_folder = resumed.checkpoint
    sees_media = data.has_media or turn_images(options) > 0
    builds_tower = run_on_all_ranks(
        lambda: _builds_tower(options, weights_folder, hf_config, adapter_folder, sees_media=sees_media)
    )
    return Run(
        options,
        model_folder,
        weights_folder,
        adapter_folder,
        hf_config,
        folder,
        dtype,
        tokenizer,
        data,
        resumed,
        vision,
        builds_tower,
        configs_beside,
    )


def _check_fits(options: SftOptions) -> None:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    world = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    check_fits(options, world, Gpu.here(device.name, device.total_memory, per_node))


def _builds_tower(
    options: SftOptions, folder: Path, hf_config: JsonObject, adapter: Path | None, *, sees_media: bool
) -> bool:
    """Return whether to build the vision tower. Raises ValueError if that is needed and excluded."""
    if not has_tower(folder, hf_config):
        if sees_media:
            raise ValueError(
                f"{folder}: the run has images, and the model has no supported vision tower, or no weights of one. "
                "Set another --model, or remove the images"
            )
        return False
    is_needed = needs_tower(folder) or (adapter is not None and adapts_tower(adapter))
    if is_needed and options.vision.language_model_only:
        raise ValueError(
            "--language_model_only true: the checkpoint or adapter has the vision tower in a form that is not carried "
            "along. Remove it"
        )
    return is_needed or sees_media


def _write_first_files(folder: Path, options: SftOptions, sources: dict[str, str]) -> None:
    console.open_log(folder)  # rank 0 starts the file
    save_args(folder / "args.json", options, sources)


def train_batches(run: Run) -> Any:
    """Return this rank's micro batches of the training data: Batches, or Prompts for a task that generates."""
    return _batches(run, run.data.train, shuffle=run.options.data.train_dataloader_shuffle)


def eval_batches(run: Run) -> Any:
    """Return this rank's micro batches of the evaluation data; None without data or evaluation."""
    if run.data.val is None or run.options.training.eval_iters == 0:
        return None
    return _batches(run, run.data.val, shuffle=False)


def _batches(run: Run, store: TokenStore | TokenStream, *, shuffle: bool) -> Any:
    groups = current_groups()
    return batches_of(
        run.options,
        store,
        ProcessLayout.of(run.options.build, dist.get_world_size()),
        data_rank=groups.dp.rank(),
        context_rank=groups.cp.rank(),
        encoder_rank=encoder_rank(groups),
        vision=run.vision,
        shuffle=shuffle,
        pad_token_id=run.tokenizer.pad_token_id or 0,
        shares_prompts=run.data.shares_prompts,
    )


def encoder_rank(groups: ProcessGroupCollection) -> int:
    """Return this rank's number in its replica, which shares the encoding of images."""
    return groups.tp.rank() + groups.tp.size() * (groups.cp.rank() + groups.cp.size() * groups.pp.rank())


def episode_plan(run: Run, groups: ProcessGroupCollection) -> BatchPlan:
    """Return the plan of this rank's micro batches of generated episodes."""
    options, layout = run.options, ProcessLayout.of(run.options.build, dist.get_world_size())
    data, micro_batch_size = options.data, options.training.micro_batch_size
    pack_length = (data.packing_length or data.max_length) if data.packing else None
    replays_experts = getattr(options, "router_replay_mode", "disabled") != "disabled"
    return BatchPlan(
        BatchLayout(
            length_multiple=length_multiple(options.build),
            context_parallel_rank=groups.cp.rank(),
            context_parallel_size=layout.context,
            pad_token_id=run.tokenizer.pad_token_id or 0,
            stage="prompts",
            vision=run.vision,
            encoder_rank=encoder_rank(groups),
            encoder_ranks=groups.tp.size() * groups.cp.size() * groups.pp.size(),
            strict=data.strict,
        ),
        1 if pack_length else micro_batch_size,
        rank=groups.dp.rank(),
        ranks=layout.data,
        pack_length=pack_length and pack_length * micro_batch_size,
        equal_lengths=layout.pipeline > 1,
        equal_over_ranks=layout.expert > 1 and options.build.exchanges_equal_rows,
        multiple=layout.pipeline if virtual_pipeline_size(options.build) else 1,
        shares_prompts=not (replays_experts or prompts_unshared_because(options, [run.hf_config, *run.role_configs])),
    )


def streamed(steps: Iterator[list[Batch]], groups: ProcessGroupCollection) -> Iterator[list[Batch]]:
    """Yield a stream's steps, with the token and sample counts summed over all data-parallel ranks.

    An unreadable row stops all ranks. Communicates over gloo, without device synchronization.
    """
    group = gloo_group()
    peers = dist.get_process_group_ranks(groups.dp)
    while True:
        batches = run_on_all_ranks(lambda: next(steps), group)
        local = batches[0].loss_tokens, batches[0].grouping.loss_samples if batches[0].grouping else 0.0
        counts = all_gather_objects(local, group)
        tokens, samples = (sum(counts[rank][i] for rank in peers) for i in range(2))
        yield [
            replace(
                batch, loss_tokens=tokens, grouping=batch.grouping and replace(batch.grouping, loss_samples=samples)
            )
            for batch in batches
        ]


def has_videos(data: Prepared) -> bool:
    """Return whether the data has videos; False for a stream."""
    return most_media(data, "video") > 0


def most_media(data: Prepared, kind: MediaKind) -> int:
    """Return the largest number of images or videos of a sample; 0 for a stream."""
    return max((store.most(kind) for store in (data.train, data.val) if isinstance(store, TokenStore)), default=0)


def turn_images(options: SftOptions) -> int:
    """Return the most images that tools and schedulers send in an episode; 0 if that is not set."""
    return flag_value(options, "turn_images", None) or 0


def dtype_of(options: ModelOptions, hf_config: JsonObject) -> torch.dtype:
    """Return the dtype of the weights: `--torch_dtype`, else the checkpoint's. Raises ValueError for an unknown one."""
    config = (hf_config.get("text_config") or {}) | hf_config
    name = options.torch_dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(
            f"config.json has dtype {name!r}, which is not supported. Set --torch_dtype to one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _use_deterministic_kernels() -> None:
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
