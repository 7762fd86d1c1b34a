"""`swift export` and `megatron export`: from a Hugging Face folder to a megatron-core checkpoint, and back."""

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ..bridge import hub
from ..bridge.build import build_model
from ..bridge.distributed import load_distributed, save_distributed, stored_depths
from ..bridge.load import load_weights
from ..bridge.parallel import barrier, initialize
from ..bridge.proof import prove_loading
from ..bridge.save import save_weights
from .args import save_args
from .folders import MANIFEST, begin, check_free, commit, damage, explained, listed
from .options import ExportOptions
from .plan import Layout, build_options, export_folder, shard_bytes
from .precision import as_json, check_precision
from .run import dtype_of, first_of_each_node, on_every_rank, on_first_rank

WEIGHTS = (".safetensors", ".distcp", ".metadata")  # how the names of files end


def run(options: ExportOptions, sources: dict[str, str]) -> None:
    """Do what the options say. `sources`: where each option's value came from, for args.json."""
    layout = build_options(options)
    initialize(layout, seed=0)
    source = first_of_each_node(lambda: hub.source_folder(options, options.mcore_model))
    hf_config = hub.read_config(source, mcore=bool(options.mcore_model))
    dtype = dtype_of(options, hf_config)
    destination = export_folder(options)
    on_first_rank(lambda: check_free(destination, source, exist_ok=options.exist_ok))
    world = dist.get_world_size()
    processes = str(Layout.of(layout, world)) if world > 1 else "one process"
    _say(f"{processes}; {source} -> {destination} in {str(dtype).removeprefix('torch.')}")
    on_every_rank(lambda: _check_weights(source))
    if options.test_convert_precision:  # what it needs last is looked for first
        on_first_rank(lambda: hub.load_tokenizer(source) and None)
    if options.to_hf:  # everything that the checkpoint has
        layout.mtp_num_layers = on_every_rank(lambda: stored_depths(source)) or None
    with _whole_or_absent(destination) as temporary:
        began = started = time.perf_counter()
        model = on_every_rank(lambda: build_model(hf_config, layout, dtype))
        read = load_distributed if options.to_hf else load_weights
        on_every_rank(lambda: read(model.chunks, hf_config, source))
        _say(f"read in {time.perf_counter() - started:.1f} s")
        started = time.perf_counter()
        if options.to_mcore:
            save_distributed(model.chunks, hf_config, source, temporary, dtype=dtype, converted=True)
            seconds = time.perf_counter() - began
            on_every_rank(lambda: prove_loading(source, temporary, hf_config, seconds, model.architecture.predicting))
        else:
            most = shard_bytes(options.max_shard_size)
            save_weights(model.chunks, hf_config, source, temporary, dtype=dtype, max_shard_bytes=most)
        _say(f"written in {time.perf_counter() - started:.1f} s")
        facts = {}
        if options.test_convert_precision:
            del model
            hf, mcore = (source, temporary) if options.to_mcore else (temporary, source)
            load = partial(_load, hf_config, mcore)
            facts["precision"] = as_json(check_precision(hf, hf_config, load, layout, dtype))
        on_first_rank(lambda: save_args(temporary / "args.json", options, sources, **facts))
        on_first_rank(lambda: check_free(destination, source, exist_ok=options.exist_ok))  # another may have been first
    _say(f"exported: {destination}")
    barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _check_weights(source: Path) -> None:
    """Raise ValueError where files of weights are not those that were written, by the folder's manifest if it has one.

    Each rank reads its share of them.
    """
    names = sorted(name for name in listed(source) if name.endswith(WEIGHTS))
    if faults := damage(source, checksums=True, names=names[dist.get_rank() :: dist.get_world_size()]):
        raise ValueError(
            f"{source} is not as it was written ({'; '.join(faults)}): copy it again, or take another. Where this is "
            f"meant to be, remove its {MANIFEST}"
        )


def _load(hf_config: dict[str, Any], folder: Path, chunks: Sequence[Any]) -> None:
    on_every_rank(lambda: load_distributed(chunks, hf_config, folder))


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
