"""Streaming: every rank reads its shard, in an order that the seed determines."""

import gzip
import json
from itertools import islice

import datasets
import numpy as np
import pytest
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.templates.batching.stopping import make_batches


@pytest.fixture
def data(tmp_path):
    for name, rows in (("a", range(40)), ("b", range(100, 120))):
        lines = [json.dumps({"query": f"row {i}?", "response": f"{i}. " * (i % 5 + 1)}) + "\n" for i in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def make(data, tokenizer, rank=0, ranks=1, *, shuffle=True, num_workers=0, options=None, **more):
    options = {
        "dataset": [str(data / "a.jsonl"), str(data / "b.jsonl")],
        "streaming": True,
        "max_length": 64,
        **(options or {}),
    }
    store = prepare(PrepareOptions(**options, shuffle_buffer_size=16), tokenizer, stage="sft").train
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "shuffle": shuffle, "num_workers": num_workers}
    return make_batches(store, rank, ranks, **sizes, **more)


def rows(steps, tokenizer) -> list[int]:
    texts = [tokenizer.decode(batch.tokens[0]) for step in steps for batch in step]
    return [int(part.split("?")[0]) for text in texts for part in text.split("row ")[1:]]


def test_sources_alternate_and_epochs_follow(data, make_tokenizer):
    tokenizer = make_tokenizer()
    batches = make(data, tokenizer, shuffle=False)
    assert batches.steps_per_epoch is None
    order = rows(islice(batches.steps(), 30), tokenizer)  # 120 rows, two epochs
    epoch = [number for pair in zip(range(20), range(100, 120), strict=True) for number in pair] + list(range(20, 40))
    assert order == epoch + epoch
    limited = make(data, tokenizer, shuffle=False, options={"dataset": [f"{data}/a.jsonl#3"]})
    assert rows(islice(limited.steps(), 3), tokenizer) == [0, 1, 2] * 4


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_and_workers_share_the_rows(data, make_tokenizer, ranks, num_workers):
    tokenizer = make_tokenizer()
    seen = []
    for rank in range(ranks):
        batches = make(data, tokenizer, rank, ranks, shuffle=False, num_workers=num_workers)
        seen += rows(islice(batches.steps(), 16 if num_workers else 15), tokenizer)
    assert sorted(set(seen)) == [*range(40), *range(100, 120)]
    assert max(np.bincount(seen)) <= 2 if num_workers else max(np.bincount(seen)) == 1


@pytest.mark.parametrize("files", [1, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hubs_stream_is_shared_too(make_tokenizer, monkeypatch, files, num_workers):
    lines = [{"query": f"row {i}?", "response": str(i)} for i in range(40)]
    stream = datasets.Dataset.from_list(lines).to_iterable_dataset(num_shards=files)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **options: datasets.IterableDatasetDict(train=stream))
    options = PrepareOptions(dataset=["some/rows"], streaming=True)
    store = prepare(options, make_tokenizer(), stage="sft", use_hf=True).train
    seen = []
    for rank in range(2):
        sizes = {"micro_batch_size": 1, "global_batch_size": 2, "shuffle": False, "num_workers": num_workers}
        batches = make_batches(store, rank, 2, **sizes)
        seen += rows(islice(batches.steps(), 20), make_tokenizer())
    assert sorted(seen) == list(range(40))


def test_the_seed_decides(data, make_tokenizer):
    tokenizer = make_tokenizer()

    def order(steps=12, **options):
        return rows(islice(make(data, tokenizer, **options).steps(), steps), tokenizer)

    first = order()
    assert order() == first
    assert order(seed=1) != first
    assert order(shuffle=False) != first
    assert sorted(order(steps=60)[:200]) != sorted(range(40))
    assert set(order(steps=40)) == {*range(40), *range(100, 120)}


def test_packs_of_a_stream(data, make_tokenizer):
    tokenizer = make_tokenizer()
    batches = make(data, tokenizer, packing=True, max_length=128, options={"loss_scale": "all"})
    steps = list(islice(batches.steps(), 20))
    assert {batch.tokens.shape for step in steps for batch in step} == {(1, 256)}
    real = sum(sum(batch.lengths) for step in steps for batch in step)
    assert real / (20 * 2 * 256) > 0.9
    assert batches.loss_tokens_are_local
    for step in steps:
        total = sum(float(batch.loss_weights.sum()) for batch in step)
        assert {batch.loss_tokens for batch in step} == {total}
    order = rows(steps, tokenizer)
    assert max(np.bincount(order)) - min(np.bincount(order)[np.unique(order)]) <= 3  # epochs, save what waits


def test_what_streaming_cannot_do(data, make_tokenizer, caplog):
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match="with pipeline parallelism needs rows of one length"):
        make(data, tokenizer, equal_lengths=True)
    with pytest.raises(ValueError, match="Set --val_dataset"):
        next(make(data, tokenizer).one_pass())
    short = make(data, tokenizer, options={"max_length": 4})
    with pytest.raises(ValueError, match=r"--dataset .*\.jsonl: shard 1 of 1 has no usable row"):
        next(short.steps())
    assert "line 1: longer than --max_length 4 (and all others like it)" in caplog.text
    strict = make(data, tokenizer, options={"max_length": 4, "strict": True})
    with pytest.raises(ValueError, match=r"line 1: longer than --max_length 4 \(--strict true\)"):
        next(strict.steps())


def test_the_report_and_the_validation_set(data, make_tokenizer):
    options = PrepareOptions(
        dataset=[f"{data}/a.jsonl"], val_dataset=[f"{data}/b.jsonl"], streaming=True, dataset_shuffle=False
    )
    prepared = prepare(options, make_tokenizer(), stage="sft")
    assert len(prepared.val) == 20
    assert f"Training data, streamed: {data}/a.jsonl" in prepared.report
    assert "row 0?<|im_end|>\n<|im_start|>assistant\n⟦0. <|im_end|>⟧" in prepared.report


def test_a_gzip_file_streams_as_it_is(data, make_tokenizer):
    (data / "c.jsonl.gz").write_bytes(gzip.compress((data / "a.jsonl").read_bytes(), mtime=0))
    tokenizer = make_tokenizer()
    for rank in range(2):
        plain, packed = (
            make(data, tokenizer, rank, 2, shuffle=False, options={"dataset": [str(data / name)]})
            for name in ("a.jsonl", "c.jsonl.gz")
        )
        order = rows(islice(plain.steps(), 5), tokenizer)
        assert order[:3] == [rank, rank + 2, rank + 4]
        assert rows(islice(packed.steps(), 5), tokenizer) == order


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_odd_rows_are_dropped_however_they_are_read(tmp_path, make_tokenizer, caplog, streaming, processes):
    good = [{"query": f"row {i}?", "response": "yes"} for i in range(600)]
    odd = [{"query": "q", "response": value} for value in (float("nan"), True, "", ["x"])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*odd, *good]))
    options = PrepareOptions(dataset=[str(path)], streaming=streaming, dataset_num_proc=processes)
    prepared = prepare(options, make_tokenizer(), stage="sft")
    said = prepared.report + caplog.text
    for line, reason in enumerate(("is NaN", "is true or false, where text", "is empty", "is a list, where text"), 1):
        assert any(f"{path} line {line}" in part and reason in part for part in said.splitlines()), reason
