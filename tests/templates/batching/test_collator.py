"""Micro batches, against a naive construction from the documents."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.templates.batching.stopping import Documents, documents_of, make, same, seen, take

LAYOUTS = {
    "end to end": {},
    "padded": {"padding_free": False},
    "packed": {"packing": True, "max_length": 48},
    "aligned": {"length_multiple": 4},
    "equal lengths": {"equal_lengths": True},
    "equal lengths, padded": {"equal_lengths": True, "padding_free": False, "length_multiple": 8},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_labels_weights_and_positions(name):
    """By definition, a label is the next token of the same document, with that token's loss weight."""
    store = Documents()
    batches = make(store, **LAYOUTS[name])
    for batch in (batch for step in take(batches, 2 * batches.steps_per_epoch) for batch in step):
        rows, length = batch.tokens.shape
        assert length % LAYOUTS[name].get("length_multiple", 1) == 0
        assert batch.lengths == [len(store.row(n)[0][0]) for n in documents_of(batch)]
        for row in range(rows):
            for i, token in enumerate(batch.tokens[row].tolist()):
                label, weight = int(batch.labels[row, i]), float(batch.loss_weights[row, i])
                if token == 0:
                    assert (label, weight) == (0, 0)
                    continue
                [(ids, weights)] = store.row(token // 1000 - 1)
                position = token % 1000
                assert batch.position_ids[row, i] == position
                last = position == len(ids) - 1
                assert weight == (0 if last else weights[position + 1])
                assert label == (int(ids[position + 1]) if weight else 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_boundaries(name):
    """cu_seqlens divides the row into whole documents and padding, and position_ids restart in each."""
    for batch in (batch for step in take(make(Documents(), **LAYOUTS[name]), 5) for batch in step):
        if batch.cu_seqlens is None:
            assert not LAYOUTS[name].get("padding_free", True)
            assert batch.max_seqlen == batch.tokens.shape[1]
            continue
        cuts = batch.cu_seqlens.tolist()
        assert cuts[0] == 0
        assert cuts[-1] == batch.tokens.shape[1]
        assert batch.max_seqlen == max(np.diff(cuts)) and min(np.diff(cuts)) > 0  # noqa: PT018
        for start, stop in pairwise(cuts):
            assert batch.position_ids[0, start:stop].tolist() == list(range(stop - start))
            assert len(set((batch.tokens[0, start:stop] // 1000).tolist())) == 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_tokens_are_the_global_batchs(name, ranks):
    everyone = [take(make(Documents(), rank, ranks, **LAYOUTS[name]), 6) for rank in range(ranks)]
    for step in range(6):
        batches = [batch for rank in everyone for batch in rank[step]]
        total = sum(float(batch.loss_weights.sum()) for batch in batches)
        assert {batch.loss_tokens for batch in batches} == {total}


@pytest.mark.parametrize("name", ["end to end", "padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_once(name, ranks):
    store = Documents()
    everyone = [list(make(store, rank, ranks, **LAYOUTS[name]).one_pass()) for rank in range(ranks)]
    assert sorted(n for steps in everyone for n in seen(steps)) == list(range(len(store)))
    assert sum(steps[i][0].loss_tokens for steps in everyone[:1] for i in range(len(steps))) == store.weights.sum()
    assert {len(step) for steps in everyone for step in steps} == {8 // 2 // ranks}


def test_epochs_run_on_without_a_gap_and_are_shuffled_anew():
    store = Documents(count=37)
    order = seen(take(make(store), 10))  # 80 samples
    assert sorted(order[:37]) == sorted(order[37:74]) == list(range(37))
    assert order[:37] != order[37:74]
    assert seen(take(make(store, shuffle=False), 10)) == (list(range(37)) * 3)[:80]
    assert seen(take(make(store, seed=4), 10)) != order
    assert make(store).steps_per_epoch == 5
    assert seen(take(make(Documents(count=3)), 2)) == seen(take(make(Documents(count=3)), 2))  # batch beyond an epoch


def test_workers_change_nothing():
    store, packed = Documents(), {"packing": True, "max_length": 48, "context_parallel_size": 2}
    steps = take(make(store, **packed), 7)
    assert same(take(make(store, **packed, num_workers=2), 7), steps)
    assert same(pickle.loads(pickle.dumps(steps)), steps)


def test_the_loader_leaves_the_random_numbers_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(make(Documents(), num_workers=1), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["end to end", "padded", "packed", "equal lengths"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_share_the_row(name, size):
    """The shards combined by cp_index are the row. Each has two mirrored chunks of every document."""
    store = Documents()
    options = {**LAYOUTS[name], "length_multiple": 4 if name != "packed" else 1}
    ranks = [take(make(store, context_parallel_rank=r, context_parallel_size=size, **options), 3) for r in range(size)]
    for step in range(3):
        for parts in zip(*(rank[step] for rank in ranks), strict=True):
            local = parts[0].tokens.shape[1]
            assert local % options["length_multiple"] == 0
            indexes = torch.cat([part.cp_index for part in parts])
            assert sorted(indexes.tolist()) == list(range(size * local))
            whole = torch.empty(len(parts[0].tokens), size * local, dtype=torch.int64)
            positions, weights = whole.clone(), whole.clone().float()
            for part in parts:
                whole[:, part.cp_index] = part.tokens
                positions[:, part.cp_index] = part.position_ids
                weights[:, part.cp_index] = part.loss_weights
            cuts = [0, size * local] if parts[0].cu_seqlens is None else parts[0].cu_seqlens.tolist()
            for start, stop in pairwise(cuts):
                assert positions[0, start:stop].tolist() == list(range(stop - start))
                chunk, rest = divmod(stop - start, 2 * size)
                assert rest == 0
                for rank, part in enumerate(parts):
                    held = [i - start for i in part.cp_index.tolist() if start <= i < stop]
                    mirror = 2 * size - 1 - rank
                    assert held == [
                        *range(rank * chunk, rank * chunk + chunk),
                        *range(mirror * chunk, (mirror + 1) * chunk),
                    ]
            rows = whole.flatten().tolist()
            for n in documents_of_row(whole, positions):
                ids = store.row(n)[0][0].tolist()
                at = rows.index(ids[0])
                assert rows[at : at + len(ids)] == ids
        total = sum(float(batch.loss_weights.sum()) for rank in ranks for batch in rank[step])
        assert ranks[0][step][0].loss_tokens == total


def documents_of_row(tokens, positions) -> list[int]:
    return [int(token) // 1000 - 1 for token in tokens[(positions == 0) & (tokens > 0)]]


def test_packs_are_exactly_as_long_as_asked():
    for step in take(make(Documents(), packing=True, max_length=48), 3):
        assert [tuple(batch.tokens.shape) for batch in step] == [(1, 96)] * 4
        assert all(48 in batch.cu_seqlens.tolist() for batch in step)


@pytest.mark.parametrize("of_the_step", [False, True])
def test_rows_are_equal_over_the_ranks(of_the_step):
    ranks = [take(make(Documents(), rank, 2, equal_over_ranks=True, equal_lengths=of_the_step), 4) for rank in (0, 1)]
    alone = [take(make(Documents(), rank, 2), 4) for rank in (0, 1)]
    for step in range(4):
        lengths = [[batch.tokens.shape[1] for batch in rank[step]] for rank in ranks]
        longest = [
            max(a.tokens.shape[1], b.tokens.shape[1]) for a, b in zip(alone[0][step], alone[1][step], strict=True)
        ]
        assert lengths[0] == lengths[1] == ([max(longest)] * len(longest) if of_the_step else longest)


def test_equal_lengths_are_the_longest_of_the_step():
    for free in (True, False):
        plain = take(make(Documents(), padding_free=free), 4)
        equal = take(make(Documents(), padding_free=free, equal_lengths=True), 4)
        for step, equal_step in zip(plain, equal, strict=True):
            longest = max(batch.tokens.shape[1] for batch in step)
            assert {batch.tokens.shape[1] for batch in equal_step} == {longest}


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_share(name):
    store = Documents(count=40)  # a whole number of global batches
    batches = [make(store, rank, 2, **LAYOUTS[name]) for rank in range(2)]
    if name == "packed":  # whichever packs a step takes, all are of one length
        documents = sorted(store.lengths.tolist(), reverse=True)
        rooms = []  # the textbook's best fit decreasing
        for length in documents:
            room = min((room for room in rooms if room >= length), default=48)
            rooms = [*rooms, 48] if room == 48 and 48 not in rooms else rooms
            rooms[rooms.index(room)] -= length
        assert batches[0].padding_share == pytest.approx(sum(rooms) / (48 * len(rooms)))
        return
    steps = [step for rank in batches for step in take(rank, 5)]
    total = sum(batch.tokens.numel() for step in steps for batch in step)
    assert batches[0].padding_share == pytest.approx(1 - store.lengths.sum() / total)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch_size": 9},
            "--global_batch_size 9: not a multiple of --micro_batch_size 2 x 1 data-parallel",
        ),
        ({"packing": True, "max_length": 48, "padding_free": False}, "cannot be used with --padding_free false"),
        ({"packing": True, "max_length": 50, "context_parallel_size": 2}, "not a multiple of 4, .*Set 52"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        make(Documents(), **options)
