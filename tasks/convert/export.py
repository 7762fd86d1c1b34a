"""Conversion between a Hugging Face folder and a megatron-core checkpoint: `swift export` and `megatron export`.

An adapter is merged into the written weights (`--merge_lora`), or converted alone, between PEFT's and megatron-core's
formats.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ...bridge.checkpoint import hub
from ...bridge.checkpoint.adapter_files import (
    adapter_dtypes,
    load_adapter,
    read_num_labels,
    read_settings,
    save_adapter,
)
from ...bridge.checkpoint.conversion_report import report_conversion
from ...bridge.checkpoint.distributed import (
    count_mtp_depths,
    distributed_adapter_dtypes,
    load_distributed,
    load_distributed_adapter,
    read_distributed_settings,
    save_distributed,
    save_distributed_adapter,
)
from ...bridge.checkpoint.load import load_weights
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.checkpoint.rope_scaling import scale_rope, scaled_folder
from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.checkpoint.save import save_weights
from ...bridge.checkpoint.upload import upload_folder
from ...bridge.checkpoint.vision import has_tower
from ...bridge.lora.attach import attach_adapters
from ...bridge.lora.merge import merge_and_unload
from ...bridge.lora.settings import LoraSettings
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...bridge.model.score_head import add_score_head
from ...bridge.options import BuildOptions
from ...bridge.parallel import barrier, destroy, initialize
from ...bridge.pipeline_layout import merged_layout
from ...templates.json_types import JsonObject
from ..distributed.collectives import broadcast_from_rank0, local_rank0_first, run_on_all_ranks
from ..options import ExportOptions
from ..run.args_json import save_args
from ..run.context import dtype_of
from ..run.planning import ProcessLayout, build_options, export_folder, is_upload_only, shard_bytes, uploaded_folder
from ..system.atomic_dir import (
    MANIFEST,
    WEIGHTS,
    check_free,
    commit,
    os_error_hints,
    read_manifest,
    stage,
    verify_files,
)
from ..system.console import timed
from .logit_parity import LogitComparison, as_json, check_precision, round_weights

PEFT_COPY = "adapter-in-peft-format"  # temporary, in the written folder


@dataclass(frozen=True)
class ExportSource:
    """Model, and optionally an adapter, to export."""

    folder: Path  # of the model
    mcore: bool  # megatron-core's format, else Hugging Face's
    hf_config: JsonObject
    adapter: Path | None = None  # its folder
    mcore_adapter: bool = False
    merged: bool = False  # whether to merge the adapter, else only the adapter is exported

    @classmethod
    def of(cls, options: ExportOptions) -> "ExportSource":
        """Return the source of the options. Raises what bridge/checkpoint/hub.py raises."""
        if mcore_adapter := bool(options.mcore_adapter):
            adapter = Path(options.mcore_adapter or "").expanduser()
        else:
            adapter = hub.adapter_folder(options, options.adapters)
        options, mcore = hub.set_base_model(options, adapter), bool(options.mcore_model)
        folder = hub.source_folder(options, options.mcore_model)
        hf_config = scale_rope(hub.read_config(folder, mcore=mcore), options)
        is_peft = adapter is not None and (adapter / hub.ADAPTER_WEIGHTS).is_file()
        labels = read_num_labels(adapter) if adapter and is_peft else None
        if labels is not None:  # an adapter for a model with a head
            hf_config = add_score_head(hf_config, labels, pad_token_id=load_tokenizer(folder).pad_token_id)
        return cls(folder, mcore, hf_config, adapter, mcore_adapter, bool(options.merge_lora))

    @property
    def adapter_only(self) -> bool:
        """Whether only the adapter is converted, so that the model's weights are not needed."""
        return self.adapter is not None and not self.merged

    @property
    def folders(self) -> list[Path]:
        return [self.folder, self.adapter] if self.adapter else [self.folder]

    def __str__(self) -> str:
        return " with ".join(map(str, self.folders))


def run(options: ExportOptions, sources: dict[str, str]) -> None:
    """Export by the options. `sources`: origin of each option's value, for args.json."""
    if is_upload_only(options):
        if os.environ.get("RANK", "0") == "0":
            _upload(Path(uploaded_folder(options)).expanduser(), options)
        return
    layout = build_options(options)
    layout.pipeline_model_parallel_layout = merged_layout(layout)  # VPP shortens the bubbles of training alone
    initialize(layout, seed=0)
    source = local_rank0_first(lambda: ExportSource.of(options))
    dtype = run_on_all_ranks(lambda: _dtype(options, source))
    destination = export_folder(options)
    broadcast_from_rank0(lambda: _check_free(destination, source, options))
    world = dist.get_world_size()
    _print(f"{ProcessLayout.of(layout, world)}; {source} -> {destination} in {str(dtype).removeprefix('torch.')}")
    run_on_all_ranks(lambda: _check_weights(source))
    if options.test_convert_precision:  # fails early if the tokenizer is missing
        broadcast_from_rank0(lambda: load_tokenizer(source.folder) and None)
    if source.mcore:  # including all prediction layers of the checkpoint
        layout.mtp_num_layers = run_on_all_ranks(lambda: count_mtp_depths(source.folder)) or None
    with _atomic_folder(destination) as temporary:
        started = time.perf_counter()
        with _timed("Reading"):
            model = _open_model(source, layout, dtype)
        with _timed("Writing"):
            _write(model, source, temporary, options, dtype, started)
        facts = {}
        if options.test_convert_precision:
            del model
            facts["precision"] = as_json(_compare(source, temporary, options, layout, dtype))
        broadcast_from_rank0(lambda: save_args(temporary / "args.json", options, sources, **facts))
        # Again, because another process may have written the folder in the meantime.
        broadcast_from_rank0(lambda: _check_free(destination, source, options))
    _print(f"exported: {destination}")
    barrier()
    is_first = dist.get_rank() == 0
    destroy()
    if options.push_to_hub and is_first:
        _upload(destination, options)


def _upload(folder: Path, options: ExportOptions) -> None:
    print(f"uploaded: {upload_folder(folder, options, use_hf=options.use_hf, token=options.hub_token)}", flush=True)


def _dtype(options: ExportOptions, source: ExportSource) -> torch.dtype:
    """Return the model's dtype; where only an adapter is converted, one that holds its tensors exactly."""
    dtype = dtype_of(options, source.hf_config)
    if not source.adapter_only:
        return dtype
    matrices, others = _adapter_dtypes(source)
    return next(iter(others), dtype if matrices == torch.float32 else matrices)


def _adapter_dtypes(source: ExportSource) -> tuple[torch.dtype, list[torch.dtype]]:
    """Return the dtype of the adapter's matrices, and those of the modules saved with it."""
    assert source.adapter
    read = distributed_adapter_dtypes if source.mcore_adapter else adapter_dtypes
    return read(source.adapter)


def _check_free(destination: Path, source: ExportSource, options: ExportOptions) -> None:
    for folder in source.folders:
        check_free(destination, folder, exist_ok=options.exist_ok)


def _check_weights(source: ExportSource) -> None:
    """Raise ValueError if weight files differ from their folder's manifest. Each rank reads its share."""
    for folder in source.folders[source.adapter_only :]:
        names = sorted(name for name in read_manifest(folder) if name.endswith(WEIGHTS))
        if faults := verify_files(folder, checksums=True, names=names[dist.get_rank() :: dist.get_world_size()]):
            raise ValueError(
                f"{folder} is damaged ({'; '.join(faults)}). Copy it again, or use another one. Where the change is "
                f"intended, remove its {MANIFEST}"
            )


def _open_model(
    source: ExportSource, layout: BuildOptions, dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> Model:
    """Load the model of `source`, with weights of `dtype` and computation in `compute_dtype` (default: `dtype`).

    Every rank calls this.
    """
    hf_config, adapter = source.hf_config, source.adapter
    adapters = adapter is not None
    vision = run_on_all_ranks(lambda: has_tower(source.folder, hf_config))
    model = run_on_all_ranks(
        lambda: build_model(hf_config, layout, compute_dtype or dtype, adapters=adapters, vision=vision)
    )
    if not source.adapter_only:
        read = load_distributed if source.mcore else load_weights
        run_on_all_ranks(lambda: read(model.parts, hf_config, source.folder))
    if adapter:
        round_weights(model, hf_config, dtype)
        settings = run_on_all_ranks(lambda: _settings(source, adapter))
        names = tensor_names(source.folder)
        run_on_all_ranks(lambda: attach_adapters(model, hf_config, settings, seed=0, names=names))
        read_adapter = load_distributed_adapter if source.mcore_adapter else load_adapter
        run_on_all_ranks(lambda: read_adapter(model.parts, hf_config, model.lora, adapter))
        if source.merged:
            merge_and_unload(model.parts)
    return model


def _settings(source: ExportSource, adapter: Path) -> LoraSettings:
    if source.mcore_adapter:
        settings = read_distributed_settings(adapter)
    else:
        settings = read_settings(adapter, hub.read_adapter_config(adapter))
    dtype = torch.float32 if source.merged else _adapter_dtypes(source)[0]
    return replace(settings, dtype=str(dtype).removeprefix("torch."))


def _write(
    model: Model, source: ExportSource, folder: Path, options: ExportOptions, dtype: torch.dtype, started: float
) -> None:
    """Write the export into `folder`. started: time when reading began."""
    chunks, hf_config = model.parts, source.hf_config
    if source.adapter and not source.merged:
        config = hub.read_adapter_config(source.adapter, mcore=source.mcore_adapter)
        base = config.get("base_model_name_or_path") or str(source.folder.absolute())
        save = save_distributed_adapter if options.to_mcore else save_adapter
        save(chunks, hf_config, model.lora, folder, base=base)
    elif options.to_mcore:
        is_converted = source.adapter is None
        save_distributed(chunks, hf_config, source.folder, folder, dtype=dtype, converted=is_converted)
        if is_converted:
            seconds = time.perf_counter() - started
            run_on_all_ranks(lambda: report_conversion(source.folder, folder, hf_config, seconds, model.architecture))
    else:
        max_bytes, fp8 = shard_bytes(options.max_shard_size), options.quant_method == "fp8"
        save_weights(chunks, hf_config, source.folder, folder, dtype=dtype, max_shard_bytes=max_bytes, fp8=fp8)


def _compare(
    source: ExportSource, written: Path, options: ExportOptions, layout: BuildOptions, dtype: torch.dtype
) -> list[LogitComparison]:
    """Compare the source with the result for `--test_convert_precision`, one of them loaded by transformers.

    transformers loads the side in Hugging Face's format, with PEFT for an adapter. Adapters are merged on both sides.
    """
    merged, destination = replace(source, merged=True), ExportSource(written, options.to_mcore, source.hf_config)
    dtype = dtype_of(options, source.hf_config)
    if source.adapter_only and options.to_mcore:
        tested = replace(merged, adapter=written, mcore_adapter=True)
        reference, adapter = source.folder, source.adapter
    elif source.adapter_only:
        tested, reference, adapter = merged, source.folder, written
    elif options.to_mcore and source.mcore_adapter:
        tested, reference, adapter = destination, source.folder, written / PEFT_COPY
        _write_peft_copy(source, adapter, layout, dtype)
    elif source.mcore or source.mcore_adapter:
        tested, reference, adapter = source, written, None
    else:
        tested, reference, adapter = destination, source.folder, source.adapter

    if reference == source.folder:
        reference = scaled_folder(reference, options)

    def build(compute_dtype: torch.dtype) -> Model:
        return _open_model(tested, layout, dtype, compute_dtype)

    comparisons = check_precision(reference, source.hf_config, build, dtype, adapter=adapter)
    broadcast_from_rank0(lambda: shutil.rmtree(written / PEFT_COPY, ignore_errors=True))
    return comparisons


def _write_peft_copy(source: ExportSource, folder: Path, layout: BuildOptions, dtype: torch.dtype) -> None:
    """Write the source's adapter in PEFT's format, for transformers."""
    broadcast_from_rank0(folder.mkdir)
    model = _open_model(replace(source, merged=False), layout, dtype)
    save_adapter(model.parts, source.hf_config, model.lora, folder, base=str(source.folder.absolute()))


@contextmanager
def _atomic_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder beside `destination` that is renamed to it on success, else removed."""
    temporary = broadcast_from_rank0(lambda: stage(destination))
    is_first = dist.get_rank() == 0
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        raise SystemExit(128 + number)

    if is_first:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
    try:
        with os_error_hints(destination):
            yield temporary
        barrier()
        broadcast_from_rank0(lambda: commit(temporary, destination))
    except BaseException:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        if signals:  # torch's writer replaces the SystemExit by its own error
            raise SystemExit(128 + signals[0]) from None
        raise


def _timed(text: str) -> AbstractContextManager[object]:
    return timed(text) if dist.get_rank() == 0 else nullcontext()


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
