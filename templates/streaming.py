"""Data that fits nowhere: read, tokenised and packed while training, by every data-parallel rank for itself.

Rank r's worker w reads every (ranks x workers)-th row, so nothing passes through one process, and the order follows
from the seed, the ranks and the workers alone.
"""

import logging
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .encode import Encoder, Row
from .files import Source
from .layout import Batch, Document, Layout, Sample, total_weight
from .packing import pack
from .store import Refusals

logger = logging.getLogger(__name__)

CHUNK = 64  # rows tokenised at a time
PACKS_AHEAD = 16  # packs' worth of tokens among which the best fit is looked for


class TokenStream:
    """The documents of several sources, row by row in turn, each epoch anew."""

    def __init__(self, sources: list[tuple[Source, int | None]], encoder: Encoder, shuffle_buffer: int, strict: bool):
        """Of each source the first so many rows are taken (None: all)."""
        self.sources, self.encoder = sources, encoder
        self.shuffle_buffer, self.strict = shuffle_buffer, strict

    def epoch(self, share: int = 0, shares: int = 1) -> Iterator[Document]:
        """One pass over a share of the rows. Raises ValueError where a row is refused and --strict is true."""
        rows = self._rows(share, shares)
        seen = Refusals()
        while chunk := list(islice(rows, CHUNK)):
            documents, refusals = self.encoder.encode(chunk)
            for reason in refusals.counts.keys() - seen.counts.keys():
                message = f"{refusals.places[reason][0]}: {reason}"
                if self.strict:
                    raise ValueError(f"{message} (--strict true)")
                logger.warning("left out: %s (and all others like it)", message)
            seen.merge(refusals)
            for _, ids, runs in documents:
                tokens, weights = zip(*runs, strict=True)
                yield ids, np.repeat(np.array(weights, np.float32), tokens)

    def endless(self, share: int, shares: int, shuffle: bool, seed: int) -> Iterator[Document]:
        """Epoch after epoch, shuffled within a buffer."""
        waiting: list[Document] = []
        for epoch in count():
            random = np.random.default_rng([seed, epoch, share])
            number = -1
            for number, document in enumerate(self.epoch(share, shares)):
                if not shuffle:
                    yield document
                elif number + 1 < self.shuffle_buffer and epoch == 0:
                    waiting.append(document)
                else:
                    waiting.append(document)
                    place = int(random.integers(len(waiting)))
                    waiting[place], waiting[-1] = waiting[-1], waiting[place]
                    yield waiting.pop()
            if number < 0:
                raise ValueError(
                    f"no row of share {share + 1} of {shares} of --dataset can be used: too small to stream, "
                    "or every row is left out (the warnings say why)"
                )

    def _rows(self, share: int, shares: int) -> Iterator[Row]:
        """One row of each source in turn, until all have ended."""
        streams = [_first(source.stream(share, shares), rows) for source, rows in self.sources]
        while streams:
            rows = [next(stream, None) for stream in streams]
            streams = [stream for stream, row in zip(streams, rows, strict=True) if row is not None]
            yield from (row for row in rows if row is not None)


def _first(rows: Iterator[Row], limit: int | None) -> Iterator[Row]:
    for row in rows:
        if limit is not None and row[0] >= limit:
            return
        yield row


class StreamedBatches(IterableDataset):
    """Micro batches of one data-parallel rank, one after another. Their loss_tokens are their own."""

    def __init__(
        self,
        stream: TokenStream,
        layout: Layout,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        shuffle: bool,
        seed: int,
    ):
        self.stream, self.layout, self.micro_batch_size = stream, layout, micro_batch_size
        self.rank, self.ranks, self.shuffle, self.seed = rank, ranks, shuffle, seed

    def __iter__(self) -> Iterator[Batch]:
        worker: Any = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        share = self.rank * workers + number
        documents = self.stream.endless(share, self.ranks * workers, self.shuffle, self.seed)
        samples = self._packed(documents) if self.layout.pack_length else ([document] for document in documents)
        while True:
            micro_batch = list(islice(samples, self.micro_batch_size))
            yield self.layout.batch(micro_batch, loss_tokens=total_weight(micro_batch))

    def _packed(self, documents: Iterator[Document]) -> Iterator[Sample]:
        """Packs of the best fit among the documents at hand; what the last pack would hold waits for company."""
        capacity = self.layout.pack_length or 0
        waiting: list[Document] = []
        tokens = 0
        for document in documents:
            waiting.append(document)
            tokens += len(document[0])
            if tokens < PACKS_AHEAD * capacity:
                continue
            packs = pack(self.layout.padded(np.array([len(ids) for ids, _ in waiting])), capacity, self.seed)
            for i in range(len(packs) - 1):
                yield [waiting[j] for j in packs[i].tolist()]
            waiting = [waiting[j] for j in packs[len(packs) - 1].tolist()]
            tokens = sum(len(ids) for ids, _ in waiting)
