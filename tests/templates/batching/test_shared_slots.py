"""Batches from worker processes, with their large arrays in shared memory."""

import os
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from megaswift.templates.batching import shared_slots
from megaswift.templates.batching.shared_slots import SharedSlots
from megaswift.templates.batching.tensor_dataclass import TensorDataclass
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCHES, WORKERS, PREFETCH = 14, 2, 2


@dataclass
class Media(TensorDataclass):
    pixels: Tensor
    sizes: Tensor


@dataclass
class Batch(TensorDataclass):
    number: int
    tokens: Tensor
    media: Media
    missing: Tensor | None = None


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (4000 + 100 * number, 300), dtype=torch.uint8, generator=generator)
    tokens = torch.randint(0, 1000, (2, 50), generator=generator)
    return Batch(number, tokens, Media(pixels, torch.full((3,), number)))


class Batches(Dataset):
    def __getitem__(self, number: int) -> tuple[Batch, int]:
        return batch(number), os.getpid()


def load(slots: SharedSlots) -> list[tuple[Batch, int]]:
    loader = DataLoader(
        Batches(),
        batch_size=None,
        sampler=range(BATCHES),
        num_workers=WORKERS,
        prefetch_factor=PREFETCH,
        collate_fn=slots.pack,
    )
    return list(loader)


def is_equal(found: Batch, expected: Batch) -> bool:
    return (
        found.number == expected.number
        and found.missing is None
        and torch.equal(found.tokens, expected.tokens)
        and torch.equal(found.media.pixels, expected.media.pixels)
        and torch.equal(found.media.sizes, expected.media.sizes)
    )


@pytest.mark.parametrize("slot_bytes", [2**28, 2**20])  # the arrays fit into a slot, or are pickled
def test_batches_arrive_as_they_were_sent(slot_bytes, monkeypatch):
    monkeypatch.setattr(shared_slots, "SLOT_BYTES", slot_bytes)
    found = load(SharedSlots(WORKERS, PREFETCH + 2))
    assert all(is_equal(sent, batch(number)) for number, (sent, _) in enumerate(found))
    assert len({worker for _, worker in found} - {os.getpid()}) == WORKERS


def test_batches_are_copied_out_of_the_slots():
    """All are kept while the slots are used again."""
    found = load(SharedSlots(WORKERS, PREFETCH + 2))
    found[0][0].media.pixels.zero_()
    assert all(is_equal(sent, batch(number)) for number, (sent, _) in enumerate(found) if number)


def test_a_slot_too_few_is_seen():
    slots = SharedSlots(1, 1)
    first, second = (pickle.dumps(slots.pack(batch(number))) for number in range(2))
    assert is_equal(pickle.loads(second), batch(1))
    assert not is_equal(pickle.loads(first), batch(0))


def test_large_arrays_are_not_pickled():
    slots = SharedSlots(1, 2)
    assert len(pickle.dumps(slots.pack(batch(0)))) < 10_000
    assert len(pickle.dumps(slots.pack({"names": np.array(["a"] * 2**18, dtype=object)}))) > 2**18


def test_there_are_none_without_workers_or_address_space(monkeypatch):
    assert shared_slots.shared_slots(0, 4) is None
    assert shared_slots.shared_slots(1, 4) is not None
    monkeypatch.setattr(shared_slots, "SLOT_BYTES", 2**60)
    assert shared_slots.shared_slots(1, 4) is None
