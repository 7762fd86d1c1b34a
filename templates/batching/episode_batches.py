"""Prompts with their completions, as the micro batches of a step: made while training, the same plan on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..dataset.packing import pack
from ..dataset.store import Group
from .collator import Batch, Layout, Totals, loss_weight


@dataclass
class Sequences:
    """What a step trains on: documents with a number each and, of their tokens, further numbers."""

    tokens: list[np.ndarray]  # int32 [length] each
    weights: list[np.ndarray]  # float32 [length]: 1 on what is trained on
    labels: list[float]  # of each document (Grouping.labels)
    known: dict[str, list[np.ndarray]] = field(default_factory=dict)  # float32 [length]: Batch.known, as labels lie
    experts: list[np.ndarray] = field(default_factory=list)  # int16 [length, layers, topk]: Batch.experts; or none

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Plan:
    """How documents become micro batches. `equal_lengths` and `equal_over_ranks`: as those of `Batches`.

    `multiple`: what the number of micro batches is to be a multiple of; rows of padding fill them up.
    """

    layout: Layout  # of a stage in PROMPTED
    micro_batch_size: int
    rank: int  # data-parallel
    ranks: int
    equal_lengths: bool = False
    equal_over_ranks: bool = False
    multiple: int = 1

    def batches(self, sequences: Sequences) -> list[Batch]:
        """This rank's micro batches of a step. Raises ValueError for a document that is longer than a pack."""
        lengths = self.layout.padded(np.array([len(ids) for ids in sequences.tokens], np.int64))
        rows = self._rows(lengths)  # of each micro batch, of each rank, documents of each of its rows
        widths = np.array([[self._width(row, lengths) for row in micro_batch] for micro_batch in rows])
        if self.equal_lengths:
            widths = np.broadcast_to(widths.max(0, keepdims=True), widths.shape)
        if self.equal_over_ranks:
            widths = np.broadcast_to(widths.max(1, keepdims=True), widths.shape)
        tokens = float(sum(loss_weight(weights) for weights in sequences.weights))
        found = []
        for micro_batch, width in zip(rows, widths[:, self.rank].tolist(), strict=True):
            totals = Totals(tokens, len(sequences), [sum(map(len, row)) for row in micro_batch])
            found.append(self._batch(sequences, micro_batch[self.rank], totals, width))
        return found

    def _rows(self, lengths: np.ndarray) -> list[list[list[list[int]]]]:
        """Documents of about equal length stand in the same micro batch, and ranks have about equally many tokens."""
        each = self.micro_batch_size
        if self.layout.pack_length:
            packs = pack(lengths, self.layout.pack_length)
            samples = [packs[number].tolist() for number in range(len(packs))]
        else:
            samples = [[number] for number in np.argsort(-lengths, kind="stable").tolist()]
        samples += [[] for _ in range(-len(samples) % (each * self.ranks * self.multiple))]
        micro_batches = []
        for start in range(0, len(samples), each * self.ranks):
            dealt = samples[start : start + each * self.ranks]
            # There and back: 0 1 2 2 1 0 ...
            turns = [dealt[turn * self.ranks : (turn + 1) * self.ranks] for turn in range(each)]
            ordered = [turn if number % 2 == 0 else turn[::-1] for number, turn in enumerate(turns)]
            micro_batches.append([[turn[rank] for turn in ordered] for rank in range(self.ranks)])
        return micro_batches

    def _width(self, row: list[list[int]], lengths: np.ndarray) -> int:
        occupied = [self.layout.pack_length or int(lengths[sample].sum()) for sample in row]
        return int(self.layout.row_length(np.array(occupied, np.int64)))

    def _batch(self, sequences: Sequences, row: list[list[int]], totals: Totals, width: int) -> Batch:
        def group(number: int) -> Group:
            document = sequences.tokens[number], sequences.weights[number]
            return Group([document], np.array([sequences.labels[number]], np.float32), number)

        batch = self.layout.lay([[group(number) for number in sample] for sample in row], totals, width, 1)
        known = {}
        for name, values in sequences.known.items():
            # Laid out as loss weights are: beside the label that they are of.
            documents = [[(sequences.tokens[number], values[number]) for number in sample] for sample in row]
            known[name] = self.layout.batch(documents, 0.0, width).loss_weights
        return replace(batch, known=known, experts=self._experts(sequences, batch) if sequences.experts else None)

    def _experts(self, sequences: Sequences, batch: Batch) -> torch.Tensor:
        """Beside the tokens of a row of documents; nothing is said of padding."""
        items, starts, length = _places(batch)
        whole = np.full((length, *sequences.experts[0].shape[1:]), -1, np.int16)
        for item, start in zip(items, starts, strict=True):
            of_document = sequences.experts[item]
            whole[start : start + len(of_document)] = of_document
        return torch.from_numpy(whole if batch.cp_index is None else whole[batch.cp_index.numpy()])

    def of_tokens(self, batch: Batch, values: np.ndarray) -> dict[int, np.ndarray]:
        """Numbers of this rank's tokens, [local length, ...] of a micro batch -> of each document's, [length, ...]; -1
        where another context-parallel rank has the token."""
        items, starts, length = _places(batch)
        whole = np.full((length, *values.shape[1:]), -1, values.dtype)
        whole[slice(None) if batch.cp_index is None else batch.cp_index.numpy()] = values
        each = zip(items, starts, batch.lengths, strict=True)
        return {item: whole[start : start + tokens] for item, start, tokens in each}

    def by_document(self, batches: Sequence[Batch], values: Sequence[torch.Tensor]) -> dict[int, np.ndarray]:
        """Numbers of this rank's labels, [1, local length] of each micro batch -> of each document's tokens [length]
        (0 for its first); under context parallelism 0 where another rank has the token."""
        found = {}
        for batch, of_batch in zip(batches, values, strict=True):
            items, starts, length = _places(batch)
            whole = np.zeros(length, np.float32)
            own = of_batch[0].float().cpu().numpy()
            whole[slice(None) if batch.cp_index is None else batch.cp_index.numpy()] = own
            for item, start, tokens in zip(items, starts, batch.lengths, strict=True):
                found[item] = np.concatenate([np.zeros(1, np.float32), whole[start : start + tokens - 1]])
        return found

    def of(self, rank: int, context_rank: int) -> "Plan":
        """The same of another data- and context-parallel rank."""
        return replace(self, rank=rank, layout=replace(self.layout, context_parallel_rank=context_rank))

    def numbers(self, batches: Sequence[Batch], starts: np.ndarray) -> list[np.ndarray]:
        """Which trained label is at each place of this rank's micro batches, int64 [local length]; -1: none.

        Labels are counted by the tokens that they are behind: that of a document's token i is `starts` [documents] of
        it, plus i.
        """
        found = []
        for batch in batches:
            items, first, length = _places(batch)
            whole = np.full(length, -1)
            for item, start, tokens in zip(items, first, batch.lengths, strict=True):
                whole[start : start + tokens] = starts[item] + np.arange(tokens)
            own = whole if batch.cp_index is None else whole[batch.cp_index.numpy()]
            found.append(np.where(batch.loss_weights[0].numpy() != 0, own, -1))
        return found


def _places(batch: Batch) -> tuple[list[int], list[int], int]:
    """The numbers of a micro batch's documents, where in the whole row each begins, and the row's length."""
    grouping, boundaries = batch.grouping, batch.cu_seqlens
    assert grouping is not None
    assert boundaries is not None
    return grouping.items.tolist(), boundaries[grouping.segments].tolist(), int(boundaries[-1])
