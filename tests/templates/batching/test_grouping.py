"""Micro batches of samples of several documents: their grouping beside one found by looking for tokens in the rows."""

import json
import pickle
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaswift.templates.batching.streaming import TokenStream
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.templates.batching.stopping import Documents, Groups, Stopped, make, make_batches, plain, same, take

STAGES = ["preference", "kto", "seq_cls", "embedding", "reranker"]


def numbers_of(grouping) -> list[tuple[int, int]]:
    """Of each document the sample in the store and the part."""
    items = grouping.items[grouping.samples].tolist()
    return list(zip(items, grouping.parts.tolist(), strict=True))


def check(parts: list, store, part: int | None) -> None:
    """One micro batch of all context-parallel ranks, and its grouping. `part`: the only one of each sample in it."""
    groupings = [batch.grouping for batch in parts]
    one = groupings[0]
    for other in groupings[1:]:  # what is not about the local row is the same on each rank
        for name in set(vars(one)) - {"ends"}:
            assert plain(getattr(one, name)) == plain(getattr(other, name)), name
    shared = [one.items.shape[0], len(one.labels), len(set(one.samples.tolist()))]
    assert shared == [shared[0]] * 3
    expected = [(n, p) for n in one.items.tolist() for p in ([part] if part is not None else range(len(store.row(n))))]
    assert numbers_of(one) == expected
    assert one.labels.shape[1] == store.label_width
    for row, n in zip(one.labels.tolist(), one.items.tolist(), strict=True):
        label = store.label(n).tolist()
        missing = row[len(label) :]
        assert row[: len(label)] == label
        assert missing == [0] * len(missing) if store.stage == "preference" else np.isnan(missing).all()
    assert sum(one.spans.tolist()) == parts[0].tokens.shape[1]
    assert one.spans.tolist() == (np.diff(parts[0].cu_seqlens.numpy()) // len(parts)).tolist()
    assert parts[0].lengths == [len(store.row(n)[p][0]) for n, p in expected]
    starts = np.concatenate([[0], np.cumsum(one.spans.tolist())])
    for d, (n, p) in enumerate(expected):
        ids, weights = store.row(n)[p]
        segment = one.segments[d]
        held = []
        for batch in parts:
            local = batch.tokens[0].tolist()
            inside = local[starts[segment] : starts[segment + 1]]
            held += [token for token in inside if token]
            assert not {token for token in inside if token} - set(ids.tolist())
            end = int(batch.grouping.ends[d])
            assert (local[end] == ids[-1]) if end >= 0 else (ids[-1] not in local)
        assert sorted(held) == ids.tolist()
        assert sum(int(batch.grouping.ends[d]) >= 0 for batch in parts) == 1
        assert one.tokens[d] == weights[1:].sum()
        scored = [batch.loss_weights[0, starts[segment] : starts[segment + 1]].sum() for batch in parts]
        assert one.tokens[d] == sum(scored)


@settings(max_examples=60, deadline=None)
@given(
    stage=st.sampled_from(STAGES),
    ranks=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2, 3]),
    multiple=st.sampled_from([1, 4]),
    pack=st.sampled_from([None, 192, 240]),
    micro=st.integers(1, 3),
    equal=st.booleans(),
    count=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_groupings(stage, ranks, context, multiple, pack, micro, equal, count, seed):
    """Everything that a batch says of its samples, on every rank, also of a last batch with fillers."""
    store = Groups(stage, count, seed=seed)
    options = {
        "micro_batch_size": micro, "global_batch_size": 2 * micro * ranks, "context_parallel_size": context,
        "length_multiple": multiple, "packing": pack is not None, "max_length": pack, "equal_lengths": equal,
    }  # fmt: skip
    everyone = [
        [list(make(store, rank, ranks, context_parallel_rank=c, **options).one_pass()) for c in range(context)]
        for rank in range(ranks)
    ]
    seen = []
    for step in range(len(everyone[0][0])):
        micro_batches = [[[data[step][m] for data in rank] for rank in everyone] for m in range(2)]
        whole = [batch for ranks_ in micro_batches for parts in ranks_ for batch in parts[:1]]
        items = [n for batch in whole for n in batch.grouping.items.tolist()]
        seen += items
        for parts_of_ranks in micro_batches:
            peers = [len(parts[0].grouping.samples) for parts in parts_of_ranks]
            for parts in parts_of_ranks:
                check(parts, store, 0 if stage == "kto" else None)
                if stage == "kto":
                    check([batch.mismatched for batch in parts], store, 1)
                for batch in parts:
                    assert batch.grouping.documents_per_rank == peers
                    assert batch.grouping.loss_samples == len(items)
                    assert batch.loss_tokens == sum(store.weights[items])
                    assert (batch.mismatched is None) == (stage != "kto")
                    if stage == "kto":
                        assert batch.mismatched.tokens.shape == batch.tokens.shape
                        assert batch.mismatched.grouping.items.tolist() == batch.grouping.items.tolist()
                    if pack:
                        assert batch.tokens.shape[1] == micro * pack // context
        if equal:
            assert len({batch.tokens.shape[1] for batch in whole if batch.lengths}) <= ranks
    assert sorted(seen) == list(range(count))


def test_other_stages_have_no_grouping():
    [[batch, *_]] = take(make(Documents()), 1)
    assert batch.grouping is None
    assert batch.mismatched is None


def test_padded_rows_are_refused():
    with pytest.raises(ValueError, match="--padding_free false cannot be used with preference data"):
        make(Groups("preference"), padding_free=False)


def test_a_sample_that_fits_into_no_pack():
    with pytest.raises(
        ValueError, match=r"--packing_length .* 40: too short for the longest sample, whose documents ha"
    ):
        make(Groups("embedding"), packing=True, max_length=40)
    make(Groups("kto"), packing=True, max_length=24)  # its documents lie in rows of their own


@pytest.mark.parametrize("stage", ["kto", "embedding"])
def test_groupings_travel_between_processes(stage):
    options = {"packing": True, "max_length": 192, "context_parallel_size": 2}
    steps = take(make(Groups(stage), **options), 5)
    assert same(take(make(Groups(stage), num_workers=2, **options), 5), steps)
    state = pickle.dumps(steps)
    assert same(pickle.loads(state), steps)
    assert b"torch" not in state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_groupings_are_pinned():
    [[batch, *_]] = take(make(Groups("kto")), 1)
    pinned = batch.pin_memory()
    assert pinned.mismatched.tokens.is_pinned()
    assert pinned.grouping.ends.is_pinned()
    assert same(pinned, batch)


@pytest.mark.parametrize("stage", ["preference", "kto", "reranker"])
@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 192}])
def test_a_run_goes_on(stage, options):
    """Where it stopped; and in another layout with what is left of the epoch."""
    store, random = Groups(stage), np.random.default_rng(1)
    whole = take(make(store, **options), 20)
    run, steps = Stopped(store), []
    while len(steps) < 20:
        steps += run.run(min(int(random.integers(0, 6)), 20 - len(steps)), **options)[0]
    assert same(steps, whole)
    run, counts = Stopped(store), np.zeros(len(store), int)
    for ranks, context in ((1, 1), (2, 2), (1, 3), (2, 1)):
        changed = {**options, "context_parallel_size": context, "global_batch_size": 4}
        for step in (step for rank in run.run(2, ranks, **changed) for step in rank):
            np.add.at(counts, [n for batch in step for n in batch.grouping.items.tolist()], 1)
    assert counts.max() - counts.min() <= 1


def test_other_labels_are_refused():
    run = Stopped(Groups("kto"))
    run.run(2)
    run.store = Groups("kto")
    run.store.labels[-2] = 1 - run.store.labels[-2]
    with pytest.raises(ValueError, match="content was "):
        run.run(1)
    run.store = Groups("embedding")
    run.position = make(run.store).position()
    run.store.labels = np.pad(run.store.labels, ((0, 0), (0, 1)))
    with pytest.raises(ValueError, match="content was "):
        run.run(1)


def test_the_padding_share():
    for stage in ("preference", "kto"):
        store, options = Groups(stage, count=40), {"context_parallel_size": 2, "global_batch_size": 8}
        batches = make(store, **options)
        rows = [batch for step in batches.one_pass() for batch in step]
        total = sum(2 * (b.tokens.numel() + (b.mismatched.tokens.numel() if b.mismatched else 0)) for b in rows)
        shuffled = make(store, shuffle=False, **options)  # `once` does not shuffle
        assert shuffled.padding_share == pytest.approx(1 - store.lengths.sum() / total)


ROWS = {
    "preference": lambda i: {"query": f"row {i}?", "response": f"{i}. " * (i % 5 + 2), "rejected_response": "No."},
    "seq_cls": lambda i: {"text": f"row {i}? " * (i % 5 + 1), "label": i},
    "reranker": lambda i: {"query": f"row {i}?", "positive": [f"{i}"] * (i % 3), "negative": ["n"] * (i % 4 + 1)},
}


@pytest.mark.parametrize("stage", ROWS)
@pytest.mark.parametrize("options", [{}, {"packing": True, "max_length": 1200}])
def test_streams(tmp_path, make_tokenizer, stage, options):
    """A stream gives the samples that the same rows give planned, and goes on where it was stopped."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(ROWS[stage](i)) + "\n" for i in range(40)))
    given = {"dataset": [str(tmp_path / "a.jsonl")], "dataset_shuffle": False, "shuffle_buffer_size": 16}
    tokenizer = make_tokenizer("qwen3" if stage == "reranker" else "chatml")

    def stream() -> TokenStream:
        store = prepare(PrepareOptions(**given, streaming=True), tokenizer, stage=stage).train
        assert isinstance(store, TokenStream)
        return store

    def samples(step) -> list:
        found = []
        for batch in step:
            g, tokens = batch.grouping, batch.tokens[0].tolist()
            starts = np.concatenate([[0], np.cumsum(g.spans.tolist())])
            documents = [tokens[starts[s] : e + 1] for s, e in zip(g.segments.tolist(), g.ends.tolist(), strict=True)]
            for n, label in enumerate(g.labels.tolist()):
                mine = [d for d, sample in zip(documents, g.samples.tolist(), strict=True) if sample == n]
                found.append((mine, str([number for number in label if number == number])))
        return found

    planned = prepare(PrepareOptions(**given), tokenizer, stage=stage).train
    sizes = {"micro_batch_size": 1, "global_batch_size": 1, "shuffle": False}
    usual = sorted(samples([batch for step in make(planned, **sizes).one_pass() for batch in step]))
    batches = make_batches(stream(), **sizes)
    whole = list(islice(batches.steps(), len(usual)))
    assert sorted(sample for step in whole for sample in samples(step)) == usual
    whole = take(make(stream(), **options), 10)
    for step in whole:
        assert {batch.grouping.loss_samples for batch in step} == {len(samples(step))}
        assert {batch.loss_tokens for batch in step} == {step[0].loss_tokens}
        assert all(batch.grouping.documents_per_rank == [] for batch in step)
        assert all(batch.grouping.items.tolist() == [-1] * len(batch.grouping.items) for batch in step)
    run, steps = Stopped(stream()), []
    for more in (3, 0, 4, 1, 2):
        steps += run.run(more, **options)[0]
        assert run.notes == []
    assert same(steps, whole)
