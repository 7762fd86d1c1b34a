"""Collation of tokenized samples into one micro batch: packed or padded rows, positions, context-parallel shards."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dataset.packing import round_up
from ..dataset.placed_media import Document
from ..dataset.samples import TokenizedSample
from ..formats.schemas import UNGROUPED, Stage
from ..media.processor import VisionProcessor
from .media_batch import MediaBatch
from .media_collation import MicroBatchMedia, runs
from .tensor_dataclass import TensorDataclass

PackedSample = Sequence[Document]  # one document, the documents of a pack, or none (a filler)


class GlobalTotals(NamedTuple):
    """Totals of the global batch that a micro batch belongs to."""

    tokens: float  # sum of the loss weights (of each sample's first document only)
    samples: float = 0.0
    documents_per_rank: Sequence[int] = ()  # documents in this micro batch on each data-parallel rank


@dataclass
class Grouping(TensorDataclass):
    """Assignment of a micro batch's documents to samples. Fillers and padding are not documents."""

    spans: Tensor  # [segments] int64: local lengths of the row's segments in order: padded documents, padding tails
    segments: Tensor  # [documents] int64: segment of each document
    ends: Tensor  # [documents] int64: local position of its last token; -1 on another context-parallel rank
    tokens: Tensor  # [documents] float32: sum of its loss weights over all context-parallel ranks
    samples: Tensor  # [documents] int64: index of its sample in the micro batch
    parts: Tensor  # [documents] int64: index within its sample (0: chosen, answer, anchor; 1: rejected)
    labels: Tensor  # [samples, numbers] float32; NaN where a label has fewer numbers (0 for a missing margin)
    items: Tensor  # [samples] int64: indices in the store; -1 in a stream
    loss_samples: float  # samples of the global batch
    documents_per_rank: list[int]  # documents in this micro batch on each data-parallel rank; empty in a stream


@dataclass
class Batch(TensorDataclass):
    """One micro batch of one data-parallel rank, on the CPU; a context-parallel rank holds its shard of each row.

    rows is 1 if padding_free; local_length = row length / context parallel size.
    """

    tokens: Tensor  # [rows, local_length] int64
    labels: Tensor  # [rows, local_length] int64: next token of the same document; 0 where loss_weights is 0
    loss_weights: Tensor  # [rows, local_length] float32: 0 on a document's last token, padding and untrained tokens
    token_shares: Tensor  # [rows, local_length] float32: 1 / number of tokens in the full rows; 0 for padding
    position_ids: Tensor  # [rows, local_length] int64, from 0 in every document or after its prefix
    cu_seqlens: Tensor | None  # [documents + 1] int32, boundaries in the full row, padding included; None: padded rows
    max_seqlen: int  # longest document between those boundaries
    cp_index: Tensor | None  # [local_length] int64: positions of the full row that this rank holds; None: all
    loss_tokens: float  # sum of the loss weights of the global batch
    lengths: list[int]  # lengths of the documents with their prefixes, without padding
    grouping: Grouping | None = None  # None: one document per sample (sft, pt)
    mismatched: "Batch | None" = None  # kto: prompts of the same samples with answers to other prompts
    # [rows, local_length] int64: number of the token's channel (--enable_channel_loss); -1: none
    channels: Tensor | None = None
    extras: object = None  # further inputs of the task's loss: a dataclass of the task
    # [local_length, layers, topk] int16: experts to route each token to; -1: chosen by the router.
    experts: Tensor | None = None
    # Batches with images or videos: the positions of time, height and width for the rope.
    rope_positions: Tensor | None = None  # [3, rows, local_length] int64; None: position_ids on each axis
    media: MediaBatch | None = None
    # [segments of cu_seqlens] int64: segment whose tokens precede those of each, which attend to it; -1: none.
    prefixes: Tensor | None = None  # None: no document has one
    # [blocks, 3] int64: row, first and last + 1 position in the full row of visual tokens that attend to each other in
    # both directions.
    blocks: Tensor | None = None  # None: there are none

    @property
    def reused_lengths(self) -> list[int]:
        """Lengths of the prefixes of `lengths` that are computed with another document."""
        if self.prefixes is None or self.cu_seqlens is None:
            return []
        numbers = self.prefixes[self.prefixes >= 0]
        is_repeated = torch.ones(len(numbers), dtype=torch.bool)
        is_repeated[[int((numbers == number).nonzero()[0]) for number in numbers.unique()]] = False
        return self.cu_seqlens.diff()[numbers[is_repeated]].tolist()


@dataclass(frozen=True)
class StepDivision:
    """Division of each step's samples into micro batches of the data-parallel ranks.

    equal_lengths: pad the rows of all micro batches of a step to the longest of them
    equal_over_ranks: pad the rows of a micro batch to the longest of any rank
    Raises ValueError, naming the flags, if the sizes do not fit together.
    """

    micro_batch_size: int
    global_batch_size: int
    rank: int = 0
    ranks: int = 1
    equal_lengths: bool = False
    equal_over_ranks: bool = False

    def __post_init__(self) -> None:
        share = self.micro_batch_size * self.ranks
        if self.global_batch_size % share:
            raise ValueError(
                f"--global_batch_size {self.global_batch_size}: not a multiple of --micro_batch_size "
                f"{self.micro_batch_size} x {self.ranks} data-parallel ranks = {share}. Set a multiple."
            )

    @property
    def micro_batches(self) -> int:
        """Number of micro batches of a step and rank."""
        return self.global_batch_size // (self.micro_batch_size * self.ranks)


@dataclass(frozen=True)
class BatchLayout:
    """Shape of micro batches: packed or padded rows, their multiples, and this rank's context-parallel shard.

    Under context parallelism each document is padded to a multiple of 2 x size and cut into 2 x size chunks. Rank r
    holds chunks r and 2 x size - 1 - r, so that causal attention costs each rank the same. Padding at the end of a row
    is a separate document with loss weight 0.
    """

    padding_free: bool = True
    pack_length: int | None = None  # every sample fills exactly this many tokens
    length_multiple: int = 1  # of the local length (sequence parallelism splits it)
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    pad_token_id: int = 0
    stage: Stage = "sft"
    shares_prompts: bool = False  # the documents of a sample share their beginning (TokenizedSample.shared)
    vision: VisionProcessor | None = None  # None: samples have no images or videos
    # Rank within the replica (tensor rank + size * (context rank + size * pipeline rank)), and their number.
    encoder_rank: int = 0
    encoder_ranks: int = 1
    strict: bool = False  # stop at an image or video that breaks, instead of leaving out its document

    @property
    def has_mismatched(self) -> bool:
        """Whether the second document of each sample is in a separate batch (kto)."""
        return self.stage == "kto"

    @property
    def document_multiple(self) -> int:
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        return lcm(self.document_multiple, self.context_parallel_size * self.length_multiple)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Return document lengths with padding."""
        return round_up(lengths, self.document_multiple)

    def row_length(self, sample_lengths: np.ndarray) -> np.ndarray:
        """Return the row length of micro batches from padded sample lengths: [..., samples] -> [...]."""
        longest = sample_lengths.sum(-1) if self.padding_free else sample_lengths.max(-1)
        return np.maximum(round_up(longest, self.row_multiple), self.row_multiple)

    def collate(
        self,
        packs: Sequence[Sequence[TokenizedSample]],
        totals: GlobalTotals,
        row_length: int | None = None,
        label_width: int = 0,
    ) -> Batch:
        """Collate packs of samples into one micro batch, with labels at least `label_width` wide."""
        if self.shares_prompts:
            packs = [[sample.with_prefix() for sample in pack] for pack in packs]
        if self.stage in UNGROUPED:
            batch, _ = self._documents_batch(packs, None, totals.tokens, row_length)
            if all(sample.channel < 0 for pack in packs for sample in pack):
                return batch
            return replace(batch, channels=self._channels(batch, packs))
        if not self.has_mismatched:
            return self._grouped(packs, None, totals, row_length, label_width)
        answers, mismatched = (self._grouped(packs, part, totals, row_length, label_width) for part in (0, 1))
        return replace(answers, mismatched=mismatched)

    def _documents_batch(
        self,
        packs: Sequence[Sequence[TokenizedSample]],
        part: int | None,
        loss_tokens: float,
        row_length: int | None,
    ) -> tuple[Batch, list[list[Document]]]:
        """Lay out all documents of the samples, or one part of each. Returns the batch, and its documents by pack."""
        documents = documents_of(packs, part)
        if not any(sample.media for pack in packs for sample in pack):
            return self.batch(documents, loss_tokens, row_length), documents
        return self._with_media(packs, part, documents, loss_tokens, row_length)

    def _with_media(
        self,
        packs: Sequence[Sequence[TokenizedSample]],
        part: int | None,
        documents: list[list[Document]],
        loss_tokens: float,
        row_length: int | None,
    ) -> tuple[Batch, list[list[Document]]]:
        """Lay out documents, some with images or videos, as `_documents_batch`."""
        assert self.vision is not None, "samples with media need a vision processor"
        selected = slice(None) if part is None else slice(part, part + 1)
        all_samples = list(chain.from_iterable(packs))
        media_by_sample = [sample.media_by_document[selected] for sample in all_samples]
        samples = [  # one per document; that of the owner, so that media which samples share are encoded once
            number if sample.media_owner < 0 else -1 - sample.media_owner
            for number, (sample, media) in enumerate(zip(all_samples, media_by_sample, strict=True))
            for _ in media
        ]
        placed_media = list(chain.from_iterable(media_by_sample))
        if not any(placed_media):
            return self.batch(documents, loss_tokens, row_length), documents
        media = MicroBatchMedia(self.vision, placed_media, samples, self.encoder_rank, self.encoder_ranks, self.strict)
        if media.broken_samples:
            numbers = iter(samples)
            documents = [
                [
                    (ids, np.zeros_like(weights)) if next(numbers) in media.broken_samples else (ids, weights)
                    for ids, weights in pack
                ]
                for pack in documents
            ]
        batch = self.batch(documents, loss_tokens, row_length)
        local_length = batch.tokens.shape[1]
        row_length = local_length * self.context_parallel_size
        rows = starts = np.zeros(len(samples), np.int64)  # row and start of each document
        if batch.cu_seqlens is None:
            rows, boundaries = np.arange(len(samples)), np.array([0, row_length])
        else:
            starts, boundaries = self._starts(documents), batch.cu_seqlens.numpy()
        positions = np.broadcast_to(
            np.arange(row_length) - np.repeat(boundaries[:-1], np.diff(boundaries)), (3, len(batch.tokens), row_length)
        ).copy()
        for number, (row, start, document_media) in enumerate(
            zip(rows.tolist(), starts.tolist(), placed_media, strict=True)
        ):
            if document_media and self.vision.family.has_axes:
                length = batch.lengths[number]
                placed = [(medium.place, medium.plan) for medium in document_media]
                positions[:, row, start : start + length] = self.vision.rope_positions(length, placed)
        owners = self._context_ranks(boundaries)
        index = np.empty(row_length, np.int64)  # in the rank's part of a row
        for rank in range(self.context_parallel_size):
            index[owners == rank] = np.arange(local_length)
        if self.context_parallel_size > 1:
            positions = positions[..., owners == self.context_parallel_rank]
        token_rows, tokens = media.tokens(rows, starts)
        batch = replace(
            batch,
            rope_positions=torch.from_numpy(np.ascontiguousarray(positions)) if self.vision.family.has_axes else None,
            media=media.batch(owners[tokens], token_rows * local_length + index[tokens]),
            blocks=torch.from_numpy(runs(token_rows, tokens)) if self.vision.family.has_blocks else None,
        )
        return batch, documents

    def _channels(self, batch: Batch, packs: Sequence[Sequence[TokenizedSample]]) -> Tensor:
        """Return the channel of each token of a batch, as of its document: int64 [rows, local_length]."""
        numbers = np.array([sample.channel for pack in packs for sample in pack for _ in sample.documents], np.int64)
        if batch.cu_seqlens is None:  # a row per sample
            return torch.from_numpy(numbers)[:, None].expand(batch.tokens.shape).contiguous()
        boundaries, starts = batch.cu_seqlens.numpy(), self._starts(documents_of(packs))
        by_segment = np.full(len(boundaries) - 1, -1)
        by_segment[np.searchsorted(boundaries, starts)] = numbers
        channels = torch.from_numpy(np.repeat(by_segment, np.diff(boundaries)))
        return (channels if batch.cp_index is None else channels[batch.cp_index])[None]

    def _grouped(
        self,
        packs: Sequence[Sequence[TokenizedSample]],
        part: int | None,
        totals: GlobalTotals,
        row_length: int | None,
        label_width: int,
    ) -> Batch:
        """Collate all documents of the samples, or one part of each, with their grouping."""
        batch, packed = self._documents_batch(packs, part, totals.tokens, row_length)
        if batch.cu_seqlens is None:
            raise ValueError("--padding_free false: grouped documents need packed rows. Remove the flag.")
        boundaries, starts = batch.cu_seqlens.numpy().astype(np.int64), self._starts(packed)
        ends, is_document = starts + np.array(batch.lengths, np.int64) - 1, slice(None)
        tokens = np.array([loss_weight(weights) for pack in packed for _, weights in pack])
        if any(sample.prefix is not None for sample in chain.from_iterable(packs)):
            numbers = np.array(_prefix_numbers(packs))
            tokens = tokens + np.where(numbers >= 0, tokens[numbers], 0)
            batch = self._with_prefixes(batch, numbers, np.searchsorted(boundaries, starts))
            is_document = numbers != IS_PREFIX
        starts, ends = starts[is_document], ends[is_document]
        if batch.cp_index is not None:
            local = batch.cp_index.numpy()
            positions = np.minimum(np.searchsorted(local, ends), len(local) - 1)
            ends = np.where(local[positions] == ends, positions, -1)
        samples = list(chain.from_iterable(packs))
        counts = [len(sample.documents) if part is None else 1 for sample in samples]
        labels = np.full(
            (len(samples), max([label_width, *(len(sample.label) for sample in samples)])),
            0 if self.stage == "preference" else np.nan,
            np.float32,
        )
        for row, sample in zip(labels, samples, strict=True):
            row[: len(sample.label)] = sample.label
        parts = [np.arange(count) if part is None else np.array([part]) for count in counts]
        indices = {
            "spans": np.diff(boundaries) // self.context_parallel_size,
            "segments": np.searchsorted(boundaries, starts),
            "ends": ends,
            "samples": np.repeat(np.arange(len(samples)), np.array(counts, np.int64)),
            "parts": np.concatenate([np.empty(0), *parts]),
            "items": np.array([sample.item for sample in samples]),
        }
        grouping = Grouping(
            **{name: torch.from_numpy(values.astype(np.int64)) for name, values in indices.items()},
            tokens=torch.from_numpy(tokens[is_document].astype(np.float32)),
            labels=torch.from_numpy(labels),
            loss_samples=totals.samples,
            documents_per_rank=list(totals.documents_per_rank),
        )
        return replace(batch, grouping=grouping)

    def _with_prefixes(self, batch: Batch, numbers: np.ndarray, segments: np.ndarray) -> Batch:
        """Have documents continue their prefixes.

        numbers: as `_prefix_numbers`; segments: of each document and prefix
        """
        assert batch.cu_seqlens is not None
        assert self.context_parallel_size == 1
        spans = np.diff(batch.cu_seqlens.numpy().astype(np.int64))
        prefixes, has_prefix = np.full(len(spans), -1), numbers >= 0
        prefixes[segments[has_prefix]] = segments[numbers[has_prefix]]
        offsets = np.where(prefixes >= 0, spans[prefixes], 0)
        lengths = np.array(batch.lengths) + offsets[segments]
        return replace(
            batch,
            position_ids=batch.position_ids + torch.from_numpy(np.repeat(offsets, spans)),
            max_seqlen=int((offsets + spans).max()),
            lengths=lengths[numbers != IS_PREFIX].tolist(),
            prefixes=torch.from_numpy(prefixes),
        )

    def batch(self, samples: Sequence[PackedSample], loss_tokens: float, row_length: int | None = None) -> Batch:
        """Lay out documents in rows of `row_length` tokens, by default the shortest that fit."""
        lengths = [len(ids) for sample in samples for ids, _ in sample]
        if row_length is None:
            occupied = [self.pack_length or sum(self.padded(np.array([len(ids) for ids, _ in s]))) for s in samples]
            row_length = int(self.row_length(np.array(occupied, np.int64)))
        lay_out = self._packed_row if self.padding_free else self._padded_rows
        tokens, labels, weights, boundaries = lay_out(samples, row_length)
        labels[weights == 0] = 0

        spans = np.diff(boundaries)
        positions = np.arange(row_length) - np.repeat(boundaries[:-1], spans)
        shares = self._token_shares(samples, row_length)
        index = None
        if self.context_parallel_size > 1:
            index = np.flatnonzero(self._context_ranks(boundaries) == self.context_parallel_rank)
            tokens, labels, weights, shares = (x[:, index] for x in (tokens, labels, weights, shares))
            positions = positions[index]
        return Batch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(labels),
            loss_weights=torch.from_numpy(weights),
            token_shares=torch.from_numpy(shares),
            position_ids=torch.from_numpy(np.tile(positions, (len(tokens), 1))),
            cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)) if self.padding_free else None,
            max_seqlen=int(spans.max()),
            cp_index=None if index is None else torch.from_numpy(index),
            loss_tokens=loss_tokens,
            lengths=lengths,
        )

    def _token_shares(self, samples: Sequence[PackedSample], row_length: int) -> np.ndarray:
        """Return the share of each position in the tokens of the rows: float32 [rows, row_length]; 0 for padding."""
        lengths = np.array([len(ids) for sample in samples for ids, _ in sample], np.int64)
        if self.padding_free:
            changes = np.zeros(row_length + 1, np.int64)
            starts = self._starts(samples)
            np.add.at(changes, starts, 1)
            np.add.at(changes, starts + lengths, -1)
            is_token = changes.cumsum()[None, :-1] > 0
        else:
            rows = np.array([sum(len(ids) for ids, _ in sample) for sample in samples], np.int64)
            is_token = np.arange(row_length) < rows[:, None]
        return is_token.astype(np.float32) / max(int(lengths.sum()), 1)

    def _context_ranks(self, boundaries: np.ndarray) -> np.ndarray:
        """Return the context-parallel rank that holds each position of a row with these documents."""
        spans = np.diff(boundaries)
        positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], spans)
        if self.context_parallel_size == 1:
            return np.zeros(len(positions), np.int64)
        chunks = positions // np.repeat(spans // self.document_multiple, spans)
        return np.minimum(chunks, self.document_multiple - 1 - chunks)

    def _packed_row(self, samples: Sequence[PackedSample], row_length: int):
        """Return one packed row (tokens, labels, weights: [1, row_length]) and its document boundaries."""
        tokens, labels, weights = self._blank(1, row_length)
        starts = self._starts(samples)
        boundaries = [0, *starts.tolist(), row_length]
        for document, start in zip(chain.from_iterable(samples), starts.tolist(), strict=True):
            _write(document, tokens[0, start:], labels[0, start:], weights[0, start:])
            boundaries.append(start + int(self.padded(np.array(len(document[0])))))
        if self.pack_length:
            boundaries += [number * self.pack_length for number in range(1, len(samples) + 1)]
        return tokens, labels, weights, np.unique(boundaries)

    def _starts(self, samples: Sequence[PackedSample]) -> np.ndarray:
        """Return the first position of each document in a packed row: int64 [documents]."""
        starts, end = [], 0
        for number, sample in enumerate(samples):
            end = number * self.pack_length if self.pack_length else end
            padded = self.padded(np.array([len(ids) for ids, _ in sample], np.int64))
            starts.append(end + np.cumsum(padded) - padded)
            end += int(padded.sum())
        return np.concatenate([np.empty(0, np.int64), *starts])

    def _padded_rows(self, samples: Sequence[PackedSample], row_length: int):
        """Return one right-padded row per sample (tokens, labels, weights: [samples, row_length]) and its ends."""
        tokens, labels, weights = self._blank(len(samples), row_length)
        for row, sample in enumerate(samples):
            for document in sample:
                _write(document, tokens[row], labels[row], weights[row])
        return tokens, labels, weights, np.array([0, row_length])

    def _blank(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.full((rows, length), self.pad_token_id, np.int64)
        return tokens, np.zeros((rows, length), np.int64), np.zeros((rows, length), np.float32)


def loss_weight(weights: np.ndarray) -> float:
    """Return the sum of a document's loss weights without that of its first token, which is not predicted."""
    return float(weights[1:].sum(dtype=np.float64))


def total_weight(packs: Iterable[Sequence[TokenizedSample]]) -> float:
    """Return the sum of the loss weights of each sample's first document."""
    return sum(loss_weight(sample.documents[0][1]) for pack in packs for sample in pack)


def documents_of(packs: Iterable[Sequence[TokenizedSample]], part: int | None = None) -> list[list[Document]]:
    """Return the documents of each pack, after their prefixes: all, or the one with index `part` of each sample."""
    selected = slice(None) if part is None else slice(part, part + 1)
    documents: list[list[Document]] = []
    last_prefix = None
    for pack in packs:
        documents.append([])
        for sample in pack:
            if sample.prefix is not None and sample.prefix is not last_prefix:
                documents[-1].append(sample.prefix)
            last_prefix = sample.prefix
            documents[-1] += sample.documents[selected]
    return documents


NO_PREFIX, IS_PREFIX = -1, -2


def _prefix_numbers(packs: Iterable[Sequence[TokenizedSample]]) -> list[int]:
    """Return the number of the prefix of each document of `documents_of`, NO_PREFIX, or IS_PREFIX of prefixes."""
    numbers: list[int] = []
    last_prefix, last_number = None, NO_PREFIX
    for sample in chain.from_iterable(packs):
        if sample.prefix is not None and sample.prefix is not last_prefix:
            last_number = len(numbers)
            numbers.append(IS_PREFIX)
        last_prefix = sample.prefix
        numbers += [NO_PREFIX if sample.prefix is None else last_number] * len(sample.documents)
    return numbers


def _write(document: Document, tokens: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> None:
    ids, token_weights = document
    tokens[: len(ids)] = ids
    labels[: len(ids) - 1] = ids[1:]
    weights[: len(ids) - 1] = token_weights[1:]
