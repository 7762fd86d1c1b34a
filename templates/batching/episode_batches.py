"""Micro batches of a training step from prompts with completions, with the same plan on every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch

from ..dataset.packing import pack_evenly
from ..dataset.placed_media import Document, PlacedMedium
from ..dataset.samples import TokenizedSample
from ..dataset.shared_beginning import MIN_SAVING
from .collator import Batch, BatchLayout, GlobalTotals, documents_of, loss_weight
from .shared_prompts import SharedPrompts

Rows = list[list[list[list[int]]]]  # numbers of documents, by micro batch, rank and sample


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

    pack_length: most tokens of a micro batch, which is one pack; packs are about equally long, and not padded. None: a
        micro batch has micro_batch_size documents
    equal_lengths, equal_over_ranks: as in `Batches`
    multiple: divisor of the number of micro batches; rows of padding fill up the last ones
    shares_prompts: lay out a prompt once for its completions in a row, where that saves tokens
    """

    layout: BatchLayout  # its stage is one of PROMPTED, and its pack_length None
    micro_batch_size: int
    rank: int  # data-parallel
    ranks: int
    pack_length: int | None = None
    equal_lengths: bool = False
    equal_over_ranks: bool = False
    multiple: int = 1
    shares_prompts: bool = False

    def __post_init__(self) -> None:
        if self.layout.pack_length:
            raise ValueError("the length of packs belongs to the plan, not to its layout")
        if self.pack_length and self.micro_batch_size > 1:
            raise ValueError("a micro batch is one pack: micro_batch_size must be 1 with pack_length")

    def batches(self, sequences: Sequences) -> list[Batch]:
        """Return this rank's micro batches of a step. Raises ValueError for a document longer than a pack."""
        lengths = self.layout.padded(np.array([len(ids) for ids in sequences.tokens], np.int64))
        rows, prompts, widths = self._lay_out(sequences, lengths)
        tokens = float(sum(loss_weight(weights) for weights in sequences.weights))
        return [
            self._batch(
                sequences,
                micro_batch[self.rank],
                prompts,
                GlobalTotals(tokens, len(sequences), [sum(map(len, row)) for row in micro_batch]),
                width,
            )
            for micro_batch, width in zip(rows, widths[:, self.rank].tolist(), strict=True)
        ]

    def _lay_out(self, sequences: Sequences, lengths: np.ndarray) -> tuple[Rows, SharedPrompts | None, np.ndarray]:
        """Return `_rows`, the prompts that documents share in a row (None: none), and `_widths`."""
        rows = self._rows(lengths, sequences.media_owners)
        repeated = rows, None, self._widths(rows, lengths, None)
        can_share = self.shares_prompts and not any(sequences.media) and not sequences.experts
        if not can_share or not (self.pack_length or self.micro_batch_size > 1):
            return repeated
        prompts = SharedPrompts(sequences.tokens, sequences.weights)
        if not (prompts.groups >= 0).any():
            return repeated
        if self.pack_length:
            candidates = list(map(self._deal, prompts.packings(self.pack_length, self._sample_multiple)))
        else:
            candidates = [self._rows(lengths, prompts.owners)]
        # A short micro batch takes as long as its kernels' launches, so more of them can take longer with fewer tokens.
        candidates = [candidate for candidate in candidates if len(candidate) <= len(rows)]
        layouts = [(candidate, prompts, self._widths(candidate, lengths, prompts)) for candidate in candidates]
        shared = min(layouts, key=lambda layout: _step_length(layout[2]), default=repeated)
        saves_enough = _step_length(shared[2]) <= (1 - MIN_SAVING) * _step_length(repeated[2])
        return shared if saves_enough else repeated

    def _rows(self, lengths: np.ndarray, owners: list[int]) -> Rows:
        """Assign documents to [micro batches, ranks, samples], each sample a list of documents.

        Documents of a micro batch have similar lengths, and ranks similar numbers of tokens. Without packs, documents
        with the same owner lie in one micro batch of a rank, as far as they fit.
        owners: as Sequences.media_owners, so that media are encoded once; or the number of the prompt
        """
        if self.pack_length:
            samples = [members.tolist() for members in pack_evenly(lengths, self.pack_length, self._sample_multiple)]
        else:
            order = _order_by_owner(lengths, np.array(owners)) if owners else np.argsort(-lengths, kind="stable")
            samples = [[number] for number in order.tolist()]
        return self._deal(samples, by_owner=bool(owners) and not self.pack_length)

    def _deal(self, samples: list[list[int]], *, by_owner: bool = False) -> Rows:
        """Deal samples to micro batches and ranks. by_owner: neighbours lie in one micro batch of a rank"""
        size = self.micro_batch_size * self.ranks
        samples += [[] for _ in range(-len(samples) % self._sample_multiple)]
        micro_batches = []
        for start in range(0, len(samples), size):
            if by_owner:
                firsts = range(start, start + size, self.micro_batch_size)
                micro_batches.append([samples[first : first + self.micro_batch_size] for first in firsts])
                continue
            # Serpentine order over the ranks, 0 1 2 2 1 0 ..., balances their tokens.
            rounds = [samples[first : first + self.ranks] for first in range(start, start + size, self.ranks)]
            ordered = [members if number % 2 == 0 else members[::-1] for number, members in enumerate(rounds)]
            micro_batches.append([[members[rank] for members in ordered] for rank in range(self.ranks)])
        return micro_batches

    @property
    def _sample_multiple(self) -> int:
        """Divisor of the number of samples of a step, to which empty samples are added."""
        return self.micro_batch_size * self.ranks * self.multiple

    def _widths(self, rows: Rows, lengths: np.ndarray, prompts: SharedPrompts | None) -> np.ndarray:
        """Return the tokens of each row, with padding: int64 [micro batches, ranks]."""
        widths = np.array([[self._width(row, lengths, prompts) for row in micro_batch] for micro_batch in rows])
        if self.equal_lengths:
            widths = np.broadcast_to(widths.max(0, keepdims=True), widths.shape)
        if self.equal_over_ranks:
            widths = np.broadcast_to(widths.max(1, keepdims=True), widths.shape)
        return widths

    def _width(self, row: list[list[int]], lengths: np.ndarray, prompts: SharedPrompts | None) -> int:
        documents = list(chain.from_iterable(row))
        tokens = prompts.length(documents) if prompts else lengths[documents].sum()
        return int(self.layout.row_length(np.array([tokens], np.int64)))

    def _batch(
        self,
        sequences: Sequences,
        row: list[list[int]],
        prompts: SharedPrompts | None,
        totals: GlobalTotals,
        width: int,
    ) -> Batch:
        prefixes: list[Document | None] = [None] * len(sequences)
        if prompts:
            row = self._share(row, prompts, prefixes)

        def sample(number: int, values: np.ndarray) -> TokenizedSample:
            start = 0 if (prefix := prefixes[number]) is None else len(prefix[0])
            document = sequences.tokens[number][start:], values[start:]
            media = sequences.media[number] if sequences.media else ()
            owner = sequences.media_owners[number] if sequences.media_owners else -1
            label = np.array([sequences.labels[number]], np.float32)
            return TokenizedSample([document], label, number, media=media, media_owner=owner, prefix=prefix)

        def samples(values: list[np.ndarray]) -> list[list[TokenizedSample]]:
            return [[sample(number, values[number]) for number in numbers] for numbers in row]

        batch = self.layout.collate(samples(sequences.weights), totals, width, 1)

        def at_label_positions(values: list[np.ndarray]) -> torch.Tensor | None:
            return self.layout.batch(documents_of(samples(values)), 0.0, width).loss_weights if values else None

        extras = None
        if (rollout := at_label_positions(sequences.rollout_log_probs)) is not None:
            names = "old_log_probs", "ref_log_probs", "teacher_log_probs", "advantages"
            extras = RolloutExtras(rollout, **{name: at_label_positions(getattr(sequences, name)) for name in names})
        values, returns = at_label_positions(sequences.values), at_label_positions(sequences.returns)
        if values is not None and returns is not None:
            extras = ValueExtras(values, returns)
        return replace(batch, extras=extras, experts=self._experts(sequences, batch) if sequences.experts else None)

    def _share(self, row: list[list[int]], prompts: SharedPrompts, prefixes: list[Document | None]) -> list[list[int]]:
        """Return a row's samples with the documents of a prompt after each other, and set their prefixes."""
        ordered: list[int] = []
        shared: dict[int, Document] = {}
        for number, is_shared in prompts.shared_in(chain.from_iterable(row)):
            ordered.append(number)
            if is_shared:
                prefix = prompts.tokens[number][: prompts.saved[number]]
                untrained = np.zeros(len(prefix), np.float32)
                prefixes[number] = shared.setdefault(int(prompts.groups[number]), (prefix, untrained))
        if self.pack_length:
            return [ordered]
        return [[number] for number in ordered] + [[] for _ in range(len(row) - len(ordered))]

    def _experts(self, sequences: Sequences, batch: Batch) -> torch.Tensor:
        """Return Batch.experts: the experts of each token of the row, -1 for padding."""
        row = np.full((_row_length(batch), *sequences.experts[0].shape[1:]), -1, np.int16)
        for item, start, _, _ in _document_spans(batch):
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
        return {item: row[start : start + length] for item, start, length, _ in _document_spans(batch)}

    def label_values_by_document(
        self, batches: Sequence[Batch], values: Sequence[torch.Tensor]
    ) -> dict[int, np.ndarray]:
        """Split values of this rank's labels, [1, local length] per micro batch, by document: float32 [length] each.

        0 for a document's first token and in a shared prompt, and where another context-parallel rank holds the label.
        """
        by_document = {}
        for batch, label_values in zip(batches, values, strict=True):
            row = _full_row(batch, label_values[0].float().cpu().numpy(), 0)
            for item, start, length, before in _document_spans(batch):
                by_document[item] = np.concatenate([np.zeros(before + 1, np.float32), row[start : start + length - 1]])
        return by_document

    def label_ids(self, batches: Sequence[Batch], starts: np.ndarray) -> list[np.ndarray]:
        """Return the number of the trained label at each position of this rank's micro batches, -1 if there is none.

        A label has the number of the token before it: token i of a document has the number `starts[document] + i`.
        Each array is int64 [local length].
        """
        ids = []
        for batch in batches:
            row = np.full(_row_length(batch), -1)
            for item, start, length, before in _document_spans(batch):
                row[start : start + length] = starts[item] + before + np.arange(length)
            ids.append(np.where(batch.loss_weights[0].numpy() != 0, row[_local_index(batch)], -1))
        return ids


def _step_length(widths: np.ndarray) -> int:
    """Return the tokens that a step has to wait for: the longest row of each micro batch."""
    return int(widths.max(1).sum())


def _order_by_owner(lengths: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the order of documents by the longest of their owner, by owner, then by their own length."""
    longest = np.zeros(owners.max() + 1, np.int64)
    np.maximum.at(longest, owners, lengths)
    return np.lexsort((-lengths, owners, -longest[owners]))


def _document_spans(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, the start in the full row, the length, and the tokens of the prefix of each document."""
    grouping, boundaries = batch.grouping, batch.cu_seqlens
    assert grouping is not None
    assert boundaries is not None
    starts, lengths = boundaries[grouping.segments], torch.tensor(batch.lengths)
    if batch.prefixes is None:
        prefix_lengths = [0] * len(grouping.segments)
    else:
        spans, prefixes = boundaries.diff(), batch.prefixes[grouping.segments]
        lengths = spans[grouping.segments]
        prefix_lengths = torch.where(prefixes >= 0, spans[prefixes], 0).tolist()
    yield from zip(grouping.items.tolist(), starts.tolist(), lengths.tolist(), prefix_lengths, strict=True)


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
