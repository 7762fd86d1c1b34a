"""`swift export` and `megatron export`: from a Hugging Face folder to a megatron-core checkpoint, and back.

With an adapter, what is written has it in its weights (`--merge_lora`), or is the adapter alone in PEFT's format.
"""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...bridge.checkpoint import hub
from ...bridge.checkpoint.adapter_files import load_adapter, read_num_labels, read_settings, save_adapter
from ...bridge.checkpoint.conversion_report import report_conversion
from ...bridge.checkpoint.distributed import (
    count_mtp_depths,
    load_distributed,
    load_distributed_adapter,
    read_distributed_settings,
    save_distributed,
)
from ...bridge.checkpoint.load import load_weights
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.checkpoint.save import save_weights
from ...bridge.lora.attach import attach_adapters
from ...bridge.lora.merge import merge_and_unload
from ...bridge.lora.settings import LoraSettings
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...bridge.model.score_head import add_score_head
from ...bridge.options import BuildOptions
from ...bridge.parallel import barrier, initialize
from ..distributed.collectives import first_of_each_node, on_every_rank, on_first_rank
from ..options import ExportOptions
from ..run.args_json import save_args
from ..run.context import dtype_of
from ..run.planning import Layout, build_options, export_folder, shard_bytes
from ..system.atomic_dir import MANIFEST, WEIGHTS, begin, check_free, commit, damage, explained, listed
from .logit_parity import Comparison, as_json, check_precision, round_weights


@dataclass(frozen=True)
class Source:
    """What is exported."""

    folder: Path  # of the model
    mcore: bool  # in megatron-core's format, else Hugging Face's
    hf_config: dict[str, Any]
    adapter: Path | None = None  # its folder
    mcore_adapter: bool = False
    merged: bool = False  # the adapter is to be in the weights, else it is exported alone

    @classmethod
    def of(cls, options: ExportOptions) -> "Source":
        """Raises what bridge/checkpoint/hub.py raises."""
        if mcore_adapter := bool(options.mcore_adapter):
            adapter = Path(options.mcore_adapter or "").expanduser()
        else:
            adapter = hub.adapter_folder(options, options.adapters)
        options, mcore = hub.with_base(options, adapter), bool(options.mcore_model)
        folder = hub.source_folder(options, options.mcore_model)
        hf_config = hub.read_config(folder, mcore=mcore)
        peft = adapter is not None and (adapter / hub.ADAPTER_WEIGHTS).is_file()
        labels = read_num_labels(adapter) if adapter and peft else None
        if labels is not None:  # the adapter is of a model with a head
            hf_config = add_score_head(hf_config, labels, pad_token_id=load_tokenizer(folder).pad_token_id)
        return cls(folder, mcore, hf_config, adapter, mcore_adapter, bool(options.merge_lora))

    @property
    def folders(self) -> list[Path]:
        return [self.folder, self.adapter] if self.adapter else [self.folder]

    def __str__(self) -> str:
        return " with ".join(map(str, self.folders))


def run(options: ExportOptions, sources: dict[str, str]) -> None:
    """Do what the options say. `sources`: where each option's value came from, for args.json."""
    layout = build_options(options)
    initialize(layout, seed=0)
    source = first_of_each_node(lambda: Source.of(options))
    dtype = dtype_of(options, source.hf_config)
    destination = export_folder(options)
    on_first_rank(lambda: _check_free(destination, source, options))
    world = dist.get_world_size()
    _say(f"{Layout.of(layout, world)}; {source} -> {destination} in {str(dtype).removeprefix('torch.')}")
    on_every_rank(lambda: _check_weights(source))
    if options.test_convert_precision:  # what it needs last is looked for first
        on_first_rank(lambda: load_tokenizer(source.folder) and None)
    if options.to_hf:  # everything that the checkpoint has
        layout.mtp_num_layers = on_every_rank(lambda: count_mtp_depths(source.folder)) or None
    with _whole_or_absent(destination) as temporary:
        started = time.perf_counter()
        model = _open(source, layout, dtype)
        _say(f"read in {time.perf_counter() - started:.1f} s")
        between = time.perf_counter()
        _write(model, source, temporary, options, dtype, started)
        _say(f"written in {time.perf_counter() - between:.1f} s")
        facts = {}
        if options.test_convert_precision:
            del model
            facts["precision"] = as_json(_compare(source, temporary, options, layout, dtype))
        on_first_rank(lambda: save_args(temporary / "args.json", options, sources, **facts))
        on_first_rank(lambda: _check_free(destination, source, options))  # another may have been first
    _say(f"exported: {destination}")
    barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _check_free(destination: Path, source: Source, options: ExportOptions) -> None:
    for folder in source.folders:
        check_free(destination, folder, exist_ok=options.exist_ok)


def _check_weights(source: Source) -> None:
    """Raise ValueError where files of weights are not those that were written, by a folder's manifest if it has one.

    Each rank reads its share of them.
    """
    for folder in source.folders:
        names = sorted(name for name in listed(folder) if name.endswith(WEIGHTS))
        if faults := damage(folder, checksums=True, names=names[dist.get_rank() :: dist.get_world_size()]):
            raise ValueError(
                f"{folder} is not as it was written ({'; '.join(faults)}): copy it again, or take another. Where this "
                f"is meant to be, remove its {MANIFEST}"
            )


def _open(source: Source, layout: BuildOptions, dtype: torch.dtype, computed: torch.dtype | None = None) -> Model:
    """The model of `source`, read: with weights of `dtype`, that computes in `computed` (left out: in the same).

    Every rank calls this.
    """
    hf_config, adapter = source.hf_config, source.adapter
    adapters = adapter is not None
    model = on_every_rank(lambda: build_model(hf_config, layout, computed or dtype, adapters=adapters))
    read = load_distributed if source.mcore else load_weights
    on_every_rank(lambda: read(model.chunks, hf_config, source.folder))
    if adapter:
        round_weights(model, hf_config, dtype)
        settings = on_every_rank(lambda: _settings(source, adapter))
        names = tensor_names(source.folder)
        on_every_rank(lambda: attach_adapters(model, hf_config, settings, seed=0, names=names))
        read_adapter = load_distributed_adapter if source.mcore_adapter else load_adapter
        on_every_rank(lambda: read_adapter(model.chunks, hf_config, model.lora, adapter))
        if source.merged:
            merge_and_unload(model.chunks)
    return model


def _settings(source: Source, adapter: Path) -> LoraSettings:
    if source.mcore_adapter:
        settings = read_distributed_settings(adapter)
    else:
        settings = read_settings(adapter, hub.read_adapter_config(adapter))
    return replace(settings, dtype="float32") if source.merged else settings


def _write(
    model: Model, source: Source, folder: Path, options: ExportOptions, dtype: torch.dtype, started: float
) -> None:
    """Write what is exported into `folder`; `started`: when reading it did."""
    chunks, hf_config = model.chunks, source.hf_config
    if source.adapter and not source.merged:
        config = hub.read_adapter_config(source.adapter, mcore=source.mcore_adapter)
        base = config.get("base_model_name_or_path") or str(source.folder.absolute())
        save_adapter(chunks, hf_config, model.lora, folder, base=base)
    elif options.to_mcore:
        converted = source.adapter is None
        save_distributed(chunks, hf_config, source.folder, folder, dtype=dtype, converted=converted)
        if converted:
            seconds, mtp_depths = time.perf_counter() - started, model.architecture.mtp_depths
            on_every_rank(lambda: report_conversion(source.folder, folder, hf_config, seconds, mtp_depths))
    else:
        most = shard_bytes(options.max_shard_size)
        save_weights(chunks, hf_config, source.folder, folder, dtype=dtype, max_shard_bytes=most)


def _compare(
    source: Source, written: Path, options: ExportOptions, layout: BuildOptions, dtype: torch.dtype
) -> list[Comparison]:
    """`--test_convert_precision`: one side is opened here, the other by transformers.

    That is the source where transformers (with PEFT) can open it, else what was written.
    """
    if source.mcore or source.mcore_adapter:
        ours, theirs, adapter = source, written, None
    else:
        ours, theirs, adapter = Source(written, options.to_mcore, source.hf_config), source.folder, source.adapter

    def build(computed: torch.dtype) -> Model:
        return _open(ours, layout, dtype, computed)

    return check_precision(theirs, source.hf_config, build, dtype, adapter=adapter)


@contextmanager
def _whole_or_absent(destination: Path) -> Iterator[Path]:
    """A folder beside `destination`, which takes its place where all goes well, and is removed where it does not."""
    temporary = on_first_rank(lambda: begin(destination))
    first = dist.get_rank() == 0
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(number)
        raise SystemExit(128 + number)

    if first:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
    try:
        with explained(destination):
            yield temporary
        barrier()
        on_first_rank(lambda: commit(temporary, destination))
    except BaseException:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        if ended:  # torch's writer makes an error of its own of it
            raise SystemExit(128 + ended[0]) from None
        raise


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
