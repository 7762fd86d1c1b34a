"""Resumed planned data, against an uninterrupted run and by counting documents."""

import numpy as np
import pytest
from megaswift.templates.batching import sample_order

from tests.templates.batching.stopping import Documents, Stopped, in_order, make, same, seen, take

LAYOUTS = {
    "end to end": {},
    "padded": {"padding_free": False},
    "packed": {"packing": True, "max_length": 48},
    "packed, context-parallel": {"packing": True, "max_length": 48, "context_parallel_size": 2},
    "not shuffled": {"shuffle": False},
    "by length": {"by_length": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_batches_that_would_have_come(name):
    store, random = Documents(), np.random.default_rng(1)
    whole = take(make(store, **LAYOUTS[name]), 30)
    run, steps = Stopped(store), []
    while len(steps) < 30:
        workers = int(random.random() < 0.2)
        steps += run.run(min(int(random.integers(0, 7)), 30 - len(steps)), num_workers=workers, **LAYOUTS[name])[0]
        assert run.notes == []
    assert same(steps, whole)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_and_batch_sizes_do_not_change_the_order(name):
    """Nor does context parallelism where a document is a sample."""
    store, random = Documents(), np.random.default_rng(2)
    order = seen(take(make(store, **LAYOUTS[name]), 60))
    run, found = Stopped(store), []
    for _ in range(12):
        ranks, micro = random.choice([1, 2, 3]), random.choice([1, 2])
        options = {"ranks": ranks, "micro_batch_size": micro, "global_batch_size": 2 * ranks * micro}
        if "packed" not in name:
            options["context_parallel_size"] = random.choice([1, 2])
        found += seen(in_order(run.run(int(random.integers(1, 5)), **LAYOUTS[name] | options)))
        assert run.notes == []
    assert len(found) > 2 * len(store)
    assert found == order[: len(found)]


@pytest.mark.parametrize("seed", range(6))
def test_packs_of_another_kind_hold_what_is_left_of_the_epoch(seed):
    store, random = Documents(count=150), np.random.default_rng(seed)
    run, found, changes = Stopped(store), [], 0
    kinds = [(48, 1), (48, 2), (48, 4), (64, 1), (None, 1)]
    while len(found) < 4 * len(store):
        length, context = kinds[random.integers(len(kinds))]
        options = {"packing": length is not None, "max_length": length, "context_parallel_size": context}
        ranks = int(random.choice([1, 2]))
        found += seen(in_order(run.run(int(random.integers(1, 4)), ranks, global_batch_size=4, **options)))
        changes += bool(run.notes)
    assert changes > 10
    for epoch in range(4):
        assert sorted(found[epoch * len(store) :][: len(store)]) == list(range(len(store)))


def test_the_epochs_after_a_change_are_the_usual_ones():
    store, before = Documents(count=150), {"packing": True, "max_length": 48, "context_parallel_size": 2}
    run, after = Stopped(store), {**before, "context_parallel_size": 1, "micro_batch_size": 1, "global_batch_size": 1}
    run.run(3, **before)
    rest = resumed(run, **after).samples_until(1)
    found = seen(run.run(rest, **after)[0])
    assert run.notes[0].startswith("the packing has changed")
    assert f"({len(found)} of 150 documents)" in run.notes[0]
    assert run.position["epoch"] == 1
    usual = make(store, **after)
    whole = take(usual, 2 * usual.samples)
    assert [batch.tokens.tolist() for step in run.run(usual.samples, **after)[0] for batch in step] == [
        batch.tokens.tolist() for step in whole[usual.samples :] for batch in step
    ]


@pytest.mark.parametrize("context", [1, 2])
def test_samples_until(context):
    store, options = Documents(count=400), {"packing": True, "max_length": 48}
    whole = make(store, **options)
    for epochs, quarters in ((0.5, 2), (1, 4), (2.25, 9)):
        assert whole.samples_until(epochs) == -(-quarters * whole.samples // 4)
    run = Stopped(store)
    given = len(seen(run.run(5, **options)[0]))
    options |= {"context_parallel_size": context, "micro_batch_size": 1, "global_batch_size": 1}

    def documents_until(epochs) -> int:
        batches = resumed(run, **options)
        return given + len(seen(take(batches, batches.samples_until(epochs))))

    assert [documents_until(epochs) for epochs in (0.1, 1, 3)] == [given, 400, 1200]
    assert documents_until(0.75) == pytest.approx(0.75 * 400, abs=20)


@pytest.mark.parametrize(
    ("store", "options", "message"),
    [
        (Documents(count=36), {}, "documents was 37, is 36"),
        (Documents(seed=1), {}, "tokens was "),
        (Documents(), {"seed": 4}, "--data_seed was 3, is 4"),
        (Documents(), {"shuffle": False}, "--train_dataloader_shuffle was True, is False"),
    ],
)
def test_other_data_is_refused(store, options, message):
    run = Stopped(Documents())
    run.run(2)
    run.store = store
    with pytest.raises(ValueError, match=f"the training data is not the checkpoint's: .*{message}"):
        run.run(1, **options)


def test_other_tokens_of_the_same_lengths_are_refused():
    run, other = Stopped(Documents()), Documents()
    run.run(2)
    other.documents = [(ids + 1, weights) for ids, weights in other.documents]
    run.store = other
    with pytest.raises(ValueError, match="content was "):
        run.run(1)


def resumed(run: Stopped, **options):
    batches = make(run.store, **options)
    batches.resume(run.position, {})
    return batches


def test_samples_of_similar_length_come_together(monkeypatch):
    monkeypatch.setattr(sample_order, "GROUP", 4)
    lengths = np.array([3, 9, 1, 5, 2, 8, 4, 7, 6, 0])
    order = sample_order.sort_groups(np.arange(10), lengths)
    # Groups of 10 // 4 samples, the longest of all first.
    assert lengths[order].tolist() == [9, 3, 5, 1, 8, 2, 7, 4, 6, 0]
    order = sample_order.sort_groups(np.arange(10)[::-1].copy(), lengths)
    assert lengths[order].tolist() == [9, 0, 7, 4, 8, 2, 5, 1, 6, 3]
    assert sample_order.sort_groups(np.arange(1), lengths[:1]).tolist() == [0]
    monkeypatch.setattr(sample_order, "GROUP", 64)
    store = Documents(count=200)
    spreads = {}
    for by_length in (False, True):
        batches = make(store, by_length=by_length, micro_batch_size=1, global_batch_size=8)
        steps = [[len(batch.tokens.flatten()) for batch in step] for step in take(batches, 25)]
        spreads[by_length] = np.mean([max(step) - min(step) for step in steps])
    assert spreads[True] < spreads[False] / 3


def test_a_changed_order_is_refused():
    store = Documents()
    run = Stopped(store)
    run.run(3, by_length=True)
    with pytest.raises(ValueError, match="--group_by_length was True, is False"):
        resumed(run)
    position = {name: value for name, value in make(store).position().items() if name != "--group_by_length"}
    assert make(store).resume(position, {}) == []  # of an earlier version
