"""Micro batches of a training step from prompts with completions, with the same plan on every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..dataset.packing import pack
from ..dataset.placed_media import PlacedMedium
from ..dataset.samples import TokenizedSample
from .collator import Batch, BatchLayout, GlobalTotals, loss_weight


@dataclass
class RolloutExtras:
    """Log-probabilities of a micro batch's labels: fp32 [1, local length] each, 0 outside of completions."""

    rollout_log_probs: torch.Tensor  # by the engine that generated them
    old_log_probs: torch.Tensor | None = None  # by the policy before the steps on this rollout batch
    ref_log_probs: torch.Tensor | None = None  # by the reference
    teacher_log_probs: torch.Tensor | None = None  # by the teacher
    advantages: torch.Tensor | None = None  # per token; None: the document's label


@dataclass
class ValueExtras:
    """Targets of a critic at a micro batch's labels: fp32 [1, local length] each, 0 outside of completions."""

    values: torch.Tensor  # by the critic before the steps on this rollout batch
    returns: torch.Tensor


@dataclass
class Sequences:
    """Documents of a training step, with a label per document and values per token."""

    tokens: list[np.ndarray]  # int32 [length] each
    weights: list[np.ndarray]  # float32 [length]: 1 on trained tokens
    labels: list[float]  # of each document (Grouping.labels)
    rollout_log_probs: list[np.ndarray] = field(default_factory=list)  # float32 [length]: by the engine; or none
    old_log_probs: list[np.ndarray] = field(default_factory=list)  # float32 [length]: by the old policy; or none
    ref_log_probs: list[np.ndarray] = field(default_factory=list)  # float32 [length]: by the reference; or none
    teacher_log_probs: list[np.ndarray] = field(default_factory=list)  # float32 [length]: by the teacher; or none
    advantages: list[np.ndarray] = field(default_factory=list)  # float32 [length]: in place of the labels; or none
    values: list[np.ndarray] = field(default_factory=list)  # float32 [length]: ValueExtras, with `returns`; or none
    returns: list[np.ndarray] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)  # int16 [length, layers, topk]: Batch.experts; or none
    media: list[Sequence[PlacedMedium]] = field(default_factory=list)  # images and videos of each document; or none
    media_owners: list[int] = field(default_factory=list)  # equal for documents with the same media; or none

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class BatchPlan:
    """Division of documents into micro batches of all ranks.

    equal_lengths, equal_over_ranks: as in `Batches`
    multiple: divisor of the number of micro batches; rows of padding fill up the last ones
    """

    layout: BatchLayout  # of a stage in PROMPTED
    micro_batch_size: int
    rank: int  # data-parallel
    ranks: int
    equal_lengths: bool = False
    equal_over_ranks: bool = False
    multiple: int = 1

    def batches(self, sequences: Sequences) -> list[Batch]:
        """Return this rank's micro batches of a step. Raises ValueError for a document longer than a pack."""
        lengths = self.layout.padded(np.array([len(ids) for ids in sequences.tokens], np.int64))
        rows = self._rows(lengths, sequences.media_owners)
        widths = np.array([[self._width(row, lengths) for row in micro_batch] for micro_batch in rows])
        if self.equal_lengths:
            widths = np.broadcast_to(widths.max(0, keepdims=True), widths.shape)
        if self.equal_over_ranks:
            widths = np.broadcast_to(widths.max(1, keepdims=True), widths.shape)
        tokens = float(sum(loss_weight(weights) for weights in sequences.weights))
        return [
            self._batch(
                sequences,
                micro_batch[self.rank],
                GlobalTotals(tokens, len(sequences), [sum(map(len, row)) for row in micro_batch]),
                width,
            )
            for micro_batch, width in zip(rows, widths[:, self.rank].tolist(), strict=True)
        ]

    def _rows(self, lengths: np.ndarray, owners: list[int]) -> list[list[list[list[int]]]]:
        """Assign documents to [micro batches, ranks, samples], each sample a list of documents.

        Documents of a micro batch have similar lengths, and ranks similar numbers of tokens. Without packs, documents
        with the same media lie in one micro batch of a rank, as far as they fit, so that these are encoded once there.
        owners: as Sequences.media_owners
        """
        if self.layout.pack_length:
            packs = pack(lengths, self.layout.pack_length)
            samples = [packs[number].tolist() for number in range(len(packs))]
        else:
            order = _order_by_owner(lengths, np.array(owners)) if owners else np.argsort(-lengths, kind="stable")
            samples = [[number] for number in order.tolist()]
        size = self.micro_batch_size * self.ranks
        samples += [[] for _ in range(-len(samples) % (size * self.multiple))]
        micro_batches = []
        for start in range(0, len(samples), size):
            if owners and not self.layout.pack_length:
                firsts = range(start, start + size, self.micro_batch_size)
                micro_batches.append([samples[first : first + self.micro_batch_size] for first in firsts])
                continue
            # Serpentine order over the ranks, 0 1 2 2 1 0 ..., balances their tokens.
            rounds = [samples[first : first + self.ranks] for first in range(start, start + size, self.ranks)]
            ordered = [members if number % 2 == 0 else members[::-1] for number, members in enumerate(rounds)]
            micro_batches.append([[members[rank] for members in ordered] for rank in range(self.ranks)])
        return micro_batches

    def _width(self, row: list[list[int]], lengths: np.ndarray) -> int:
        occupied = [self.layout.pack_length or int(lengths[sample].sum()) for sample in row]
        return int(self.layout.row_length(np.array(occupied, np.int64)))

    def _batch(self, sequences: Sequences, row: list[list[int]], totals: GlobalTotals, width: int) -> Batch:
        def tokenized_sample(number: int) -> TokenizedSample:
            document = sequences.tokens[number], sequences.weights[number]
            media = sequences.media[number] if sequences.media else ()
            owner = sequences.media_owners[number] if sequences.media_owners else -1
            label = np.array([sequences.labels[number]], np.float32)
            return TokenizedSample([document], label, number, media=media, media_owner=owner)

        batch = self.layout.collate(
            [[tokenized_sample(number) for number in sample] for sample in row], totals, width, 1
        )

        def at_label_positions(values: list[np.ndarray]) -> torch.Tensor | None:
            if not values:
                return None
            documents = [[(sequences.tokens[number], values[number]) for number in sample] for sample in row]
            return self.layout.batch(documents, 0.0, width).loss_weights

        extras = None
        if (rollout := at_label_positions(sequences.rollout_log_probs)) is not None:
            names = "old_log_probs", "ref_log_probs", "teacher_log_probs", "advantages"
            extras = RolloutExtras(rollout, **{name: at_label_positions(getattr(sequences, name)) for name in names})
        values, returns = at_label_positions(sequences.values), at_label_positions(sequences.returns)
        if values is not None and returns is not None:
            extras = ValueExtras(values, returns)
        return replace(batch, extras=extras, experts=self._experts(sequences, batch) if sequences.experts else None)

    def _experts(self, sequences: Sequences, batch: Batch) -> torch.Tensor:
        """Return Batch.experts: the experts of each token of the row, -1 for padding."""
        row = np.full((_row_length(batch), *sequences.experts[0].shape[1:]), -1, np.int16)
        for item, start, _ in _document_spans(batch):
            experts = sequences.experts[item]
            row[start : start + len(experts)] = experts
        return torch.from_numpy(row[_local_index(batch)])

    def for_rank(self, rank: int, context_rank: int) -> "BatchPlan":
        """Return the same plan for another data- and context-parallel rank."""
        return replace(self, rank=rank, layout=replace(self.layout, context_parallel_rank=context_rank))

    def token_values_by_document(self, batch: Batch, values: np.ndarray) -> dict[int, np.ndarray]:
        """Split values of this rank's tokens, [local length, ...], by document: [length, ...] each.

        -1 where another context-parallel rank holds the token.
        """
        row = _full_row(batch, values, -1)
        return {item: row[start : start + length] for item, start, length in _document_spans(batch)}

    def label_values_by_document(
        self, batches: Sequence[Batch], values: Sequence[torch.Tensor]
    ) -> dict[int, np.ndarray]:
        """Split values of this rank's labels, [1, local length] per micro batch, by document: float32 [length] each.

        0 for a document's first token, and where another context-parallel rank holds the label.
        """
        by_document = {}
        for batch, label_values in zip(batches, values, strict=True):
            row = _full_row(batch, label_values[0].float().cpu().numpy(), 0)
            for item, start, length in _document_spans(batch):
                by_document[item] = np.concatenate([np.zeros(1, np.float32), row[start : start + length - 1]])
        return by_document

    def label_ids(self, batches: Sequence[Batch], starts: np.ndarray) -> list[np.ndarray]:
        """Return the number of the trained label at each position of this rank's micro batches, -1 if there is none.

        A label has the number of the token before it: token i of a document has the number `starts[document] + i`.
        Each array is int64 [local length].
        """
        ids = []
        for batch in batches:
            row = np.full(_row_length(batch), -1)
            for item, start, length in _document_spans(batch):
                row[start : start + length] = starts[item] + np.arange(length)
            ids.append(np.where(batch.loss_weights[0].numpy() != 0, row[_local_index(batch)], -1))
        return ids


def _order_by_owner(lengths: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the order of documents by the longest of their owner, by owner, then by their own length."""
    longest = np.zeros(owners.max() + 1, np.int64)
    np.maximum.at(longest, owners, lengths)
    return np.lexsort((-lengths, owners, -longest[owners]))


def _document_spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the start in the full row, and the length of each document of a micro batch."""
    grouping, boundaries = batch.grouping, batch.cu_seqlens
    assert grouping is not None
    assert boundaries is not None
    yield from zip(grouping.items.tolist(), boundaries[grouping.segments].tolist(), batch.lengths, strict=True)


def _row_length(batch: Batch) -> int:
    """Return the length of the full row, over all context-parallel ranks."""
    assert batch.cu_seqlens is not None
    return int(batch.cu_seqlens[-1])


def _local_index(batch: Batch) -> slice | np.ndarray:
    """Return the index of this context-parallel rank's positions in the full row."""
    return slice(None) if batch.cp_index is None else batch.cp_index.numpy()


def _full_row(batch: Batch, values: np.ndarray, fill: int) -> np.ndarray:
    """Return values of this rank's positions in the full row, with `fill` at other ranks' positions."""
    row = np.full((_row_length(batch), *values.shape[1:]), fill, values.dtype)
    row[_local_index(batch)] = values
    return row
