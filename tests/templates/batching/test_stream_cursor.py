"""Resumed stream, against an uninterrupted one and by counting documents."""

import json
from collections import Counter

import numpy as np
import pytest
from megaswift.templates.batching.streaming import TokenStream
from megaswift.templates.dataset.dropped_rows import DroppedRows
from megaswift.templates.dataset.samples import EncodedSample
from megaswift.templates.dataset.sources import open_source
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.options import TemplateOptions

from tests.templates.batching.stopping import Documents, Stopped, in_order, make, same, seen, take

ROWS = (61, 100, 23)  # of a file, of a folder of files, of a Parquet file of several groups


class Encoder:
    """Row n gives no document, or one, or several pieces; piece p of it is document 10 n + p of `stopping`."""

    options, columns, stage, vision = TemplateOptions(), {}, "sft", None

    def __init__(self):
        self.encoded = 0  # rows

    def encode(self, rows):
        documents, dropped = [], DroppedRows()
        for number, place, row in rows:
            self.encoded += 1
            if not (pieces := self.pieces(row["n"])):
                dropped.add(UnusableRow("it is refused"), place)
            for piece in range(pieces):
                ids = np.arange(3 + (row["n"] * 7 + piece) % 20, dtype=np.int32) + 1000 * (10 * row["n"] + piece + 1)
                documents.append(EncodedSample(number, [(ids, [(1, 0.0), (len(ids) - 1, 1.0)])], []))
        return documents, dropped

    @staticmethod
    def pieces(n: int) -> int:
        return (1, 1, 0, 3, 1, 1, 2)[n % 7]


EVERY = sorted(10 * n + piece for n in range(sum(ROWS)) for piece in range(Encoder.pieces(n)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("data")
    (folder / "many").mkdir()
    numbers = iter(range(sum(ROWS)))
    for name, rows in (("one", ROWS[0]), ("many/a", 40), ("many/b", 0), ("many/c", ROWS[1] - 40)):
        lines = [json.dumps({"n": next(numbers)}) + "\n\n" for _ in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    pq.write_table(pa.table({"n": list(numbers)}), folder / "last.parquet", row_group_size=7)
    return folder


def stream(data, buffer=16, **options) -> TokenStream:
    names = ["one.jsonl", "many", "last.parquet"]
    return TokenStream([(open_source(str(data / name)), None) for name in names], Encoder(), buffer, strict=False)


LAYOUTS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "packed": {"packing": True, "max_length": 48},
    "packed, in order": {"packing": True, "max_length": 48, "shuffle": False},
}


@pytest.mark.parametrize(
    ("name", "ranks", "num_workers"), [*((name, 2, 0) for name in LAYOUTS), ("shuffled", 1, 2), ("packed", 2, 2)]
)
def test_the_batches_that_would_have_come(data, name, ranks, num_workers):
    random = np.random.default_rng(7)
    options = {**LAYOUTS[name], "num_workers": num_workers, "micro_batch_size": 1, "global_batch_size": 6}
    whole = [take(make(stream(data), rank, ranks, **options), 80) for rank in range(ranks)]
    run, steps = Stopped(stream(data)), [[] for _ in range(ranks)]
    while len(steps[0]) < 80:
        taken = run.run(min(int(random.integers(1, 25)), 80 - len(steps[0])), ranks, **options)
        steps = [before + new for before, new in zip(steps, taken, strict=True)]
        assert run.notes == []
    for rank in range(ranks):
        assert same(steps[rank], whole[rank])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_batch_size_changes_nothing_else(data, name):
    order = seen(take(make(stream(data), **LAYOUTS[name]), 60))
    run, found = Stopped(stream(data)), []
    for micro_batch_size in (1, 2, 4, 3, 1, 2):
        sizes = {"micro_batch_size": micro_batch_size, "global_batch_size": 2 * micro_batch_size}
        found += seen(run.run(7, **LAYOUTS[name] | sizes)[0])
    assert len(found) > 150
    assert found == order[: len(found)]


@pytest.mark.parametrize("seed", range(8))
def test_no_document_is_lost_or_repeated(data, seed):
    """Whatever changes on the way, in the end every document was seen as often as any other."""
    random = np.random.default_rng(seed)
    run, counts, changes = Stopped(stream(data)), Counter(), 0
    for _ in range(10):
        ranks, micro = int(random.integers(1, 5)), int(random.integers(1, 3))
        options = {"num_workers": 2 * int(random.random() < 0.05), "micro_batch_size": micro}
        options |= {"global_batch_size": ranks * micro * 2, "context_parallel_size": int(random.choice([1, 1, 2]))}
        if random.random() < 0.5:
            options |= {"packing": True, "max_length": int(random.choice([48, 96]))}
        counts.update(seen(in_order(run.run(int(random.integers(0, 20)), ranks, **options))))
        changes += bool(run.notes)
    assert changes > 5
    one = {"micro_batch_size": 1, "global_batch_size": 1}
    run.run(0, **one)  # all that is left is dealt out to one reader
    epochs = int(run.cursors["data/0/0/numbers"][4])  # those that were begun by any
    counts.update(seen(run.run(epochs * len(EVERY) - counts.total(), **one)[0]))
    assert counts == Counter(dict.fromkeys(EVERY, epochs))
    counts.update(seen(run.run(len(EVERY), **one)[0]))
    assert counts == Counter(dict.fromkeys(EVERY, epochs + 1))


def test_what_fits_nowhere_does_not_wait_forever(tmp_path):
    """Documents as long as a pack, and a short one among them, that a pack always ends up with alone."""

    class Long(Encoder):
        def encode(self, rows):
            length = {3: 7}
            ids = [np.arange(length.get(row["n"], 48), dtype=np.int32) + 1000 * (row["n"] + 1) for _, _, row in rows]
            return [
                EncodedSample(row[0], [(i, [(len(i), 1.0)])], []) for row, i in zip(rows, ids, strict=True)
            ], DroppedRows()

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(2000)))
    run = Stopped(TokenStream([(open_source(str(tmp_path / "a.jsonl")), None)], Long(), 1, strict=False))
    options = {"packing": True, "max_length": 48, "micro_batch_size": 1, "global_batch_size": 16}
    found = [n for _ in range(5) for n in seen(run.run(5, **options)[0])]  # it goes on waiting through each stop
    assert 200 < found.index(3) < 300
    assert len(set(found)) == len(found)


def test_what_was_given_is_not_tokenised_again(data):
    run = Stopped(stream(data))
    run.run(12)
    run.store = stream(data)
    run.run(0)
    waiting = len(run.cursors["data/0/0/documents"])
    assert waiting < 16 * 2
    run.run(1)  # what waits, the next block, and the one after it meanwhile
    assert run.store.encoder.encoded <= waiting + 2 * 16


def test_cursors_name_documents_only(data):
    run = Stopped(stream(data, buffer=1000))
    run.run(8, packing=True, max_length=48)
    assert sum(array.nbytes for array in run.cursors.values()) < len(EVERY) * 48 + 500
    assert {array.dtype for array in run.cursors.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"seed": 4}, "--data_seed was 3, is 4"),
        ({}, {"shuffle": False}, "--train_dataloader_shuffle was True, is False"),
        ({"buffer": 8}, {}, "--shuffle_buffer_size was 16, is 8"),
    ],
)
def test_another_stream_is_refused(data, change, options, message):
    run = Stopped(stream(data))
    run.run(2)
    run.store = stream(data, **change)
    with pytest.raises(ValueError, match=f"the stream is not the checkpoint's: {message}"):
        run.run(1, **options)


def test_other_sources_are_refused(data):
    run = Stopped(stream(data))
    run.run(2)
    run.store.sources = [(run.store.sources[0][0], 50)]
    with pytest.raises(ValueError, match=r"--dataset was \['.*one.jsonl', .*\], is \['.*one.jsonl#50'\]"):
        run.run(1)


def test_rows_that_are_gone_are_missed(data, tmp_path):
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(50)))
    store = TokenStream([(open_source(str(tmp_path / "one.jsonl")), None)], Encoder(), 1000, strict=False)
    run = Stopped(store)
    run.run(2)
    (tmp_path / "one.jsonl").write_text(json.dumps({"n": 0}) + "\n")
    with pytest.raises(ValueError, match=r"one[.]jsonl: has changed"):
        run.run(1)


def test_streamed_or_not_is_told_apart(data):
    run = Stopped(Documents())
    run.run(1)
    run.store = stream(data)
    with pytest.raises(ValueError, match="--streaming true: the checkpoint's training data was not streamed"):
        run.run(1)
