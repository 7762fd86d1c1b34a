"""Preparation of data from files to stores: cache, selection, split, errors and report."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megaswift.templates import prepare as module
from megaswift.templates.machine import process_scope
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare


@pytest.fixture
def data(tmp_path):
    """Return a dataset of 60 rows that contain their numbers."""
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"query": f"row {i}?", "response": f"{i}. " * (i % 5 + 1)}) + "\n" for i in range(60))
    )
    return path


@pytest.fixture
def built(monkeypatch):
    """Count the rows that are tokenized."""
    counted = []
    original = module.encode_all

    def encode_all(source, rows, *arguments):
        counted.append(len(rows))
        return original(source, rows, *arguments)

    monkeypatch.setattr(module, "encode_all", encode_all)
    return counted


def texts(store, tokenizer) -> list[str]:
    return [tokenizer.decode(store.row(i)[0][0]) for i in range(len(store))]


def numbers(store, tokenizer) -> list[int]:
    return [int(text.split("row ")[1].split("?")[0]) for text in texts(store, tokenizer)]


@pytest.mark.parametrize("loss_scale", ["default", "all"])
def test_tokens_are_those_of_apply_chat_template(data, make_tokenizer, loss_scale):
    tokenizer = make_tokenizer()
    options = PrepareOptions(dataset=[str(data)], dataset_shuffle=False, loss_scale=loss_scale)
    store = prepare(options, tokenizer, stage="sft").train
    for i, line in enumerate(data.read_text().splitlines()):
        row = json.loads(line)
        messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": row["response"]}]
        [(ids, weights)] = store.row(i)
        assert ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
        assert store.lengths[i] == len(ids)
        assert store.weights[i] == weights[1:].sum()
        if loss_scale == "all":
            assert weights.min() == 1
        else:
            assert tokenizer.decode(ids[weights > 0]) == row["response"] + "<|im_end|>"


def test_processes_change_nothing(data, make_tokenizer, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)
    options = PrepareOptions(dataset=[str(data)], load_from_cache_file=False, max_length=40)
    one = prepare(options, make_tokenizer(), stage="sft")
    two = prepare(replace(options, dataset_num_proc=2), make_tokenizer(), stage="sft")
    assert texts(one.train, make_tokenizer()) == texts(two.train, make_tokenizer())
    assert one.report == two.report


@pytest.mark.parametrize("processes", [1, 2])
def test_no_row_of_many_lends_to_itself(tmp_path, make_tokenizer, monkeypatch, processes):
    """KTO's second document has the answer of another row: also where the rows are one more than a chunk takes."""
    monkeypatch.setattr(module, "CHUNK", 5)
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"query": "q", "response": "It is. " * n, "label": True}) for n in range(1, 12))
    )
    options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")], dataset_num_proc=processes)
    store = prepare(options, make_tokenizer(), stage="kto").train
    pairs = [[ids.tolist() for ids, _ in store.row(number)] for number in range(len(store))]
    assert len(pairs) == 11
    assert all(own != lent for own, lent in pairs)


def test_the_cache_is_found_by_what_made_it(data, make_tokenizer, built):
    options = PrepareOptions(dataset=[str(data)])
    prepare(options, make_tokenizer(), stage="sft")
    assert built == [60]
    renamed = data.rename(data.with_name("other.jsonl"))  # by content, wherever it is
    for same in (
        options,
        replace(options, packing=True, packing_length=99, max_length=None),
        replace(options, data_seed=1),
    ):
        if not same.packing:
            prepare(replace(same, dataset=[str(renamed)]), make_tokenizer(), stage="sft")
    assert built == [60]
    options = replace(options, dataset=[str(renamed)])
    prepare(replace(options, load_from_cache_file=False), make_tokenizer(), stage="sft")
    assert built == [60] * 2
    for other in ({"max_length": 50}, {"loss_scale": "all"}, {"system": "s"}, {"columns": {"query": "question"}}):
        prepare(replace(options, **other), make_tokenizer(), stage="sft")
    prepare(options, make_tokenizer("qwen3"), stage="sft")
    assert built == [60] * 7
    with renamed.open("a") as file:
        file.write('{"query": "row 60?", "response": "new"}\n')
    assert 60 in numbers(prepare(options, make_tokenizer(), stage="sft").train, make_tokenizer())
    assert built == [60] * 7 + [61]


@pytest.mark.parametrize("damage", ["cut", "empty", "no manifest", "bad manifest", "no tokens", "changed"])
def test_a_damaged_cache_is_made_anew(data, make_tokenizer, cache, built, damage, caplog):
    options = PrepareOptions(dataset=[str(data)])
    before = texts(prepare(options, make_tokenizer(), stage="sft").train, make_tokenizer())
    [tokens], [manifest] = cache.rglob("tokens.arrow"), cache.rglob("manifest.json")
    match damage:
        case "cut":
            tokens.write_bytes(tokens.read_bytes()[:-9])
        case "empty":
            tokens.write_bytes(b"")
            manifest.write_text(json.dumps({"bytes": 0, "refusals": {}}))
        case "no manifest":
            manifest.unlink()
        case "bad manifest":
            manifest.write_text("{")
        case "no tokens":
            tokens.unlink()
        case "changed":
            bytes_ = bytearray(tokens.read_bytes())
            bytes_[len(bytes_) // 2] ^= 1
            tokens.write_bytes(bytes_)
    assert texts(prepare(options, make_tokenizer(), stage="sft").train, make_tokenizer()) == before
    assert built == [60, 60]
    assert "are damaged and will be rebuilt" in caplog.text


def test_two_runs_build_at_once(data, make_tokenizer, cache):
    options = PrepareOptions(dataset=[str(data)], load_from_cache_file=False)
    tokenizer = make_tokenizer()
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()

    def run():
        barrier.wait()
        for _ in range(5):
            store = prepare(options, tokenizer, stage="sft").train
        results.put(sorted(numbers(store, tokenizer)))

    processes = [context.Process(target=run) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        assert [results.get(timeout=150) for _ in processes] == [list(range(60))] * 3
    finally:
        for process in processes:
            process.join(5)
    assert len(list((cache / "megaswift" / "tokens").iterdir())) == 1


def test_a_full_disk_leaves_nothing_behind(data, make_tokenizer, cache, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megaswift.templates.dataset.cache_entry._ChecksumWriter.write", full)
    with pytest.raises(OSError, match=r"no space left for tokens in .*set MODELSCOPE_CACHE .*on a larger disk"):
        prepare(PrepareOptions(dataset=[str(data)]), make_tokenizer(), stage="sft")
    assert list((cache / "megaswift" / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written(data, make_tokenizer, cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"cannot write tokens to .*Set MODELSCOPE_CACHE"):
        prepare(PrepareOptions(dataset=[str(data)]), make_tokenizer(), stage="sft")


def test_where_caches_live(data, make_tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    prepare(PrepareOptions(dataset=[str(data)]), make_tokenizer(), stage="sft")
    assert not (tmp_path / "hf").exists()
    monkeypatch.delenv("MODELSCOPE_CACHE")
    prepare(PrepareOptions(dataset=[str(data)]), make_tokenizer(), stage="sft")
    assert len(list((tmp_path / "hf" / "megaswift" / "tokens").iterdir())) == 1


def test_rows_taken_and_repeated(data, make_tokenizer, built):
    tokenizer = make_tokenizer()

    def taken(spec, **options):
        return numbers(prepare(PrepareOptions(dataset=[spec], **options), tokenizer, stage="sft").train, tokenizer)

    assert taken(f"{data}#10", dataset_shuffle=False) == list(range(10))
    assert built == [10]
    some = taken(f"{data}#10")
    assert len(set(some)) == 10
    assert sorted(some) != list(range(10))
    assert sorted(taken(f"{data}#10", data_seed=1)) != sorted(some)
    assert taken(f"{data}#10") == some
    repeated = taken(f"{data}#150")
    assert np.bincount(repeated).tolist() == [3] * 30 + [2] * 30
    assert built == [10, 10, 10, 60]
    twice = PrepareOptions(dataset=[str(data), f"{data}#5"], dataset_shuffle=False)
    assert numbers(prepare(twice, tokenizer, stage="sft").train, tokenizer) == [*range(60), *range(5)]


def test_validation_data(data, make_tokenizer, built):
    tokenizer = make_tokenizer()
    split = prepare(PrepareOptions(dataset=[f"{data}#90"], split_dataset_ratio=0.1), tokenizer, stage="sft")
    aside, rest = numbers(split.val, tokenizer), numbers(split.train, tokenizer)
    assert len(aside) == len(set(aside)) == 6
    assert set(aside) | set(rest) == set(range(60))
    assert not set(aside) & set(rest)
    assert len(rest) == 84
    own = prepare(PrepareOptions(dataset=[str(data)], val_dataset=[f"{data}#4"]), tokenizer, stage="sft")
    assert numbers(own.val, tokenizer) == [0, 1, 2, 3]
    assert prepare(PrepareOptions(dataset=[str(data)]), tokenizer, stage="sft").val is None
    assert built == [60, 4]


LONG = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 99}]


def test_the_report(tmp_path, make_tokenizer):
    path = tmp_path / "data.jsonl"
    rows = (
        [{"query": "q", "response": "a"}] * 5 + [{"query": "q", "response": "a" * 99}] * 4 + [{"x": 1}, {"query": "q"}]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareOptions(dataset=[str(path)], max_length=24, packing=True, packing_length=64, dataset_shuffle=False)
    prepared = prepare(options, make_tokenizer(), stage="sft")
    tokens, trained = int(prepared.train.lengths[0]), 2
    full = 5 * tokens / (64 * -(-5 // (64 // tokens)))
    assert f"{path}: 11 rows, 5 samples; rows dropped:" in prepared.report
    long = len(make_tokenizer().apply_chat_template(LONG, return_dict=False))
    places = f"({path} line 6, {path} line 7, {path} line 8, ...)"
    assert f"4 rows longer than --max_length 24 ({long} tokens) {places}" in prepared.report
    assert "1 row: no known format: its columns are x; known formats: messages" in prepared.report
    assert f"together 5 samples of {tokens} tokens: {5 * tokens} tokens," in prepared.report
    assert f"{5 * tokens} tokens, {trained / tokens:.1%} trained on" in prepared.report
    assert f"{1 - full:.2%} is padding" in prepared.report
    assert prepared.report.endswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n")
    assert prepare(options, make_tokenizer(), stage="sft").report == prepared.report  # from the cache too


def test_the_report_of_one_row(tmp_path, make_tokenizer):
    (tmp_path / "data.jsonl").write_text('{"query": "q", "response": "a"}\n')
    options = PrepareOptions(dataset=[str(tmp_path / "data.jsonl")], max_length=64, packing=True)
    report = prepare(options, make_tokenizer(), stage="sft").report
    assert f"{tmp_path}/data.jsonl: 1 row, 1 sample\n  together 1 sample of " in report
    assert "  packed into 1 pack of 64 tokens, " in report


@pytest.mark.parametrize("cached", [False, True])
def test_strict(tmp_path, make_tokenizer, cached):
    path = tmp_path / "data.jsonl"
    path.write_text('{"query": "q", "response": "a"}\n{"x": 1}\n')
    if cached:
        prepare(PrepareOptions(dataset=[str(path)]), make_tokenizer(), stage="sft")
    with pytest.raises(ValueError, match=r"data\.jsonl line 2: no known format: its columns are x;.*--strict true"):
        prepare(PrepareOptions(dataset=[str(path)], strict=True), make_tokenizer(), stage="sft")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"query": "q", "response": "a"}\n', {"max_length": 4}, "no row .*1 row longer than --max_length 4 .*line 1"),
        ('{"a": 1}\n', {}, "no row .*no known format: its columns are a; known formats: messages"),
        ("", {}, "--dataset .*data.jsonl: has no row"),
        ("\n\n", {}, "--dataset .*data.jsonl: has no row"),
        ('{"query": \n', {}, "line 1 is not JSON"),
        ("{}\n", {"split_dataset_ratio": 1.5}, "--split_dataset_ratio 1.5: not in .0, 1.. Set at least 0 and below 1"),
        (
            "{}\n",
            {"streaming": True, "split_dataset_ratio": 0.5},
            "--split_dataset_ratio 0.5: cannot be used with --streaming true",
        ),
        ("{}\n", {"packing": True}, "--packing true needs the length of a pack"),
        (
            "{}\n",
            {"packing": True, "max_length": 9, "packing_length": 8},
            "--packing_length 8: less than --max_length 9",
        ),
        ("{}\n", {"max_length": 1}, "--max_length 1: leaves no token to predict"),
        (None, {}, r"no such file or folder"),
        (None, {"dataset": []}, "--dataset: missing"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_bad_input(tmp_path, make_tokenizer, content, options, message, processes, monkeypatch):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    options = PrepareOptions(**{"dataset": [str(path)], "dataset_num_proc": processes, **options})
    with pytest.raises(ValueError, match=f"(?s){message}"):
        prepare(options, make_tokenizer(), stage="sft")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_no_row_has_cannot_be_renamed(data, make_tokenizer, streaming):
    options = PrepareOptions(dataset=[str(data)], columns={"frage": "system"}, streaming=streaming)
    with pytest.raises(ValueError, match=r"--columns frage: the first 100 rows .* Use one of query, response"):
        prepare(options, make_tokenizer(), stage="sft")


def test_columns(tmp_path, make_tokenizer):
    (tmp_path / "data.csv").write_text("frage,antwort\nrow 1?,yes\n")
    columns = {"frage": "query", "antwort": "response"}
    options = PrepareOptions(dataset=[str(tmp_path / "data.csv")], columns=columns)
    assert numbers(prepare(options, make_tokenizer(), stage="sft").train, make_tokenizer()) == [1]


def test_dotted_columns(tmp_path, make_tokenizer):
    row = {"prompt": [{"role": "user", "content": "row 1?"}], "reward_model": {"style": "rule", "ground_truth": "7"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "data.parquet")
    columns = {"reward_model.ground_truth": "solution"}
    options = PrepareOptions(dataset=[str(tmp_path / "data.parquet")], columns=columns)
    prepared = prepare(options, make_tokenizer(), stage="prompts")
    assert prepared.columns == ["prompt", "reward_model", "solution"]
    assert prepared.train.columns(0)["solution"] == "7"
    options = PrepareOptions(dataset=options.dataset, columns={"reward_model.truth": "solution"})
    problem = r"--columns reward_model\.truth: .* Use one of prompt, reward_model, reward_model\.ground_truth"
    with pytest.raises(ValueError, match=problem):
        prepare(options, make_tokenizer(), stage="prompts")


def test_a_second_call_is_silent(data, make_tokenizer, caplog, capfd):
    options = PrepareOptions(dataset=[str(data)])
    prepare(options, make_tokenizer(), stage="sft")
    caplog.clear()
    capfd.readouterr()
    with caplog.at_level(logging.INFO):
        prepare(options, make_tokenizer(), stage="sft")
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_other_errors_of_the_disk_are_passed_on(data, make_tokenizer, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("megaswift.templates.dataset.cache_entry._write", fail)
    with pytest.raises(OSError, match="Input/output error"):
        prepare(PrepareOptions(dataset=[str(data)]), make_tokenizer(), stage="sft")


def test_an_error_ends_the_processes_at_work(data, make_tokenizer, monkeypatch):
    def full(folder, batches, schema):
        next(batches)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megaswift.templates.dataset.cache_entry._write", full)
    monkeypatch.setattr(module, "CHUNK", 10)
    options = PrepareOptions(dataset=[str(data)], dataset_num_proc=2)
    with pytest.raises(OSError, match="no space left for tokens"):
        prepare(options, make_tokenizer(), stage="sft")
    assert multiprocessing.active_children() == []


def test_workers_end_with_a_parent_that_is_killed():
    def work(pids):
        pool = ProcessPoolExecutor(2, context, initializer=module._start_worker, initargs=(None, None))
        pids.put([pool.submit(os.getpid).result() for _ in range(2)] + list(pool._processes))
        signal.pause()

    context = multiprocessing.get_context("fork")
    pids = context.Queue()
    parent = context.Process(target=work, args=(pids,))
    parent.start()
    workers = pids.get(timeout=150)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_split_that_takes_every_row(tmp_path, make_tokenizer):
    path = tmp_path / "one.jsonl"
    path.write_text('{"query": "q", "response": "a"}\n')
    options = PrepareOptions(dataset=[str(path)], split_dataset_ratio=0.5)
    with pytest.raises(ValueError, match=r"--split_dataset_ratio 0\.5: leaves no row to train on. Set --val_dataset"):
        prepare(options, make_tokenizer(), stage="sft")


def test_what_a_killed_run_left_is_removed(data, make_tokenizer):
    options = PrepareOptions(dataset=[str(data)])
    folder = prepare(options, make_tokenizer(), stage="sft").train.files[0].folder
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    process.start()
    process.join()
    dead, alive = (folder.with_name(f".{folder.name}-{process_scope()}-{pid}") for pid in (process.pid, 1))
    dead.mkdir()
    alive.mkdir()
    prepare(replace(options, load_from_cache_file=False), make_tokenizer(), stage="sft")
    assert not dead.exists()
    assert alive.exists()


def test_pandas_is_not_imported():
    """It takes longer than all else of a run's beginning on data that is in the cache."""
    program = """
import sys, numpy as np, pyarrow as pa
from megaswift.templates.dataset.samples import EncodedSample
from megaswift.templates.dataset.token_format import flat_lists, record_batch
first, second = (np.array([1, 2, 3], np.int32), [(1, 0.0), (2, 0.5)]), (np.array([4], np.int32), [(1, 1.0)])
batch = record_batch([EncodedSample(7, [first], []), EncodedSample(9, [first, second], [0.25], shared=3)])
assert batch.to_pydict() == {
    "input_ids": [[1, 2, 3], [1, 2, 3, 4]], "run_lengths": [[1, 2], [1, 2, 1]],
    "run_weights": [[0.0, 0.5], [0.0, 0.5, 1.0]], "document_lengths": [[3], [3, 1]], "label": [[], [0.25]],
    "columns": [[], []],
    "length": [3, 4], "weight": [1.0, 1.0], "trained": [2, 2], "row": [7, 9],
    "shared": [0, 3],
}
assert flat_lists(batch.column("run_weights"))[1].tolist() == [0.0, 0.5, 0.0, 0.5, 1.0]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
