"""--dataset and the options -> token stores, and what a user should know about them before training."""

import hashlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from .batching.stream_cursor import Cursor
from .batching.streaming import Share, TokenStream
from .dataset.files import Source
from .dataset.packing import pack
from .dataset.report import describe_packs, describe_sample, describe_source, describe_store
from .dataset.sources import sources
from .dataset.store import Refusals, TokenFile, TokenStore, cache_root, open_or_build, record_batch
from .dataset.tokenize import Encoder, Row
from .formats.schemas import PROMPTED, Stage
from .options import PrepareOptions
from .plural import plural

logger = logging.getLogger(__name__)

FIRST = 100  # rows per source that are searched for the columns of --columns
CHUNK = 500  # rows, at most, that a process tokenises at a time, and KTO's that lend each other their answers


@dataclass
class Prepared:
    """What `prepare` gives: the samples to train on and, where there are, to evaluate on."""

    train: TokenStore | TokenStream
    val: TokenStore | None
    _describe: Callable[[], str]

    @cached_property
    def report(self) -> str:
        """For the log: rows used and dropped, tokens, the shares trained on and of padding, the first sample."""
        return self._describe()

    @cached_property
    def columns(self) -> list[str]:
        """Of prompts, but for `messages`: those that any row has, to train on or to evaluate on; not of a stream."""
        stores = [store for store in (self.train, self.val) if isinstance(store, TokenStore)]
        names = (file.filled for store in stores for file in store.files)
        return sorted(frozenset().union(*names) - {"messages"})


@dataclass(frozen=True)
class _Part:
    """The rows that are taken of a source."""

    source: Source
    file: TokenFile  # of these rows, or of these and more
    rows: np.ndarray  # int64, distinct and sorted
    total: int  # how many to take: beyond their number they repeat
    aside: bool = False  # split off: the file is described with the part that it was split from

    @cached_property
    def samples(self) -> np.ndarray:
        """Numbers of the samples in the file."""
        times, rest = divmod(self.total, max(len(self.rows), 1))
        numbers = [np.flatnonzero(np.isin(self.file.rows, self.rows))] * times
        return np.concatenate([*numbers, np.flatnonzero(np.isin(self.file.rows, self.rows[:rest]))])

    def split(self, ratio: float, random: np.random.Generator) -> "tuple[_Part, _Part]":
        """Two parts that share no row; the second has about `ratio` of them."""
        order = random.permutation(self.rows)
        aside = max(round(len(order) * ratio), 1)
        rest = replace(self, rows=np.sort(order[aside:]), total=self.total - aside)
        return rest, replace(self, rows=np.sort(order[:aside]), total=aside, aside=True)


def prepare(
    options: PrepareOptions,
    tokenizer,
    *,
    stage: Stage,
    use_hf: bool = False,
    hub_token: str | None = None,
    tools: list[dict] | None = None,
    verify: bool = True,
) -> Prepared:
    """Find the tokens of the datasets in the cache, or make them. `tools`: of prompts whose rows have none.

    Knows nothing of ranks. Call it on the first rank of each node, then on the others, with load_from_cache_file true
    and verify false: these find what the first has made or checked.
    Raises ValueError, naming the flag or the file and line, where the options or the data cannot be used, and OSError
    where the cache cannot be written.
    """
    if not options.dataset:
        raise ValueError("--dataset is missing: give files, folders or hub ids")
    if not 0 <= options.split_dataset_ratio < 1:
        raise ValueError(f"--split_dataset_ratio {options.split_dataset_ratio} must be at least 0 and below 1")
    if options.streaming and options.split_dataset_ratio:
        raise ValueError("--streaming true cannot split off rows: give --val_dataset, not --split_dataset_ratio")
    if options.streaming and stage in ("kto", "embedding"):
        raise ValueError(f"--streaming true is not for {stage}, whose loss looks at the samples of all ranks: drop it")
    if options.max_length is not None and options.max_length < 2:
        raise ValueError(f"--max_length {options.max_length} leaves nothing to predict: give at least 2")
    # Of prompts, packs are made of what is generated.
    options = replace(options, packing=False) if stage in PROMPTED else _with_max_length(options)
    sample_length = options.packing_length if options.packing else None
    encoder = Encoder(tokenizer, options, stage, options.columns, sample_length, tools)
    hub = {"use_hf": use_hf, "hub_token": hub_token}
    random = np.random.default_rng(options.data_seed)

    parts_of = partial(_parts, options=options, encoder=encoder, hub=hub, verify=verify)
    val_parts = parts_of("--val_dataset", options.val_dataset, options.val_dataset_shuffle)
    if options.streaming:
        stream = TokenStream(
            sources("--dataset", options.dataset, streaming=True, **hub),
            encoder,
            options.shuffle_buffer_size,
            options.strict,
        )
        _check_columns(options.columns, (source.stream() for source, _ in stream.sources))
        val = _store(val_parts, options.val_dataset_shuffle, random, stage) if val_parts else None
        return Prepared(stream, val, lambda: _describe_stream(stream, val_parts, val, encoder))
    parts = parts_of("--dataset", options.dataset, options.dataset_shuffle)
    _check_columns(options.columns, (part.source.rows(part.rows[:FIRST]) for part in (*parts, *val_parts)))
    if options.split_dataset_ratio and not val_parts:
        pairs = [part.split(options.split_dataset_ratio, random) for part in parts]
        parts, val_parts = [first for first, _ in pairs], [second for _, second in pairs]
        if not sum(part.total for part in parts):
            raise ValueError(
                f"--split_dataset_ratio {options.split_dataset_ratio} leaves no row to train on: give --val_dataset"
            )
    train = _store(parts, options.dataset_shuffle, random, stage)
    val = _store(val_parts, options.val_dataset_shuffle, random, stage) if val_parts else None
    # The tokenizer's threads have done their work: the loader's forks need not warn of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Prepared(train, val, lambda: _describe(options, parts, train, val_parts, val, encoder))


def _check_columns(columns: Collection[str], sources: Iterable[Iterator[Row]]) -> None:
    """Raise ValueError where --columns renames a column that no source has in its first rows."""
    if not columns:
        return
    names: set[str] = set()
    for rows in sources:
        for _, _, row in islice(rows, FIRST):
            names |= row.keys()
    for name in columns:
        if name not in names:
            raise ValueError(
                f"--columns {name}: the first {FIRST} rows of the data have no such column. They have "
                f"{', '.join(sorted(names))}."
            )


def _with_max_length(options: PrepareOptions) -> PrepareOptions:
    """A sample must fit into a pack."""
    if not options.packing:
        return options
    if not (options.packing_length or options.max_length):
        raise ValueError("--packing true needs the length of a pack: give --packing_length or --max_length")
    pack_length = options.packing_length or options.max_length or 0
    max_length = options.max_length or pack_length
    if pack_length < max_length:
        raise ValueError(f"--packing_length {pack_length} must be at least --max_length {max_length}")
    return replace(options, max_length=max_length, packing_length=pack_length)


def _parts(
    flag: str, names: list[str], shuffle: bool, *, options: PrepareOptions, encoder: Encoder, hub: dict, verify: bool
) -> list[_Part]:
    """The sources of a flag with the rows that are taken of each, tokenised."""
    parts = []
    for source, wanted in sources(flag, names, **hub):
        if not (available := len(source)):
            raise ValueError(f"{flag} {source.name} is empty: it holds no row")
        total = wanted or available
        rows = np.arange(min(total, available))
        if shuffle and total < available:
            rows = np.sort(np.random.default_rng(options.data_seed).permutation(available)[:total])
        parts.append(_Part(source, _tokens(source, rows, encoder, options, verify=verify), rows, total))
    return parts


def _tokens(source: Source, rows: np.ndarray, encoder: Encoder, options: PrepareOptions, *, verify: bool) -> TokenFile:
    """The tokens of these rows, from the cache or made now."""
    name = hashlib.blake2b(f"{source.fingerprint} {encoder.fingerprint}".encode(), digest_size=16)
    if len(rows) < len(source):
        name.update(rows.tobytes())

    def build() -> Generator[tuple[pa.RecordBatch, Refusals]]:
        rows_, processes = plural(len(rows), "row"), plural(options.dataset_num_proc, "process")
        logger.info("tokenising %s (%s, %s)", source.name, rows_, processes)
        with tqdm(total=len(rows), desc=f"tokenising {Path(source.name).name}", unit="row", disable=None) as progress:
            for chunk, (batch, refusals) in encode_all(source, rows, encoder, options.dataset_num_proc):
                _be_strict(refusals, options)
                progress.update(chunk)
                yield batch, refusals

    folder = cache_root() / "tokens" / name.hexdigest()
    file = open_or_build(folder, build, rebuild=not options.load_from_cache_file, verify=verify)
    _be_strict(file.refusals, options)
    return file


def _be_strict(refusals: Refusals, options: PrepareOptions) -> None:
    if options.strict and refusals.counts:
        reason, places = next(iter(refusals.places.items()))
        raise ValueError(f"{places[0]}: {reason} (--strict true)")


def encode_all(
    source: Source, rows: np.ndarray, encoder: Encoder, processes: int
) -> Iterator[tuple[int, tuple[pa.RecordBatch, Refusals]]]:
    """Rows as (how many, (their tokens, those dropped)), in order, in chunks of as many rows each, at most CHUNK."""
    chunks = np.array_split(rows, -(-len(rows) // CHUNK))  # a last row alone would have none of KTO's to lend to it
    processes = min(processes, len(chunks))
    if processes <= 1:
        for chunk in chunks:
            yield len(chunk), _encode(source, encoder, chunk)
        return
    with _tokenizers_parallelism(False):  # forked processes take the cores
        pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(source, encoder)
        )
        try:
            for chunk, result in zip(chunks, pool.map(_work, chunks), strict=True):
                yield len(chunk), result
        finally:
            pool.shutdown(cancel_futures=True)


_worker: list = []  # in a worker process: its source and encoder


def _start_worker(source: Source, encoder: Encoder) -> None:
    _worker[:] = source, encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, and they would wait for work forever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _work(chunk: np.ndarray) -> tuple[pa.RecordBatch, Refusals]:
    source, encoder = _worker
    return _encode(source, encoder, chunk)


def _encode(source: Source, encoder: Encoder, chunk: np.ndarray) -> tuple[pa.RecordBatch, Refusals]:
    samples, refusals = encoder.encode(source.rows(chunk))
    return record_batch(samples), refusals


@contextmanager
def _tokenizers_parallelism(wanted: bool):
    """Whether the tokenizer starts threads of its own; a fork would complain of them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = str(wanted).lower()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _store(parts: list[_Part], shuffle: bool, random: np.random.Generator, stage: Stage) -> TokenStore:
    starts = np.cumsum([0] + [len(part.file) for part in parts])
    samples = np.concatenate([part.samples + start for part, start in zip(parts, starts[:-1], strict=True)])
    if not len(samples):
        refusals = "\n".join(f"{part.source.name}:\n{part.file.refusals}" for part in parts)
        raise ValueError(f"no row of the dataset can be used\n{refusals}")
    order, names = random.permutation(samples) if shuffle else samples, [part.source.name for part in parts]
    return TokenStore([part.file for part in parts], order, stage, names)


def _describe(
    options: PrepareOptions,
    parts: list[_Part],
    train: TokenStore,
    val_parts: list[_Part],
    val: TokenStore | None,
    encoder: Encoder,
) -> str:
    lines = ["Training data:", *_describe_parts(parts), describe_store(train)]
    if options.packing_length and options.packing:
        lengths = train.padded_lengths(1, beside=train.stage == "kto")
        packs = pack(lengths, options.packing_length, options.data_seed)
        lines.append(describe_packs(packs, lengths, options.packing_length))
    elif options.padding_free:
        lines.append("  laid end to end, without padding")
    lines += [*_describe_val(val_parts, val), *encoder.renderer.notes()]
    return "\n".join([*lines, describe_sample(train.row(0), train.label(0), train.stage, encoder.tokenizer)])


def _describe_parts(parts: list[_Part]) -> list[str]:
    return [
        describe_source(
            part.source.name, part.total, len(part.samples), Refusals() if part.aside else part.file.refusals
        )
        for part in parts
    ]


def _describe_val(parts: list[_Part], store: TokenStore | None) -> list[str]:
    return ["Evaluation data:", *_describe_parts(parts), describe_store(store)] if store else []


def _describe_stream(stream: TokenStream, val_parts: list[_Part], val: TokenStore | None, encoder: Encoder) -> str:
    names = ", ".join(source.name for source, _ in stream.sources)
    _, first = next(iter(Share(stream, Cursor(0, 1), shuffle=False, seed=0)))
    lines = [f"Training data, streamed: {names}", *_describe_val(val_parts, val), *encoder.renderer.notes()]
    return "\n".join([*lines, describe_sample(first.documents, first.label, stream.stage, encoder.tokenizer)])
