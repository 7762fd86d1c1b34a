"""Pairs whose answers share their prompt in a row: each document is found again, and rows are planned as they are."""

import json
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megaswift.templates.batching.streaming import TokenStream
from megaswift.templates.dataset.packing import pack
from megaswift.templates.dataset.shared_beginning import MIN_SAVING, shared_beginning
from megaswift.templates.dataset.store import TokenFile
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.templates.batching.pairs import PairStore
from tests.templates.batching.stopping import Stopped, make, make_batches, same, take

SHARED, PACKED = {"shares_prompts": True}, {"packing": True, "max_length": 160}


def sizes(count: int, seed: int = 0) -> list[tuple[int, int, int, int]]:
    random = np.random.default_rng(seed)
    return [
        (int(random.integers(1, 38)), *random.integers(1, 25, 2).tolist(), int(random.integers(0, 2)) * 9)
        for _ in range(count)
    ]


def documents_of(batch) -> list[tuple[list[int], list[tuple[int, float]]]]:
    """Return the tokens of each document of a row, and its labels with their weights, where these are not 0."""
    bounds, grouping = batch.cu_seqlens.tolist(), batch.grouping
    tokens, labels, weights = (x[0].tolist() for x in (batch.tokens, batch.labels, batch.loss_weights))
    prefixes = [-1] * (len(bounds) - 1) if batch.prefixes is None else batch.prefixes.tolist()
    documents = []
    for segment, length in zip(grouping.segments.tolist(), batch.lengths, strict=True):
        places = list(range(bounds[segment], bounds[segment + 1]))
        if prefixes[segment] >= 0:
            places = [*range(bounds[prefixes[segment]], bounds[prefixes[segment] + 1]), *places]
        assert batch.position_ids[0, places].tolist() == list(range(len(places)))
        assert len(places) <= batch.max_seqlen
        scored = [(labels[place], weights[place]) for place in places if weights[place]]
        documents.append(([tokens[place] for place in places[:length]], scored))
    return documents


def expected(documents) -> list[tuple[list[int], list[tuple[int, float]]]]:
    return [
        (ids.tolist(), [(int(i), float(w)) for i, w in zip(ids[1:], weights[1:], strict=True) if w])
        for ids, weights in documents
    ]


document = st.lists(st.tuples(st.integers(1, 2), st.sampled_from([0.0, 0.0, 1.0])), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(document, document, st.integers(0, 12))
def test_shared_beginning(chosen, rejected, common):
    both = [chosen, chosen[:common] + rejected]
    documents = [(np.array([i for i, _ in d], np.int32), np.array([w for _, w in d], np.float32)) for d in both]
    lengths = [
        n
        for n in range(min(map(len, both)))
        if both[0][:n] == both[1][:n] and both[0][n][1] == both[1][n][1] == 0  # and no token is lost
    ]
    longest = max(lengths, default=0)
    assert shared_beginning(documents) == (longest if longest >= MIN_SAVING * sum(map(len, both)) else 0)


@pytest.mark.parametrize("options", [{}, PACKED, {"length_multiple": 8, "equal_lengths": True}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_is_there(options, ranks):
    store, seen = PairStore(sizes(30)), []
    options = {**options, **SHARED, "shuffle": False, "micro_batch_size": 2, "global_batch_size": 8}
    for rank in range(ranks):
        for batch in (batch for step in make(store, rank, ranks, **options).one_pass() for batch in step):
            items = batch.grouping.items.tolist()
            seen += items
            wanted = [store.row(n) for n in items]
            assert documents_of(batch) == [found for documents in wanted for found in expected(documents)]
            assert sum(batch.reused_lengths) == store.shared[items].sum()
            assert batch.lengths == [len(ids) for documents in wanted for ids, _ in documents]
            assert batch.grouping.tokens.tolist() == [w[1:].sum() for documents in wanted for _, w in documents]
            filled = store.lengths[items].sum() - store.shared[items].sum()
            if options == {**SHARED, "shuffle": False, "micro_batch_size": 2, "global_batch_size": 8} and items:
                assert batch.tokens.shape[1] == filled
            assert batch.tokens.shape[1] >= filled
    assert sorted(seen) == list(range(len(store)))
    assert store.shared.min() == 0 < store.shared.max()


def test_packs_are_planned_with_shared_prompts():
    store, options = PairStore(sizes(60)), {**PACKED, "global_batch_size": 2, "micro_batch_size": 1}
    repeated, shared = make(store, **options), make(store, **options, **SHARED)
    assert shared.samples == len(pack(store.lengths - store.shared, 160, 3)) < repeated.samples
    assert shared.padding_share == pytest.approx(1 - (store.lengths - store.shared).sum() / (160 * shared.samples))


def test_a_run_goes_on():
    """Where it stopped; and in layouts that share prompts or not, also from a checkpoint of an earlier version."""
    store = PairStore(sizes(60))
    whole = take(make(store, **PACKED, **SHARED), 12)
    run, steps = Stopped(store), []
    for more in (3, 0, 4, 5):
        steps += run.run(more, **PACKED, **SHARED)[0]
        assert run.notes == []
    assert same(steps, whole)
    run, counts, options = Stopped(store), np.zeros(len(store), int), {**PACKED, "global_batch_size": 4}
    for number, context in enumerate((1, 2, 1, 1)):
        shares = {"shares_prompts": number % 2 == 0}
        [steps] = run.run(1, context_parallel_size=context, **options, **shares)
        assert [("packing has changed" in note) for note in run.notes] == [True] * (number > 0)
        np.add.at(counts, [n for step in steps for batch in step for n in batch.grouping.items.tolist()], 1)
    assert counts.max() == 1
    run = Stopped(store)
    run.run(1, **options)
    run.position["stretches"] = [[rule[:2], done] for rule, done in run.position["stretches"]]
    run.run(1, **options)
    assert run.notes == []
    run.run(1, **options, **SHARED)
    assert len(run.notes) == 1


def row(i: int) -> dict:
    question = f"{i}? " * (3 * i % 11 + 1)
    return {"query": question, "response": f"{i}. " * (i % 5 + 2), "rejected_response": "No. " * (i % 3 + 1)}


def test_stored_and_streamed_pairs(tmp_path, make_tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(40)))
    options = {"dataset": [str(tmp_path / "a.jsonl")], "dataset_shuffle": False, "shuffle_buffer_size": 16}
    tokenizer = make_tokenizer("chatml")
    store = prepare(PrepareOptions(**options), tokenizer, stage="preference").train
    wanted = [shared_beginning(store.row(n)) for n in range(len(store))]
    assert store.shared.tolist() == wanted
    assert max(wanted) > 0
    folder = store.files[0].folder
    table = pa.ipc.open_file(folder / "tokens.arrow").read_all()
    with pa.ipc.new_file(tmp_path / "tokens.arrow", (earlier := table.drop_columns("shared")).schema) as writer:
        writer.write_table(earlier)
    manifest = json.loads((folder / "manifest.json").read_text()) | {
        "bytes": (tmp_path / "tokens.arrow").stat().st_size
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    file = TokenFile(tmp_path)
    assert not file.shared.any()
    assert len(file.shared) == len(store)

    def stream() -> TokenStream:
        train = prepare(PrepareOptions(**options, streaming=True), tokenizer, stage="preference").train
        assert isinstance(train, TokenStream)
        return train

    documents = sorted(found for n in range(len(store)) for found in expected(store.row(n)))
    one = {"micro_batch_size": 1, "global_batch_size": 1, "shuffle": False}
    batches = [batch for step in islice(make_batches(stream(), **one, **SHARED).steps(), 40) for batch in step]
    assert sorted(found for batch in batches for found in documents_of(batch)) == documents
    packed = {"packing": True, "max_length": 600}
    whole = take(make(stream(), **packed, **SHARED), 8)
    filled = [sum(batch.lengths) for step in whole for batch in step]
    assert max(filled) > 600, "more than would fit without sharing"
    run, steps = Stopped(stream()), []
    for more in (3, 0, 5):
        steps += run.run(more, **packed, **SHARED)[0]
        assert run.notes == []
    assert same(steps, whole)
    run.run(1, **packed)
    assert "packing was" in run.notes[0]
