"""Opening a run: its place among the processes, its folder, tokenizer and data. Shared by every task that trains."""

import gc
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...bridge import runtime
from ...bridge.checkpoint import hub
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.model.build import DTYPES
from ...bridge.options import ModelOptions
from ...bridge.parallel import initialize
from ...templates.batching.collator import Batch, BatchLayout
from ...templates.batching.episode_batches import BatchPlan
from ...templates.batching.streaming import TokenStream
from ...templates.dataset.store import TokenStore, cache_root
from ...templates.prepare import Prepared
from ..distributed.collectives import (
    check_shared,
    first_of_each_cache,
    first_of_each_node,
    on_every_rank,
    on_first_rank,
    patient_group,
)
from ..options import SftOptions
from ..system import console
from .args_json import save_args
from .head_config import headed
from .planning import Layout, batches_of, length_multiple, tokens_of
from .preflight import preflight
from .resume import Resumed, open_folder
from .verification import on_first_rank_with_faults

CHUNKS = (
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


@dataclass
class Run:
    """What is known once a run is open, before anything is built."""

    options: SftOptions
    model_folder: Path
    weights_folder: Path  # what the weights are read from: the model's, or the checkpoint's that the run goes on from
    adapter_folder: Path | None  # of the adapter to start from
    hf_config: dict[str, Any]
    folder: Path  # of the run: v{N}-{time}
    dtype: torch.dtype
    tokenizer: Any
    data: Prepared
    resumed: Resumed | None

    @property
    def writes(self) -> bool:
        """Whether this process writes the logs."""
        return dist.get_rank() == 0

    @property
    def layout(self) -> dict[str, Any]:
        """What decides which rank holds what, and what its random numbers are; for JSON."""
        chunks = {name: getattr(self.options, name) for name in CHUNKS}
        device = {"device": runtime.device().type}
        return asdict(Layout.of(self.options, dist.get_world_size())) | chunks | device

    @property
    def base(self) -> str:
        """What an adapter's files call the model: a folder, as it is found from anywhere, or a hub's id."""
        return _from_anywhere(self.options.mcore_model or self.options.model)

    @property
    def began_from(self) -> dict[str, str]:
        """The options that name the model before any training, also of a run that goes on from a checkpoint of its own
        (`--finetune false --model checkpoint-100`)."""
        own = {name: _from_anywhere(getattr(self.options, name) or "") for name in ("model", "mcore_model")}
        return self.resumed.state["began_from"] if self.resumed else own


def _from_anywhere(model: str) -> str:
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def open_run(options: SftOptions, sources: dict[str, str]) -> Run:
    """Process groups, folder, tokenizer and tokens. Every rank calls this; errors reach every rank."""
    if options.deterministic_mode:
        _only_deterministic_kernels()
    initialize(options, seed=options.seed)
    if options.manual_gc:
        gc.disable()
    if options.preflight:
        lines = preflight(Path(options.output_dir or ".").expanduser().absolute())
        if dist.get_rank() == 0:
            print(*lines, sep="\n", flush=True)
    model_folder = first_of_each_node(lambda: hub.source_folder(options, options.mcore_model))
    adapter_folder = first_of_each_node(lambda: hub.adapter_folder(options, options.adapters))
    if options.mcore_adapter:
        adapter_folder = Path(options.mcore_adapter).expanduser()
    config = hub.read_config(model_folder, mcore=bool(options.mcore_model))
    dtype = dtype_of(options, config)
    tokenizer = load_tokenizer(model_folder)

    # The others find what the first has built, also where `--load_from_cache_file false` asked for it.
    found = replace(options, load_from_cache_file=True)
    data = first_of_each_cache(
        cache_root(), lambda: tokens_of(options, tokenizer), then=lambda: tokens_of(found, tokenizer, verify=False)
    )
    hf_config = on_every_rank(lambda: headed(options, config, data, tokenizer.pad_token_id))
    folder, resumed = on_first_rank_with_faults(lambda faults: open_folder(options, faults))
    on_first_rank(lambda: _first_files(folder, options, sources))
    check_shared(folder)
    console.open_log(folder)
    weights_folder = model_folder
    if resumed and options.tuner_type == "lora":
        adapter_folder = resumed.checkpoint
    elif resumed:
        weights_folder = resumed.checkpoint
    return Run(
        options, model_folder, weights_folder, adapter_folder, hf_config, folder, dtype, tokenizer, data, resumed
    )


def _first_files(folder: Path, options: SftOptions, sources: dict[str, str]) -> None:
    console.open_log(folder)  # that of the first rank begins it
    save_args(folder / "args.json", options, sources)


def train_batches(run: Run) -> Any:
    """This rank's micro batches of the training data: Batches; of a task that generates Prompts."""
    return _batches(run, run.data.train, shuffle=run.options.train_dataloader_shuffle)


def eval_batches(run: Run) -> Any:
    """The same of the evaluation data, where there is any and it is to be looked at; else None."""
    if run.data.val is None or run.options.eval_iters == 0:
        return None
    return _batches(run, run.data.val, shuffle=False)


def _batches(run: Run, store: TokenStore | TokenStream, *, shuffle: bool) -> Any:
    return batches_of(
        run.options,
        store,
        Layout.of(run.options, dist.get_world_size()),
        data_rank=parallel_state.get_data_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        shuffle=shuffle,
        pad_token_id=run.tokenizer.pad_token_id or 0,
    )


def episode_plan(run: Run) -> BatchPlan:
    """How this rank is given micro batches of what was generated, in the process groups as they are."""
    options, layout = run.options, Layout.of(run.options, dist.get_world_size())
    return BatchPlan(
        BatchLayout(
            pack_length=(options.packing_length or options.max_length) if options.packing else None,
            length_multiple=length_multiple(options),
            context_parallel_rank=parallel_state.get_context_parallel_rank(),
            context_parallel_size=layout.context,
            pad_token_id=run.tokenizer.pad_token_id or 0,
            stage="prompts",
        ),
        options.micro_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        ranks=layout.data,
        equal_lengths=layout.pipeline > 1,
        equal_over_ranks=layout.expert > 1 and options.exchanges_equal_rows,
        multiple=layout.pipeline if options.virtual_pipeline_model_parallel_size else 1,
    )


def streamed(steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
    """A stream's steps, of which each rank counts what is its own: with the counts of all data-parallel ranks.

    A row that cannot be read stops all ranks, not one. They tell each other over gloo: no device is waited for.
    """
    group = patient_group()
    data_parallel: Any = parallel_state.get_data_parallel_group()
    peers = dist.get_process_group_ranks(data_parallel)
    while True:
        batches = on_every_rank(lambda: next(steps), group)
        counts: list[Any] = [None] * dist.get_world_size()
        own = batches[0].loss_tokens, batches[0].grouping.loss_samples if batches[0].grouping else 0.0
        dist.all_gather_object(counts, own, group)
        tokens, samples = (sum(counts[rank][which] for rank in peers) for which in range(2))
        yield [
            replace(
                batch, loss_tokens=tokens, grouping=batch.grouping and replace(batch.grouping, loss_samples=samples)
            )
            for batch in batches
        ]


def dtype_of(options: ModelOptions, hf_config: dict[str, Any]) -> torch.dtype:
    """The type of the weights: `--torch_dtype`, else the checkpoint's own. Raises ValueError for one not known."""
    given = (hf_config.get("text_config") or {}) | hf_config
    name = options.torch_dtype or given.get("dtype") or given.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"config.json has dtype {name!r}: give --torch_dtype, one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _only_deterministic_kernels() -> None:
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
