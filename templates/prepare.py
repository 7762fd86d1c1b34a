"""Preparation of a run's data: token stores or a stream, and a report on them."""

import hashlib
import logging
import multiprocessing
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from .batching.stream_cursor import Cursor
from .batching.streaming import StreamShard, TokenStream
from .cache import cache_root
from .dataset.cache_entry import open_or_build
from .dataset.dropped_rows import DroppedRows
from .dataset.files import RowSource
from .dataset.mixture import Mixture
from .dataset.packing import pack
from .dataset.random_access import readable_by_row
from .dataset.report import describe_packs, describe_sample, describe_source, describe_store
from .dataset.selection import select_rows, split_rows
from .dataset.sources import open_sources
from .dataset.statistics import source_statistics, store_statistics
from .dataset.store import TokenFile, TokenStore
from .dataset.token_format import record_batch
from .dataset.tokenize import Encoder, Row
from .formats.columns import nested_names
from .formats.medium import Medium
from .formats.presets import ConvertedRow
from .formats.schemas import PROMPTED, Stage
from .json_types import JsonObject
from .machine import end_with_parent
from .media.processor import VisionProcessor
from .options import PrepareOptions
from .plural import plural
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHECKED_ROWS = 100  # first rows of a source, in which the columns of --columns must occur
CHUNK = 500  # most rows that a process tokenizes at a time; KTO mismatches answers within these rows


@dataclass
class Prepared:
    """Samples for training, and for evaluation if there are any."""

    train: TokenStore | TokenStream
    val: TokenStore | None
    _describe: Callable[["Prepared"], str]
    _source_statistics: dict[str, list[JsonObject]] = field(default_factory=dict)  # training and evaluation data
    shares_prompts: bool = False  # micro batches hold the prompt of a pair once
    unshared_because: str = ""  # reason why they do not, for the report

    @property
    def statistics(self) -> JsonObject:
        """Return the statistics of training and evaluation data, for JSON; those of a stream are its sources."""
        statistics: JsonObject = {}
        for name, store in (("train", self.train), ("val", self.val)):
            if store is not None:
                numbers = store_statistics(store) if isinstance(store, TokenStore) else {"is_streamed": True}
                statistics[name] = {"sources": self._source_statistics.get(name, []), **numbers}
        return statistics

    @cached_property
    def report(self) -> str:
        """Text for the log: used and dropped rows, tokens, shares of trained tokens and padding, first sample."""
        return self._describe(self)

    @property
    def has_media(self) -> bool:
        """Return whether the data has images or videos; a stream may have some."""
        return self.train.has_media or (self.val is not None and self.val.has_media)

    @property
    def has_shared_beginnings(self) -> bool:
        """Return whether the documents of any sample begin with tokens that they may share; a stream's may."""
        stores = [store for store in (self.train, self.val) if store is not None]
        return any(not isinstance(store, TokenStore) or store.shared.any() for store in stores)

    @cached_property
    def columns(self) -> list[str]:
        """Columns of the prompts' rows except `messages`, in training and evaluation data; [] for a stream."""
        stores = [store for store in (self.train, self.val) if isinstance(store, TokenStore)]
        names = (file.column_masks for store in stores for file in store.files)
        return sorted(frozenset().union(*names) - {"messages"})


@dataclass(frozen=True)
class _Part:
    """Rows taken from a source."""

    source: RowSource
    file: TokenFile  # tokens of these rows, or of these and others
    rows: np.ndarray  # int64, distinct and sorted
    total: int  # number of rows to take; rows repeat if it is larger than their number
    is_split_off: bool = False  # whether the report describes the file with the part from which this one was split

    @cached_property
    def samples(self) -> np.ndarray:
        """Numbers of the part's samples in the file."""
        times, rest = divmod(self.total, max(len(self.rows), 1))
        numbers = [np.flatnonzero(np.isin(self.file.rows, self.rows))] * times
        return np.concatenate([*numbers, np.flatnonzero(np.isin(self.file.rows, self.rows[:rest]))])

    @property
    def dropped(self) -> DroppedRows:
        """Dropped rows of the file, which belong to the part that another was split from."""
        return DroppedRows() if self.is_split_off else self.file.dropped

    def split(self, ratio: float, random: np.random.Generator) -> "tuple[_Part, _Part]":
        """Return two parts without common rows. The second has about the share `ratio` of the rows."""
        first, second = split_rows(self.rows, ratio, random)
        first_part = replace(self, rows=first, total=self.total - len(second))
        return first_part, replace(self, rows=second, total=len(second), is_split_off=True)


def prepare(
    options: PrepareOptions,
    tokenizer: Tokenizer,
    *,
    stage: Stage,
    use_hf: bool = False,
    hub_token: str | None = None,
    tools: list[JsonObject] | None = None,
    verify: bool = True,
    vision: VisionProcessor | None = None,
) -> Prepared:
    """Load the tokens of the datasets from the cache, or tokenize the datasets.

    tools: tools for prompts without tools in their row
    verify: check the checksums of cached tokens
    vision: processor of images and videos; None for a model without a tower
    Call it on the first rank of each node, then on its other ranks with load_from_cache_file true and verify false.
    Raises ValueError with the flag, or the file and line, if the options or the data cannot be used, and OSError if the
    cache cannot be written.
    """
    if not options.dataset and not options.cached_dataset:
        raise ValueError("--dataset: missing. Set files, folders or hub ids.")
    if not 0 <= options.split_dataset_ratio < 1:
        raise ValueError(
            f"--split_dataset_ratio {options.split_dataset_ratio}: not in [0, 1). Set at least 0 and below 1."
        )
    if options.streaming and options.split_dataset_ratio:
        raise ValueError(
            f"--split_dataset_ratio {options.split_dataset_ratio}: cannot be used with --streaming true. "
            "Set --val_dataset instead."
        )
    if options.streaming and stage in ("kto", "embedding"):
        raise ValueError(f"--streaming true: cannot be used for {stage}, whose loss needs all ranks' data. Remove it.")
    if options.max_length is not None and options.max_length < 2:
        raise ValueError(f"--max_length {options.max_length}: leaves no token to predict. Set at least 2.")
    # Completions of prompts are packed once they are generated.
    options = replace(options, packing=False) if stage in PROMPTED else _resolve_lengths(options)
    sample_length = options.packing_length if options.packing else None
    if vision and vision.chat_template:  # it goes before the tokenizer's
        tokenizer.chat_template = vision.chat_template
    encoder = Encoder(tokenizer, options, stage, options.columns, sample_length, tools, vision)
    open_datasets = partial(open_sources, use_hf=use_hf, hub_token=hub_token, columns=options.columns)
    random = np.random.default_rng(options.data_seed)

    def parts_of(names: dict[str, list[str]], shuffle: bool) -> list[_Part]:
        return [
            _make_part(f"{flag} {source.name}", source, count, shuffle, encoder, options, verify=verify)
            for flag in names
            for source, count in open_datasets(flag, names[flag])
        ]

    names = {"--dataset": options.dataset, "--cached_dataset": options.cached_dataset}
    val_names = {"--val_dataset": options.val_dataset, "--cached_val_dataset": options.cached_val_dataset}
    val_parts = parts_of(val_names, options.val_dataset_shuffle)
    if options.streaming:
        stream = TokenStream(
            [source for flag in names for source in open_datasets(flag, names[flag], streaming=True)],
            encoder,
            options.shuffle_buffer_size,
            options.strict,
        )
        _check_columns(options.columns, (source.stream() for source, _ in stream.sources))
        val = _make_store(val_parts, options.val_dataset_shuffle, random, encoder) if val_parts else None
        sources = [{"name": source.name} for source, _ in stream.sources]
        return Prepared(
            stream,
            val,
            lambda data: _describe_stream(data, stream, val_parts, val, encoder),
            {"train": sources, "val": _part_statistics(val_parts)},
        )
    parts = parts_of(names, options.dataset_shuffle)
    _check_columns(options.columns, (part.source.rows(part.rows[:CHECKED_ROWS]) for part in (*parts, *val_parts)))
    if options.split_dataset_ratio and not val_parts:
        pairs = [part.split(options.split_dataset_ratio, random) for part in parts]
        parts, val_parts = [first for first, _ in pairs], [second for _, second in pairs]
        if not sum(part.total for part in parts):
            raise ValueError(
                f"--split_dataset_ratio {options.split_dataset_ratio}: leaves no row to train on. Set --val_dataset "
                "instead."
            )
    mixture = Mixture.of(options)
    train = _make_store(parts, options.dataset_shuffle, random, encoder, mixture)
    val = _make_store(val_parts, options.val_dataset_shuffle, random, encoder) if val_parts else None
    # The tokenizer's threads are idle from here on, so forked data loaders need no warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Prepared(
        train,
        val,
        lambda data: _describe(options, data, parts, train, val_parts, val, encoder),
        {"train": _part_statistics(parts), "val": _part_statistics(val_parts)},
    )


def _check_columns(columns: Collection[str], sources: Iterable[Iterator[Row]]) -> None:
    """Raise ValueError if --columns renames a column that no source has in its first rows."""
    if not columns:
        return
    names: set[str] = set()
    for rows in sources:
        for _, _, row in islice(rows, CHECKED_ROWS):
            names.update(row.source_columns if isinstance(row, ConvertedRow) else nested_names(row))
    for name in columns:
        if name not in names:
            raise ValueError(
                f"--columns {name}: the first {CHECKED_ROWS} rows of the data have no such column. Use one of "
                f"{', '.join(sorted(names))}."
            )


def _resolve_lengths(options: PrepareOptions) -> PrepareOptions:
    """Return options with --max_length and --packing_length set, so that every sample fits into a pack."""
    if not options.packing:
        return options
    if not (options.packing_length or options.max_length):
        raise ValueError("--packing true needs the length of a pack. Set --packing_length or --max_length.")
    pack_length = options.packing_length or options.max_length or 0
    max_length = options.max_length or pack_length
    if pack_length < max_length:
        raise ValueError(
            f"--packing_length {pack_length}: less than --max_length {max_length}. Set at least {max_length}."
        )
    return replace(options, max_length=max_length, packing_length=pack_length)


def _make_part(
    flag: str,
    source: RowSource,
    count: int | None,
    shuffle: bool,
    encoder: Encoder,
    options: PrepareOptions,
    *,
    verify: bool,
) -> _Part:
    """Tokenize `count` rows of a source (None: all)."""
    if not (available := len(source)):
        raise ValueError(f"{flag}: has no row. Remove it, or fix the data.")
    total = count or available
    rows = select_rows(available, total, shuffle=shuffle, seed=options.data_seed)
    return _Part(source, _load_tokens(source, rows, encoder, options, verify=verify), rows, total)


def _load_tokens(
    source: RowSource, rows: np.ndarray, encoder: Encoder, options: PrepareOptions, *, verify: bool
) -> TokenFile:
    """Return the tokens of these rows from the cache. Builds the entry if it is missing."""
    name = hashlib.blake2b(f"{source.fingerprint} {encoder.fingerprint}".encode(), digest_size=16)
    if len(rows) < len(source):
        name.update(rows.tobytes())

    def build() -> Generator[tuple[pa.RecordBatch, DroppedRows]]:
        sizes = plural(len(rows), "row"), plural(options.dataset_num_proc, "process")
        logger.info("tokenizing %s (%s, %s)", source.name, *sizes)
        with tqdm(total=len(rows), desc=f"tokenizing {Path(source.name).name}", unit="row", disable=None) as progress:
            for chunk, (batch, dropped) in encode_all(source, rows, encoder, options.dataset_num_proc):
                _raise_if_strict(dropped, options)
                progress.update(chunk)
                yield batch, dropped

    folder = cache_root() / "tokens" / name.hexdigest()
    rebuild, has_vision = not options.load_from_cache_file, encoder.vision is not None
    file = open_or_build(folder, build, rebuild=rebuild, verify=verify, has_vision=has_vision)
    _raise_if_strict(file.dropped, options)
    return file


def _raise_if_strict(dropped: DroppedRows, options: PrepareOptions) -> None:
    if options.strict and dropped.counts:
        reason, places = next(iter(dropped.places.items()))
        raise ValueError(f"{places[0]}: {reason} (--strict true)")


def encode_all(
    source: RowSource, rows: np.ndarray, encoder: Encoder, processes: int
) -> Iterator[tuple[int, tuple[pa.RecordBatch, DroppedRows]]]:
    """Yield (number of rows, (tokens, dropped rows)) in order, in equal chunks of at most CHUNK rows."""
    chunks = np.array_split(
        rows, -(-len(rows) // CHUNK)
    )  # equal chunks, because a chunk of one KTO row has no mismatched answer
    processes = min(processes, len(chunks))
    if processes <= 1:
        for chunk in chunks:
            yield len(chunk), _encode(source, encoder, chunk)
        return
    with _no_tokenizer_threads():  # the processes use all cores
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(source, encoder)
        )
        try:
            for chunk, result in zip(chunks, pool.map(_encode_in_worker, chunks), strict=True):
                yield len(chunk), result
        finally:
            pool.shutdown(cancel_futures=True)


_worker_state: list = []  # source and encoder of a worker process


def _start_worker(source: RowSource, encoder: Encoder) -> None:
    _worker_state[:] = source, encoder
    end_with_parent()


def _encode_in_worker(chunk: np.ndarray) -> tuple[pa.RecordBatch, DroppedRows]:
    source, encoder = _worker_state
    return _encode(source, encoder, chunk)


def _encode(source: RowSource, encoder: Encoder, chunk: np.ndarray) -> tuple[pa.RecordBatch, DroppedRows]:
    samples, dropped = encoder.encode(source.rows(chunk))
    return record_batch(samples, has_vision=encoder.vision is not None), dropped


@contextmanager
def _no_tokenizer_threads() -> Iterator[None]:
    """Keep the tokenizer from starting threads, about which it warns in forked processes."""
    previous = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = previous


def _make_store(
    parts: list[_Part], shuffle: bool, random: np.random.Generator, encoder: Encoder, mixture: Mixture | None = None
) -> TokenStore:
    starts = np.cumsum([0] + [len(part.file) for part in parts])
    samples = np.concatenate([part.samples + start for part, start in zip(parts, starts[:-1], strict=True)])
    if mixture:
        samples = samples[mixture.order([len(part.samples) for part in parts])]
    if not len(samples):
        dropped = "\n".join(f"{part.source.name}:\n{part.file.dropped}" for part in parts)
        raise ValueError(f"no row of the dataset can be used\n{dropped}")
    order, names = random.permutation(samples) if shuffle else samples, [part.source.name for part in parts]
    read_media = []
    for part in parts if encoder.vision else ():
        has_media = part.file.visual_tokens.any()
        source = readable_by_row(part.source) if has_media else part.source
        read_media.append(partial(_read_media, source, encoder))
    return TokenStore([part.file for part in parts], order, encoder.stage, names, read_media)


def _read_media(source: RowSource, encoder: Encoder, row: int) -> list[Medium]:
    """Return the media of a row, read again from its source."""
    [(_, _, columns)] = source.rows(np.array([row]))
    return encoder.media_of(columns)


def _describe(
    options: PrepareOptions,
    data: Prepared,
    parts: list[_Part],
    train: TokenStore,
    val_parts: list[_Part],
    val: TokenStore | None,
    encoder: Encoder,
) -> str:
    lines = ["Training data:", *_describe_parts(parts), describe_store(train), *_describe_sharing(data)]
    if options.packing_length and options.packing:
        lengths = train.padded_lengths(1, separate_rows=train.stage == "kto")
        lengths = lengths - train.shared if data.shares_prompts else lengths
        packs = pack(lengths, options.packing_length, options.data_seed)
        lines.append(describe_packs(packs, lengths, options.packing_length))
    elif options.padding_free:
        lines.append("  concatenated without padding")
    lines += [*_describe_val(val_parts, val), *encoder.renderer.notes()]
    first = describe_sample(train.row(0), train.label(0), train.stage, encoder.tokenizer, encoder.placeholders)
    return "\n".join([*lines, first])


def _describe_sharing(data: Prepared) -> list[str]:
    if data.unshared_because:
        return [f"  prompts of pairs are computed twice: {data.unshared_because}"]
    if not data.shares_prompts:
        return []
    if isinstance(data.train, TokenStream):
        return ["  prompts of pairs are computed once, where that saves 5 % of their tokens"]
    share = data.train.shared.sum() / data.train.lengths.sum()
    return [f"  prompts of pairs are computed once: {share:.0%} fewer tokens"]


def _describe_parts(parts: list[_Part]) -> list[str]:
    return [describe_source(part.source.name, part.total, len(part.samples), part.dropped) for part in parts]


def _part_statistics(parts: list[_Part]) -> list[JsonObject]:
    return [source_statistics(part.source.name, part.total, len(part.samples), part.dropped) for part in parts]


def _describe_val(parts: list[_Part], store: TokenStore | None) -> list[str]:
    return ["Evaluation data:", *_describe_parts(parts), describe_store(store)] if store else []


def _describe_stream(
    data: Prepared, stream: TokenStream, val_parts: list[_Part], val: TokenStore | None, encoder: Encoder
) -> str:
    names = ", ".join(source.name for source, _ in stream.sources)
    _, first = next(iter(StreamShard(stream, Cursor(0, 1), shuffle=False, seed=0)))
    lines = [f"Training data, streamed: {names}", *_describe_sharing(data)]
    lines += [*_describe_val(val_parts, val), *encoder.renderer.notes()]
    sample = describe_sample(first.documents, first.label, stream.stage, encoder.tokenizer, encoder.placeholders)
    return "\n".join([*lines, sample])
