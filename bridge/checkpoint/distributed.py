"""Distributed checkpoints of megatron-core (torch_dist), which any parallel layout can save and load.

A folder has the files that Megatron-LM writes (latest_checkpointed_iteration.txt and iter_0000001/), and the model's
config.json, tokenizer and other small files.
"""

import errno
import math
import shutil
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing import save as save_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from ..lora.attach import Lora
from ..lora.settings import LoraSettings
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import ADAPTER, collect_params
from ..mapping.param_mapping import AUDIO_TOWER, EMBEDDING, OUTPUT, TOWERS, VISION_TOWER, Family
from ..model.chunk_mapping import describe_chunks, map_chunks
from ..model.score_head import init_head
from .adapter_files import write_adapter_config
from .conversion_report import describe_sources, peak_memory, report_conversion, write_report
from .hub import LATEST, mcore_folder, read_adapter_config
from .load import read_tensors
from .passthrough import FOLDER, PassthroughTensors
from .pickles import UnsafePickle, read_metadata
from .quantized import open_weights
from .safetensors_io import tensor_names
from .save import copy_small_files
from .sharding import name_adapter, name_tensors, sharded_adapter, sharded_state
from .tensor_names import abridge

MAX_PASSTHROUGH_FILE = 5 * 2**30  # bytes of a file of passthrough tensors
MODEL_HINT = "Do the folder and its config.json belong together?"
FIRST_PARAMETERS = VISION_TOWER + "patch_embed.weight", AUDIO_TOWER + "convs.0.weight"
MODULES_KEY = "adapted_modules"  # in an adapter's checkpoint: Hugging Face names of the modules with adapters
ADAPTER_HINT = "Is it an adapter of another model?"


@torch.no_grad()
def save_distributed(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype,
    iteration: int = 1,
    converted: bool = False,
) -> None:
    """Save the model of `chunks`, which has `dtype`, into the empty folder `destination` in Megatron-LM's format.

    chunks: this rank's GPTModels. hf_config: the raw config.json of `source`, whose tokenizer and other small files are
    copied. converted: the weights are those of `source`, so conversion.json has its tensors' checksums (see
    conversion_report.py); else it has only their names. Every rank calls this. Tensors are written one by one, and the
    files are on the disk when this returns.
    Raises OSError on every rank if any rank cannot write; the folder is then incomplete.
    """
    source, destination, started = Path(source), Path(destination), time.perf_counter()
    family, architecture, entries = map_chunks(chunks, hf_config, tensor_names(source))
    naming = name_tensors(entries)
    state = {"model": sharded_state(chunks, hf_config, naming), "args": _megatron_args(chunks[0].config, architecture)}
    folder = _write(state, destination, iteration, stacked=naming.stacked)
    sources = describe_sources(entries)
    passthrough = PassthroughTensors(source, hf_config, architecture, sources, dtype)

    def finish() -> None:
        copy_small_files(source, destination, hf_config, dtype)
        passthrough.save_to_subfolder(destination, MAX_PASSTHROUGH_FILE)
        if not converted:
            size, seconds = sum(file.stat().st_size for file in folder.iterdir()), time.perf_counter() - started
            cost = {"bytes": size, "seconds": seconds, "peak_memory": [peak_memory()]}
            write_report(destination, "training", family.name, sources, {}, **cost)

    _run_on_first_rank(finish)
    if converted:
        seconds = time.perf_counter() - started
        report_conversion(source, destination, hf_config, seconds, architecture)


@torch.no_grad()
def save_distributed_adapter(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    lora: Lora,
    destination: str | Path,
    *,
    base: str,
    iteration: int = 1,
) -> None:
    """Save only the adapters of `chunks`, and the fully trained modules, into the empty folder `destination`.

    base: the base model to name in adapter_config.json. Every rank calls this. Raises as `save_distributed`.
    """
    destination = Path(destination)
    architecture = describe_chunks(chunks, hf_config)
    state = {"model": sharded_adapter(chunks, hf_config, lora.plan), MODULES_KEY: lora.plan.modules}
    _write(state, destination, iteration, stacked=False)
    _run_on_first_rank(lambda: write_adapter_config(destination, lora, architecture, base))


def _write(state: dict[str, object], destination: Path, iteration: int, *, stacked: bool) -> Path:
    """Write `state` as Megatron-LM's checkpoint of an iteration into `destination`. Return the folder of its files."""
    folder = destination / f"iter_{iteration:07}"

    def begin() -> None:
        folder.mkdir()
        (destination / LATEST).write_text(f"{iteration}\n")

    _run_on_first_rank(begin)
    state = state | {"checkpoint_version": 3.0, "iteration": iteration}
    metadata = {"singleton_local_shards": False, "non_homogeneous_layers": not stacked}
    try:
        with _quiet():
            save_checkpoint(state, str(folder), _StreamingStrategy(), content_metadata=metadata)  # pyright: ignore[reportArgumentType]
    except CheckpointException as error:
        raise _first_failure(error, destination) from None
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about its own classes, which megatron-core uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        yield


def _run_on_first_rank(action: Callable[[], None]) -> None:
    """Run `action` on rank 0. Raise its OSError on every rank."""
    failures: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failures = [error]
    dist.broadcast_object_list(failures, src=0)
    if failures[0] is not None:
        raise failures[0]


@torch.no_grad()
def load_distributed(chunks: Sequence[GPTModel], hf_config: HfConfig, folder: str | Path, *, seed: int = 0) -> None:
    """Load every parameter and persistent buffer of `chunks`, this rank's GPTModels, from the checkpoint in `folder`.

    hf_config: the raw config.json of the model, or the result of `add_score_head`. A checkpoint without a score head
    gets a random one by `seed`, the same in every layout. Values are converted to each parameter's dtype and device.
    Besides its weights a rank holds one piece of the checkpoint at a time. Ranks do not communicate.
    Raises ValueError if the folder has no such checkpoint, or the checkpoint of another model.
    """
    root, folder = Path(folder), mcore_folder(folder)
    family, architecture, entries = map_chunks(chunks, hf_config)
    stored = _tensor_shapes(folder)
    naming = name_tensors(entries, stored)
    state, names = sharded_state(chunks, hf_config, naming), dict(naming.names)
    if architecture.num_labels is not None and stored.get(OUTPUT.name, (math.inf,))[0] >= architecture.vocab_size:
        del names[OUTPUT]  # a language model's checkpoint: its output layer has the vocabulary's rows, or is tied
        stored.pop(OUTPUT.name, None)
        if state.pop(str(OUTPUT), None) is not None:
            init_head(collect_params(chunks)[OUTPUT], hf_config, seed)
    tower = {key for key in names if key.name.startswith(TOWERS)}
    if tower and not stored.keys() & {names[key] for key in tower}:  # saved by a run that left the tower as it was
        _read_passthrough_tower(chunks, hf_config, root / FOLDER)
        names = {key: name for key, name in names.items() if key not in tower}
        state = {key: tensor for key, tensor in state.items() if not key.startswith(TOWERS)}
    _check_names(folder, stored.keys(), set(names.values()), family)
    _check_vocabulary(folder, stored[names[EMBEDDING]][0], architecture)
    _read(state, folder, stored, architecture, MODEL_HINT)


def _read_passthrough_tower(chunks: Sequence[GPTModel], hf_config: HfConfig, folder: Path) -> None:
    """Read the vision tower from `folder`, the passthrough tensors of a checkpoint."""
    source = open_weights(folder, {}) if folder.is_dir() else None
    names = source.tensors if source else {}
    _, architecture, entries = map_chunks(chunks, hf_config, names)
    tensors = {key: tensor for key, tensor in collect_params(chunks).items() if key.name.startswith(TOWERS)}
    missing = {name for key in tensors for name in entries[key].hf} - names.keys()
    if missing or source is None:
        raise ValueError(f"{folder.parent} lacks {abridge(missing)}, which this model's vision tower has. {MODEL_HINT}")
    read_tensors(tensors, entries, architecture, source)


def has_mcore_tower(folder: str | Path) -> bool:
    """Return whether a megatron-core checkpoint holds a tower in megatron-core's format."""
    return not _tensor_metadata(mcore_folder(folder)).keys().isdisjoint(FIRST_PARAMETERS)


def read_distributed_settings(folder: str | Path) -> LoraSettings:
    """Return the settings and the dtype of an adapter checkpoint, `--mcore_adapter`.

    Raises FileNotFoundError or ValueError if the folder has none that can be read.
    """
    config, checkpoint = read_adapter_config(folder, mcore=True), mcore_folder(folder, "--mcore_adapter")
    modules = _common(checkpoint).get(MODULES_KEY)
    if modules is None:
        raise ValueError(f"--mcore_adapter {folder} does not say what its adapters are of: was it saved here?")
    dtype = next(entry.properties.dtype for name, entry in _tensor_metadata(checkpoint).items() if ADAPTER in name)
    return replace(LoraSettings.from_adapter_config(config, modules), dtype=str(dtype).removeprefix("torch."))


def distributed_adapter_dtypes(folder: str | Path) -> tuple[torch.dtype, list[torch.dtype]]:
    """Return the dtypes of an adapter checkpoint, as `adapter_dtypes` does of one in PEFT's format."""
    stored = _tensor_metadata(mcore_folder(folder, "--mcore_adapter"))
    others = {entry.properties.dtype for name, entry in stored.items() if ADAPTER not in name}
    matrices = next(entry.properties.dtype for name, entry in stored.items() if ADAPTER in name)
    return matrices, sorted(others, key=lambda dtype: -dtype.itemsize)


@torch.no_grad()
def load_distributed_adapter(chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, folder: str | Path) -> None:
    """Load the adapters of `chunks`, and the fully trained modules, from the adapter checkpoint in `folder`.

    As `load_distributed`. Raises ValueError if the folder has no such checkpoint, or the checkpoint of another model.
    """
    folder = mcore_folder(folder, "--mcore_adapter")
    architecture = describe_chunks(chunks, hf_config)
    stored, expected = _tensor_shapes(folder), set(name_adapter(lora.plan).names.values())
    if missing := expected - stored.keys():
        raise ValueError(f"{folder} lacks {abridge(missing)}, which adapters of this model have. {ADAPTER_HINT}")
    if extra := stored.keys() - expected:
        raise ValueError(f"{folder} has {abridge(extra)}, for which this model has no place. {ADAPTER_HINT}")
    _read(sharded_adapter(chunks, hf_config, lora.plan), folder, stored, architecture, ADAPTER_HINT)


def _read(
    state: dict[str, ShardedTensor | ShardedTensorFactory],
    folder: Path,
    stored: dict[str, tuple[int, ...]],
    architecture: Architecture,
    hint: str,
) -> None:
    """Read the checkpoint in `folder` into the tensors of `state`.

    stored: the shapes in the checkpoint. hint: for the error message if shapes differ.
    """
    pieces = {
        name: cast(list[ShardedTensor], tensor.build()) if isinstance(tensor, ShardedTensorFactory) else [tensor]
        for name, tensor in state.items()
    }
    for shards in pieces.values():
        _check_shape(folder, shards[0], stored[shards[0].key], architecture, hint)
    try:
        with _quiet():
            TorchDistLoadShardedStrategy().load(pieces, folder)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise _unreadable_error(folder, cause) from None


class _StreamingStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's save strategy with torch's FileSystemWriter.

    megatron-core's own writer copies all views before it writes anything, and starts a process for its results.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )


def _megatron_args(config: TransformerConfig, architecture: Architecture) -> Namespace:
    """Return the arguments that Megatron-LM checks when it loads a checkpoint, by the names of its flags."""
    names = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "num_layers",
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    )  # fmt: skip
    return Namespace(
        **{name: getattr(config, name) for name in names},
        max_position_embeddings=architecture.max_positions,
        vocab_size=architecture.vocab_size,
        untie_embeddings_and_output_weights=not architecture.tied,
        no_save_optim=True,
        no_save_rng=True,
    )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors in a checkpoint, by name. Raises ValueError if it cannot be read."""
    return {name: tuple(entry.size) for name, entry in _tensor_metadata(folder).items() if "optimizer." not in name}


def _tensor_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of a checkpoint's tensors by name. Raises ValueError if it cannot be read."""
    try:
        metadata = read_metadata(folder).state_dict_metadata
    except UnsafePickle:
        raise
    except Exception as error:  # a damaged pickle raises many types
        raise ValueError(f"{folder / '.metadata'} cannot be read ({error}): copy the folder again") from None
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def count_mtp_depths(folder: str | Path) -> int:
    """Count the layers of multi-token prediction of a checkpoint. Raises as `load_distributed`."""
    return _mtp_depths(_tensor_shapes(mcore_folder(folder)))


def _mtp_depths(stored: Iterable[str]) -> int:
    return len({name.split(".")[2] for name in stored if name.startswith("mtp.layers.")})


def _check_names(folder: Path, stored: Iterable[str], expected: set[str], family: Family) -> None:
    missing, extra = expected - set(stored), set(stored) - expected
    problems = [f"lacks {abridge(missing)}, which"] * bool(missing) + [f"has {abridge(extra)}, which"] * bool(extra)
    if not missing and all(name.startswith("mtp.") for name in extra) and extra:
        raise ValueError(
            f"{folder} has layers of multi-token prediction: give --mtp_num_layers {_mtp_depths(stored)}, so that they "
            "are trained and saved with the model"
        )
    if problems:
        relation = "has" if missing else "has no place for"
        raise ValueError(f"{folder} {problems[0]} a {family.name} model of config.json {relation}. {MODEL_HINT}")


def _check_shape(
    folder: Path, tensor: ShardedTensor, stored: tuple[int, ...], architecture: Architecture, hint: str
) -> None:
    expected = tuple(tensor.global_shape)
    if tensor.allow_shape_mismatch:  # its padding depends on the layout that saved it
        expected = (architecture.vocab_size, *expected[1:])
        if stored[0] >= expected[0] and stored[1:] == expected[1:]:
            return
    if stored != expected:
        raise ValueError(
            f"{folder}: {tensor.key} has shape {list(stored)}, and by config.json it has {list(expected)}. {hint}"
        )


def _check_vocabulary(folder: Path, rows: int, architecture: Architecture) -> None:
    """Raise ValueError if the checkpoint's vocabulary is not that of config.json. Its `rows` may include padding."""
    if rows == architecture.vocab_size:
        return
    arguments = _common(folder).get("args")
    # Megatron-LM stores `padded_vocab_size`, and a vocab_size that its users can set below that of config.json.
    if arguments is None or hasattr(arguments, "padded_vocab_size") or arguments.vocab_size == architecture.vocab_size:
        return
    raise ValueError(
        f"{folder} has a vocabulary of {arguments.vocab_size}, and by config.json it has {architecture.vocab_size}. "
        f"{MODEL_HINT}"
    )


def _common(folder: Path) -> dict[str, Any]:
    """Load the part of a checkpoint that is not tensors."""
    try:
        with _quiet():
            return load_common_state_dict(folder)
    except (Exception, CheckpointException) as error:  # a pickle raises any type
        raise _unreadable_error(folder, error) from None


def _unreadable_error(folder: Path, cause: BaseException) -> ValueError:
    reason = next(iter(str(cause).splitlines()), "") or type(cause).__name__
    return ValueError(f"{folder} cannot be read ({reason}): copy it again, or make it anew")


def _first_failure(error: CheckpointException, destination: Path) -> OSError:
    """Return the error of the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    number = cause.errno if isinstance(cause, OSError) and cause.errno else errno.EIO
    # torch's zip writer reports only a short write.
    if number == errno.EIO and shutil.disk_usage(destination).free < 2**20:
        number = errno.ENOSPC
    return OSError(number, f"the checkpoint could not be written: rank {rank}: {cause}")
