"""Documents with identifiable tokens, and the data state that a run saves in a checkpoint."""

import json
from dataclasses import fields
from itertools import islice

import numpy as np
import torch
from megaswift.templates.batching.collator import BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches
from megaswift.templates.batching.tensor_dataclass import TensorDataclass


class Documents:
    """In-memory store. Document n holds tokens 1000 (n + 1), 1000 (n + 1) + 1, ..., which identify it."""

    stage = "sft"

    def __init__(self, count=37, longest=24, seed=0):
        random = np.random.default_rng(seed)
        self.lengths = random.integers(2, longest + 1, count)
        self.documents = []
        for n, length in enumerate(self.lengths):
            weights = random.choice([0.0, 0.5, 1.0], length).astype(np.float32)
            weights[-1] = 1.0
            self.documents.append((np.arange(length, dtype=np.int32) + 1000 * (n + 1), weights))
        self.weights = np.array([weights[1:].sum() for _, weights in self.documents], np.float64)

    def __len__(self):
        return len(self.documents)

    def row(self, i):
        return [self.documents[i]]

    def label(self, i):
        return np.empty(0, np.float32)

    def padded_lengths(self, multiple, separate_rows):
        assert not separate_rows
        return -(-self.lengths // multiple) * multiple


class Groups:
    """In-memory store of multi-document samples. Document p of sample n holds tokens from 1000 (10 n + p + 1) on."""

    def __init__(self, stage, count=37, longest=24, seed=0):
        random = np.random.default_rng(seed)
        self.stage, self.samples, labels = stage, [], []
        for n in range(count):
            documents = []
            for part in range({"preference": 2, "kto": 2, "seq_cls": 1}.get(stage) or int(random.integers(2, 6))):
                length = int(random.integers(1 + (stage in ("preference", "kto")), longest + 1))
                weights = random.choice([0.0, 0.5, 1.0], length).astype(np.float32)
                documents.append((np.arange(length, dtype=np.int32) + 1000 * (10 * n + part + 1), weights))
            self.samples.append(documents)
            numbers = 1 if stage == "kto" else int(random.integers(0, {"preference": 2}.get(stage, 4)))
            labels.append(random.integers(0, 2, numbers).astype(np.float32))
        self.lengths = np.array([sum(len(ids) for ids, _ in documents) for documents in self.samples])
        self.weights = np.array([documents[0][1][1:].sum() for documents in self.samples], np.float64)
        self.document_counts = np.array([len(documents) for documents in self.samples], np.int32)
        self.label_width = max(map(len, labels))
        self.labels = np.full((count, self.label_width), np.nan, np.float32)
        for row, label in zip(self.labels, labels, strict=True):
            row[: len(label)] = label

    def __len__(self):
        return len(self.samples)

    def row(self, i):
        return self.samples[i]

    def label(self, i):
        return self.labels[i][~np.isnan(self.labels[i])]

    def padded_lengths(self, multiple, separate_rows):
        padded = [[-(-len(ids) // multiple) * multiple for ids, _ in documents] for documents in self.samples]
        return np.array([(max if separate_rows else sum)(lengths) for lengths in padded], np.int64)


def make(store, rank=0, ranks=1, **options) -> Batches:
    return make_batches(store, rank, ranks, **{"micro_batch_size": 2, "global_batch_size": 8, "seed": 3, **options})


def make_batches(store, rank=0, ranks=1, *, packing=False, max_length=None, **options) -> Batches:
    """Return Batches from options that are fields of BatchLayout or StepDivision, or arguments of Batches."""
    layout, division = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (BatchLayout, StepDivision)
    )
    layout |= {"stage": store.stage, "pack_length": max_length if packing else None}
    return Batches(store, BatchLayout(**layout), StepDivision(rank=rank, ranks=ranks, **division), **options)


def take(batches: Batches, steps: int) -> list:
    return list(islice(batches.steps(), steps))


def documents_of(batch) -> list[int]:
    starts = batch.tokens[(batch.position_ids == 0) & (batch.tokens > 0)]
    return [int(token) // 1000 - 1 for token in starts]


def seen(steps) -> list[int]:
    """Return the numbers of the documents in the batches of these steps, in order."""
    return [n for step in steps for batch in step for n in documents_of(batch)]


def same(first, second) -> bool:
    return plain(first) == plain(second)


def plain(value):
    """Convert tensors and their dataclasses to nested lists and text, in which NaN equals NaN."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.tolist())
    if isinstance(value, list):
        return [plain(item) for item in value]
    return [plain(item) for item in vars(value).values()] if isinstance(value, TensorDataclass) else value


class Stopped:
    """Data-parallel ranks of a run that stops and resumes."""

    def __init__(self, store):
        self.store, self.position, self.cursors, self.notes = store, None, {}, []

    def run(self, steps: int, ranks: int = 1, **options) -> list[list]:
        """Run all ranks for `steps` steps. Return the steps of each rank."""
        everyone = [make(self.store, rank, ranks, **options) for rank in range(ranks)]
        if self.position is not None:
            for batches in everyone:
                self.notes = batches.resume(self.position, self.cursors)
        taken = [take(batches, steps) for batches in everyone]
        positions = {json.dumps(batches.position()) for batches in everyone}
        assert len(positions) == 1, "it is the same on every rank"
        self.position = json.loads(positions.pop())
        self.cursors = {name: array for batches in everyone for name, array in batches.cursors().items()}
        return taken


def in_order(taken: list[list]) -> list[list]:
    """Merge the ranks' batches into those of one rank: by step, then micro batch, then rank."""
    return [[batch for parts in zip(*step, strict=True) for batch in parts] for step in zip(*taken, strict=True)]
