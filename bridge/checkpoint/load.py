"""Loader of Hugging Face weights into a megatron-core model: each rank reads only its shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..families.sequence_classification import SCORE, count_labels
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import collect_params, expected_keys, shard_position
from ..mapping.param_mapping import OUTPUT, ParamKey, ParamTable, Span, clip_spans
from ..model.chunk_mapping import map_chunks
from ..model.score_head import init_head
from .hub import read_config
from .quantized import WeightSource, open_weights
from .safetensors_io import BLOCK
from .tensor_names import abridge, check_names, shape_mismatch

READERS = 4
BATCH = 2**20  # bytes that a thread reads at least


@torch.no_grad()
def load_weights(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    folder: str | Path,
    *,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Load every parameter and persistent buffer of `chunks`, this rank's GPTModels, from the safetensors in `folder`.

    hf_config: the folder's raw config.json, or the result of `add_score_head`. A checkpoint without a score head gets a
        random one by `seed`, the same in every layout.
    on_progress: is called with the share that is loaded.
    Values are converted to each parameter's dtype and device. Ranks do not communicate. Raises ValueError for
    unexpected and missing tensors and for mismatched shapes.
    """
    source = open_weights(folder, hf_config)
    family, architecture, entries = map_chunks(chunks, hf_config, source.tensors)
    is_new_head = architecture.num_labels is not None and SCORE.hf not in source.tensors
    is_new_head = is_new_head and count_labels(read_config(folder)) is None
    check_names(source, {OUTPUT} if is_new_head else set(), entries, architecture, family.name)
    tensors = collect_params(chunks)
    _check_model(tensors.keys(), expected_keys(chunks, entries, architecture), family.name)
    if is_new_head and OUTPUT in tensors:
        init_head(tensors.pop(OUTPUT), hf_config, seed)
    read_tensors(tensors, entries, architecture, source, on_progress)


@torch.no_grad()
def read_tensors(
    tensors: Mapping[ParamKey, Tensor],
    entries: ParamTable,
    architecture: Architecture,
    source: WeightSource,
    on_progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Fill `tensors`, this rank's shards, from the files of `source`. Raises ValueError for a mismatched shape."""
    # Several threads: fast local and network disks need several requests at a time. Small reads are put together, since
    # the change of threads would take longer than they do.
    with ThreadPoolExecutor(READERS) as pool:
        reads: list[Future[None]] = []
        batch: list[_Read] = []
        size = 0
        for key, tensor in tensors.items():
            entry = entries[key]
            ranks, rank = shard_position(key, entry)
            spans = entry.spans(tensor.shape, ranks, architecture)
            shapes = entry.hf_shapes(tensor.shape, spans)
            _check_shapes(source, {name: entry.stored_shape(shape) for name, shape in shapes.items()})
            local_size = tensor.shape[entry.dim]
            for offset, span in clip_spans(spans, rank * local_size, (rank + 1) * local_size):
                target = tensor.narrow(entry.dim, offset, span.length)
                if span.part is None:
                    target.zero_()  # padding of the vocabulary
                    continue
                name = entry.hf[span.part]
                target = target.t() if entry.transposed else target
                for part, dim, start, stop, step in _blocks(target, entry.hf_dim, span, shapes[name]):
                    batch.append(_Read(part, (name, dim, start, stop, entry.expert_index, step)))
                    size += part.nbytes
                    if size >= BATCH:
                        reads.append(pool.submit(_fill, batch, source))
                        batch, size = [], 0
        reads.append(pool.submit(_fill, batch, source))
        try:
            for number, read in enumerate(reads, 1):
                read.result()
                on_progress(number / len(reads))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _blocks(
    target: Tensor, dim: int, span: Span, shape: tuple[int, ...]
) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """Split `target` into parts of at most BLOCK bytes: (part, dim, start, stop, step), the last four of its source.

    span: along `dim` of a Hugging Face tensor of `shape`. A span of the full dimension is read along the first one.
    """
    if not shape:  # a scalar, which megatron-core's tensor has as its one element
        yield target, 0, 0, 1, 1
        return
    if (span.start, span.stop, span.step) == (0, shape[dim], 1):
        dim, span = 0, Span(span.part, 0, shape[0])
    rows = target.shape[0]
    if dim == 0:
        rows = max(1, BLOCK // max(1, target[:1].nbytes))
    for offset, part in zip(range(0, target.shape[0], rows), target.split(rows), strict=True):
        first = span.start + offset * span.step
        yield part, dim, first, span.stop if dim else first + (len(part) - 1) * span.step + 1, span.step


class _Read(NamedTuple):
    """Part of a tensor, and where its values are in the source."""

    target: Tensor
    place: tuple[str, int, int, int, int | None, int]  # arguments of `WeightSource.read`


@torch.no_grad()
def _fill(batch: Iterable[_Read], source: WeightSource) -> None:
    for target, place in batch:
        target.copy_(source.read(*place))


def _check_shapes(source: WeightSource, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        stored = source.tensors[name]
        if stored.shape != shape:
            raise ValueError(shape_mismatch(stored.file, name, stored.shape, shape))


def _check_model(built: Iterable[ParamKey], expected: set[ParamKey], family: str) -> None:
    built = set(built)
    if extra := built - expected:
        raise RuntimeError(f"the {family} rows do not name {abridge(map(str, extra))} of the model that was built")
    if missing := expected - built:
        raise RuntimeError(f"the model that was built does not have {abridge(map(str, missing))} of the {family} rows")
