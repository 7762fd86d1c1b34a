"""A micro batch as tensors: documents laid end to end (or padded), positions, boundaries, context-parallel shards."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import lcm
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..dataset.packing import round_up
from ..dataset.store import Document, Group
from ..formats.schemas import ALONE, Stage

Sample = Sequence[Document]  # what one row holds: a document, a pack of several, or nothing (a filler)


class Totals(NamedTuple):
    """What a micro batch is told of its global batch."""

    tokens: float  # sum of the loss weights (of samples of several documents: of the first ones)
    samples: float = 0.0
    peers: Sequence[int] = ()  # documents in this micro batch of each data-parallel rank


@dataclass
class Portable:
    """Tensors that travel between processes as plain bytes: each shared tensor would hold a file descriptor open, and a
    step of many micro batches runs out of them."""

    def pin_memory(self) -> Self:
        parts = {name: value for name, value in vars(self).items() if isinstance(value, Tensor | Portable)}
        return replace(self, **{name: value.pin_memory() for name, value in parts.items()})

    def __getstate__(self) -> dict:
        return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in vars(self).items()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in state.items()}


@dataclass
class Grouping(Portable):
    """Which documents of a micro batch belong together. Documents are counted without fillers and tails of padding."""

    spans: Tensor  # [segments] int64: local lengths of the row's segments in order, documents (padded) and tails
    segments: Tensor  # [documents] int64: which segment each one is
    ends: Tensor  # [documents] int64: where in the local row its last token is; -1: on another context-parallel rank
    tokens: Tensor  # [documents] float32: sum of its loss weights over all context-parallel ranks
    samples: Tensor  # [documents] int64: which sample of the micro batch it is of
    parts: Tensor  # [documents] int64: which of the sample's documents it is (0: chosen, answer, anchor; 1: rejected)
    labels: Tensor  # [samples, numbers] float32; NaN where a label has fewer (a margin that is missing is 0)
    items: Tensor  # [samples] int64: numbers in the store; -1 in a stream
    loss_samples: float  # samples of the whole global batch
    peers: list[int]  # documents in this micro batch of each data-parallel rank; empty in a stream


@dataclass
class Batch(Portable):
    """One micro batch of one data-parallel rank, on the CPU: of a context-parallel group, each rank holds its part."""

    tokens: (
        Tensor  # [rows, local_length] int64; one row when padding_free; local_length = length / context parallel size
    )
    labels: Tensor  # [rows, local_length] int64: the next token of the same document, 0 where loss_weights is 0
    loss_weights: (
        Tensor  # [rows, local_length] float32: 0 on a document's last token, on padding, on what is not trained
    )
    position_ids: Tensor  # [rows, local_length] int64, from 0 in every document
    cu_seqlens: Tensor | None  # [documents + 1] int32, boundaries in the whole row, padding included; None: padded rows
    max_seqlen: int  # the longest document between those boundaries
    cp_index: Tensor | None  # [local_length] int64: positions of the whole row that this rank holds; None: all
    loss_tokens: float  # sum of the loss weights of the whole global batch
    lengths: list[int]  # real lengths of the documents, without padding
    grouping: Grouping | None = None  # None: each document stands for itself (sft, pt)
    beside: "Batch | None" = None  # kto: the mismatched documents of the same samples
    known: dict[str, Tensor] = field(default_factory=dict)  # what passes before training's own have found of it
    # [local_length, layers, topk] int16: the experts that each token is to go to; -1: those that the model chooses.
    experts: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """How the samples of a micro batch become a Batch.

    Under context parallelism each document is padded to a multiple of 2 x size, cut into 2 x size chunks, and rank r
    holds chunks r and 2 x size - 1 - r, so that causal attention costs each rank the same. A tail of padding is a
    document of its own, which no loss weight touches.
    """

    padding_free: bool = True
    pack_length: int | None = None  # every sample fills exactly this many tokens
    length_multiple: int = 1  # of the local length (sequence parallelism splits it)
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    pad_token_id: int = 0
    stage: Stage = "sft"

    @property
    def beside(self) -> bool:
        """Whether a sample's two documents lie in rows of their own."""
        return self.stage == "kto"

    @property
    def document_multiple(self) -> int:
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        return lcm(self.document_multiple, self.context_parallel_size * self.length_multiple)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths of documents with their padding."""
        return round_up(lengths, self.document_multiple)

    def row_length(self, sample_lengths: np.ndarray) -> np.ndarray:
        """Length of the rows of micro batches whose samples have these padded lengths: [..., samples] -> [...]."""
        longest = sample_lengths.sum(-1) if self.padding_free else sample_lengths.max(-1)
        return np.maximum(round_up(longest, self.row_multiple), self.row_multiple)

    def lay(
        self, packs: Sequence[Sequence[Group]], totals: Totals, row_length: int | None = None, width: int = 0
    ) -> Batch:
        """Lay stored samples out, as many to a row as a pack has. `width` is that of the labels at least."""
        if self.stage in ALONE:
            return self.batch(_documents(packs, None), totals.tokens, row_length)
        if not self.beside:
            return self._grouped(packs, None, totals, row_length, width)
        answers, mismatched = (self._grouped(packs, part, totals, row_length, width) for part in (0, 1))
        return replace(answers, beside=mismatched)

    def _grouped(
        self, packs: Sequence[Sequence[Group]], part: int | None, totals: Totals, row_length: int | None, width: int
    ) -> Batch:
        """All documents of the samples, or one part of each, laid out with their grouping."""
        packed = _documents(packs, part)
        batch = self.batch(packed, totals.tokens, row_length)
        boundaries, starts = _cu_seqlens(batch), self._starts(packed)
        ends = starts + np.array(batch.lengths, np.int64) - 1
        if batch.cp_index is not None:
            held = batch.cp_index.numpy()
            places = np.minimum(np.searchsorted(held, ends), len(held) - 1)
            ends = np.where(held[places] == ends, places, -1)
        groups = list(chain.from_iterable(packs))
        counts = [len(group.documents) if part is None else 1 for group in groups]
        labels = np.full(
            (len(groups), max([width, *(len(group.label) for group in groups)])),
            0 if self.stage == "preference" else np.nan,
            np.float32,
        )
        for row, group in zip(labels, groups, strict=True):
            row[: len(group.label)] = group.label
        parts = [np.arange(count) if part is None else np.array([part]) for count in counts]
        numbers = {
            "spans": np.diff(boundaries) // self.context_parallel_size,
            "segments": np.searchsorted(boundaries, starts),
            "ends": ends,
            "samples": np.repeat(np.arange(len(groups)), np.array(counts, np.int64)),
            "parts": np.concatenate([np.empty(0), *parts]),
            "items": np.array([group.item for group in groups]),
        }
        tokens = [loss_weight(weights) for sample in packed for _, weights in sample]
        grouping = Grouping(
            **{name: torch.from_numpy(values.astype(np.int64)) for name, values in numbers.items()},
            tokens=torch.tensor(tokens, dtype=torch.float32),
            labels=torch.from_numpy(labels),
            loss_samples=totals.samples,
            peers=list(totals.peers),
        )
        return replace(batch, grouping=grouping)

    def batch(self, samples: Sequence[Sample], loss_tokens: float, row_length: int | None = None) -> Batch:
        """Lay documents out. `row_length` asks for rows longer than they would be by themselves."""
        lengths = [len(ids) for sample in samples for ids, _ in sample]
        if row_length is None:
            occupied = [self.pack_length or sum(self.padded(np.array([len(ids) for ids, _ in s]))) for s in samples]
            row_length = int(self.row_length(np.array(occupied, np.int64)))
        arrange = self._end_to_end if self.padding_free else self._padded_rows
        tokens, labels, weights, boundaries = arrange(samples, row_length)
        labels[weights == 0] = 0

        spans = np.diff(boundaries)
        positions = np.arange(row_length) - np.repeat(boundaries[:-1], spans)
        index = None
        if self.context_parallel_size > 1:
            chunk = positions // np.repeat(spans // self.document_multiple, spans)
            mirror = self.document_multiple - 1 - self.context_parallel_rank
            index = np.flatnonzero((chunk == self.context_parallel_rank) | (chunk == mirror))
            tokens, labels, weights, positions = tokens[:, index], labels[:, index], weights[:, index], positions[index]
        return Batch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy(weights),
            position_ids=torch.from_numpy(np.tile(positions, (len(tokens), 1))),
            cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)) if self.padding_free else None,
            max_seqlen=int(spans.max()),
            cp_index=None if index is None else torch.from_numpy(index),
            loss_tokens=loss_tokens,
            lengths=lengths,
        )

    def _end_to_end(self, samples: Sequence[Sample], row_length: int):
        """One row: tokens, labels, weights [1, row_length] and the boundaries of its documents."""
        tokens, labels, weights = self._blank(1, row_length)
        starts = self._starts(samples)
        boundaries = [0, *starts.tolist(), row_length]
        for document, start in zip(chain.from_iterable(samples), starts.tolist(), strict=True):
            _write(document, tokens[0, start:], labels[0, start:], weights[0, start:])
            boundaries.append(start + int(self.padded(np.array(len(document[0])))))
        if self.pack_length:
            boundaries += [number * self.pack_length for number in range(1, len(samples) + 1)]
        return tokens, labels, weights, np.unique(boundaries)

    def _starts(self, samples: Sequence[Sample]) -> np.ndarray:
        """Where each document begins in a row of them laid end to end: int64 [documents]."""
        starts, end = [], 0
        for number, sample in enumerate(samples):
            end = number * self.pack_length if self.pack_length else end
            padded = self.padded(np.array([len(ids) for ids, _ in sample], np.int64))
            starts.append(end + np.cumsum(padded) - padded)
            end += int(padded.sum())
        return np.concatenate([np.empty(0, np.int64), *starts])

    def _padded_rows(self, samples: Sequence[Sample], row_length: int):
        """One row per sample, padded on the right."""
        tokens, labels, weights = self._blank(len(samples), row_length)
        for row, sample in enumerate(samples):
            for document in sample:
                _write(document, tokens[row], labels[row], weights[row])
        return tokens, labels, weights, np.array([0, row_length])

    def _blank(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.full((rows, length), self.pad_token_id, np.int64)
        return tokens, np.zeros((rows, length), np.int64), np.zeros((rows, length), np.float32)


def loss_weight(weights: np.ndarray) -> float:
    """Sum of the loss weights of a document: its first token is predicted by nothing."""
    return float(weights[1:].sum(dtype=np.float64))


def total_weight(packs: Iterable[Sequence[Group]]) -> float:
    """Of the first document of each sample."""
    return sum(loss_weight(group.documents[0][1]) for pack in packs for group in pack)


def _documents(packs: Iterable[Sequence[Group]], part: int | None) -> list[Sample]:
    """Of each pack all documents, or one part of each sample."""
    chosen = slice(None) if part is None else slice(part, part + 1)
    return [[document for group in pack for document in group.documents[chosen]] for pack in packs]


def _cu_seqlens(batch: Batch) -> np.ndarray:
    if batch.cu_seqlens is None:
        raise ValueError("--padding_free false has no boundaries, which the documents of a sample are found by")
    return batch.cu_seqlens.numpy().astype(np.int64)


def _write(document: Document, tokens: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
    ids, token_weights = document
    tokens[: len(ids)] = ids
    labels[: len(ids) - 1] = ids[1:]
    weights[: len(ids) - 1] = token_weights[1:]
