"""A micro batch as tensors: documents laid end to end (or padded), positions, boundaries, context-parallel shards."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch
from torch import Tensor

Document = tuple[np.ndarray, np.ndarray]  # token ids [length], loss weights [length]: how much each token is trained on
Sample = Sequence[Document]  # what one row holds: a document, a pack of several, or nothing (a filler)


@dataclass
class Batch:
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

    def pin_memory(self) -> "Batch":
        return replace(self, **{n: v.pin_memory() for n, v in self.__dict__.items() if isinstance(v, Tensor)})

    # Between processes a batch travels as plain bytes: each shared tensor would hold a file descriptor open, and a step
    # of many micro batches runs out of them.
    def __getstate__(self) -> dict:
        return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in self.__dict__.items()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in state.items()}


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

    def batch(self, samples: Sequence[Sample], loss_tokens: float, row_length: int | None = None) -> Batch:
        """Lay samples out. `row_length` asks for rows longer than they would be by themselves."""
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
        boundaries, end = [0], 0
        for sample in samples:
            start = end
            for document in sample:
                _write(document, tokens[0, end:], labels[0, end:], weights[0, end:])
                end += int(self.padded(np.array(len(document[0]))))
                boundaries.append(end)
            if self.pack_length:
                end = start + self.pack_length
                boundaries.append(end)
        return tokens, labels, weights, np.unique([*boundaries, row_length])

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


def total_weight(samples: Iterable[Sample]) -> float:
    return sum(loss_weight(weights) for sample in samples for _, weights in sample)


def _write(document: Document, tokens: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
    ids, token_weights = document
    tokens[: len(ids)] = ids
    labels[: len(ids) - 1] = ids[1:]
    weights[: len(ids) - 1] = token_weights[1:]


def round_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths // multiple) * multiple
