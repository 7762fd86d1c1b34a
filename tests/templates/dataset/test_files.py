import gzip
import json
import os
import shutil
import sys
import time
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megaswift.templates.dataset.sources import open_source, open_sources
from megaswift.templates.formats.dataset_names import split_count

ROWS = [{"query": f"q{i}", "response": 'line\nbreak, and "quotes" é漢'} for i in range(7)]


def write(folder, kind: str):
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl":
            path.write_text("\n".join(json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(ROWS)))
        case "json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "csv":
            datasets.Dataset.from_list(ROWS).to_csv(path)
        case "tsv":
            datasets.Dataset.from_list(ROWS).to_csv(path, sep="\t")
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
        case "arrow":  # a stream, as datasets writes it
            datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
            (folder / "saved" / "data-00000-of-00001.arrow").rename(path)
        case "file.arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(ROWS).schema) as writer:
                writer.write_table(pa.Table.from_pylist(ROWS), max_chunksize=3)
        case _:
            path.write_bytes(gzip.compress(write(folder, kind.removesuffix(".gz")).read_bytes(), mtime=0))
    return path


KINDS = ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "json.gz", "csv.gz", "tsv.gz"]


@pytest.mark.parametrize("kind", [*KINDS, "file.arrow"])
def test_files_beside_the_datasets_library(tmp_path, kind):
    path = write(tmp_path, kind)
    builder, options = ("csv", {"sep": "\t"}) if "tsv" in kind else (kind.removesuffix(".gz"), {})
    builder, cache = builder.replace("jsonl", "json"), str(tmp_path / "hf")
    expected = ROWS
    if kind != "file.arrow":  # which that library does not read
        loaded = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=cache, **options)
        expected = loaded.to_list()
    source = open_source(str(path))
    assert len(source) == len(expected)
    assert [row for _, _, row in source.rows(np.arange(7))] == expected
    assert [(number, row) for number, _, row in source.rows(np.array([2, 5]))] == [(2, expected[2]), (5, expected[5])]
    shares = [[row for _, _, row in source.stream(share, 3)] for share in range(3)]
    assert shares == [expected[share::3] for share in range(3)]
    for start in range(9):
        rest = [(number, row) for number, _, row in source.stream(1, 2, start)]
        assert rest == list(enumerate(expected))[1::2][start:]


def test_text_and_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\n\n   \ntwo é\n\n".encode())
    source = open_source(str(tmp_path / "a.txt"))
    expected = [(0, f"{source.name} line 1", {"text": "one"}), (1, f"{source.name} line 4", {"text": "two é"})]
    assert len(source) == 2
    assert list(source.rows(np.arange(2))) == expected
    assert list(source.stream()) == expected


def test_blank_lines_may_be_long(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('  {"a": 1}\n' + " " * 40 + "\n\t\t\n" + '{"a": 2}\n' + " " * 20)
    source = open_source(str(path))
    expected = [(0, f"{source.name} line 1", {"a": 1}), (1, f"{source.name} line 4", {"a": 2})]
    assert list(source.rows(np.arange(len(source)))) == expected
    assert list(source.stream()) == expected


def test_json_lines_in_a_json_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n{"text": "y"}\n')
    source = open_source(str(tmp_path / "a.json"))
    assert [row["text"] for _, _, row in source.rows(np.arange(2))] == ["x", "y"]


def test_a_folder_joins_its_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_text("3\n")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n')
    (tmp_path / "sub" / "c.csv").write_text("text\n4\n")
    (tmp_path / ".hidden" / "d.txt").write_text("no\n")
    (tmp_path / "README.md").write_text("no")
    source = open_source(str(tmp_path))
    assert [row["text"] for _, _, row in source.rows(np.arange(4))] == ["1", "2", "3", "4"]
    assert [number for number, _, _ in source.rows(np.array([1, 3]))] == [1, 3]
    assert [row["text"] for _, _, row in source.stream()] == ["1", "2", "3", "4"]
    for share, shares in ((0, 1), (0, 2), (1, 2), (1, 3)):
        every = list(source.stream(share, shares))
        assert [list(source.stream(share, shares, start)) for start in range(6)] == [
            every[start:] for start in range(6)
        ]


def test_a_folder_of_the_datasets_library(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    source = open_source(str(tmp_path / "saved"))
    assert [row for _, _, row in source.rows(np.arange(7))] == ROWS


def test_a_folder_of_splits_of_the_datasets_library(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(tmp_path / "saved")
    source = open_source(str(tmp_path / "saved"))
    assert [row for _, _, row in source.rows(np.arange(len(source)))] == ROWS
    assert len(open_source(str(tmp_path / "saved" / "test"))) == 1
    datasets.DatasetDict(a=rows, b=rows).save_to_disk(tmp_path / "others")
    with pytest.raises(ValueError, match=r"others: no split `train`, only a, b"):
        open_source(str(tmp_path / "others"))
    (tmp_path / "beside").mkdir()  # as a hub's dataset is cloned
    (tmp_path / "beside" / "dataset_infos.json").write_text('{\n"default": {}}')
    write(tmp_path / "beside", "jsonl")
    assert len(open_source(str(tmp_path / "beside"))) == 7


def test_a_changed_file_has_another_fingerprint(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    first = open_source(str(path)).fingerprint
    tick = path.stat().st_mtime_ns
    path.write_text("two\n")  # as long, and within the clock's tick
    os.utime(path, ns=(tick, tick))
    assert open_source(str(path)).fingerprint != first
    path.write_text("one\n")
    assert open_source(str(path)).fingerprint == first


def test_a_change_that_keeps_the_size_and_the_time_is_seen(tmp_path, monkeypatch):
    """As rsync --times leaves it. A copy elsewhere has the fingerprint of what it is a copy of."""
    monkeypatch.setattr("megaswift.templates.dataset.files.time.time_ns", lambda: 1e20)  # both are remembered
    path = tmp_path / "data" / "a.txt"
    path.parent.mkdir()
    found = []
    for text in ("one\n", "two\n"):
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
        found.append(open_source(str(path)).fingerprint)
        time.sleep(0.02)  # a tick of the clock
    assert found[0] != found[1]
    shutil.copytree(path.parent, tmp_path / "copy")
    assert open_source(str(tmp_path / "copy")).fingerprint == found[1]


def test_a_large_file_is_read_once_for_its_facts(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    monkeypatch.setattr("megaswift.templates.dataset.files.time.time_ns", lambda: path.stat().st_ctime_ns + 3e9)
    first = open_source(str(path))
    facts = first.fingerprint, len(first)
    monkeypatch.setattr("megaswift.templates.dataset.files.hashlib.file_digest", None)
    again = open_source(str(path))
    assert (again.fingerprint, len(again)) == facts
    assert facts[1] == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n{}', r"a\.jsonl line 3 is not JSON: Expecting value"),
        ("a.jsonl", '{"text": "x"}\n[1]', r"a\.jsonl line 2 is a list, where an object is expected"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"a\.jsonl line 2 is not UTF-8"),
        ("a.json", '[{"text": "x"},\n{"text" "y"}]', r"a\.json line 2 is not JSON"),
        ("a.json", b'[{"text": "x"},\n{"text": "\xe9"}]', r"a\.json line 2 is not UTF-8"),
        (
            "a.json",
            '{\n"data": [{"text": "x"}]\n}',
            r"a\.json line 1 is not JSON: .*[.] Write it as an array, or as one object per",
        ),
        ("a.json", '[{"text": "x"}, 3]', r"a\.json: element 2 is a number, where an object is expected"),
        ("a.csv", "text,more\n1,2\n1\n", r"a\.csv line 3 has 1 field, and the header has 2"),
        ("a.csv", "text,more,text\n1,2,3\n", r"a\.csv line 1 names the column 'text' twice. Rename one of them"),
        ("a.tsv", "text\ttext\n1\t2\n", r"a\.tsv line 1 names the column 'text' twice"),
        ("a.csv", "text,more\n1,2,3\n", r"a\.csv line 2 has 3 fields, and the header has 2"),
        ("a.tsv", "text\tmore\n1\t2\n1\n", r"a\.tsv line 3 has 1 field, and the header has 2"),
        ("a.csv", 'text,more\n1,2\n"1"x,2\n', r"a\.csv line 3 is not CSV"),
        ("a.csv", b'text\n"\xff"\n', r"a\.csv line 2 is not UTF-8: invalid start byte"),
        ("a.parquet", "PAR1", r"a\.parquet is not Parquet"),
        ("a.arrow", "", r"a\.arrow is not Arrow"),
        ("a.arrow", "ARROW1", r"a\.arrow is not Arrow"),
        ("a.jsonl.gz", '{"text": "x"}', r"a\.jsonl\.gz: the gzip file is damaged or truncated .Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}', mtime=0)[:-9],
            r"a\.jsonl\.gz: the gzip file is damaged or truncated",
        ),
        (
            "a.json.gz",
            gzip.compress(b"[]", mtime=0)[:-9],
            r"a\.json\.gz: the gzip file is damaged or truncated",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n\n[1]', mtime=0),
            r"a\.jsonl\.gz line 3 is a list, where an object",
        ),
        (
            "a.jsonl",
            '{"text": "x"}\n' + "[" * 100_000,
            r"a\.jsonl line 2 is nested too deeply",
        ),
        (
            "a.json",
            '[{"text": "[["},\n' + "[" * 100_000,
            r"a\.json line 2 is nested too deeply",
        ),
        ("a.jsonl", '{"text": ' + "1" * 5000 + "}", r"a\.jsonl line 1 is not JSON: Exceeds the limit"),
        ("a.json", '[{"text": ' + "1" * 5000 + "}]", r"a\.json is not JSON: Exceeds the limit"),
        ("a.pdf", "x", r"unknown file format '\.pdf'\. Use one of \.jsonl"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list((source := open_source(str(path))).rows(np.arange(len(source))))
    with pytest.raises(ValueError, match=message):
        list(open_source(str(path)).stream())


def test_rows_of_a_gzip_file_in_any_order(tmp_path):
    source = open_source(str(write(tmp_path, "jsonl.gz")))
    for numbers in ([0, 1], [2, 5], [6], [6], [0, 6]):
        assert [(number, row) for number, _, row in source.rows(np.array(numbers))] == [(n, ROWS[n]) for n in numbers]


@pytest.mark.parametrize("name", ["/dev/null", "pipe.jsonl", "./pipe"])
def test_what_is_no_regular_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=rf"^--dataset {name}: is a pipe or a device.* Write it to a file"):
        open_sources("--dataset", [f"{name}#5"])


def test_results_that_datasets_keeps_are_not_data(tmp_path):
    rows = write(tmp_path, "arrow")
    shutil.copy(rows, tmp_path / "cache-0123456789.arrow")
    assert len(open_source(str(tmp_path))) == 7


def test_missing_and_empty(tmp_path):
    for flag in ("--dataset", "--val_dataset"):
        with pytest.raises(ValueError, match=rf"^{flag} .*/x\.jsonl: no such file or folder"):
            open_sources(flag, [str(tmp_path / "x.jsonl#3")])
        with pytest.raises(ValueError, match=rf"^{flag} x\.csv: no such file or folder"):
            open_sources(flag, ["x.csv"])
        for empty in ("", "#5"):  # not the working directory
            with pytest.raises(ValueError, match=rf"^{flag} has an empty name"):
                open_sources(flag, [empty])
        with pytest.raises(ValueError, match=rf"^{flag} a#0: a number of rows must follow #"):
            open_sources(flag, ["a#0"])
    with pytest.raises(ValueError, match="the folder has no data file"):
        open_source(str(tmp_path))


def test_counts(tmp_path):
    assert split_count("a/b#500") == ("a/b", 500)
    assert split_count("a/b") == ("a/b", None)
    (tmp_path / "odd#1").mkdir()
    assert split_count(str(tmp_path / "odd#1")) == (str(tmp_path / "odd#1"), None)
    for wrong in ("a#", "a#0", "a#many"):
        with pytest.raises(ValueError, match="a number of rows must follow #"):
            split_count(wrong)


def test_hugging_face(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options))
        if arguments[0] == "no/train":
            return datasets.DatasetDict(test=datasets.Dataset.from_list(ROWS), dev=datasets.Dataset.from_list(ROWS))
        if arguments[0] == "no/where":
            raise ConnectionError("no route")
        return datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list([]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    [(source, count)] = open_sources("--dataset", ["some/rows:part#3"], use_hf=True, hub_token="t")
    assert asked == [("some/rows", "part", {"token": "t", "streaming": False})]
    assert (len(source), count) == (7, 3)
    assert list(source.rows(np.array([4]))) == [(4, "some/rows:part row 5", ROWS[4])]
    assert [row for _, _, row in open_source("hf::some/rows").stream(1, 3)] == ROWS[1::3]
    assert [(n, row) for n, _, row in open_source("hf::some/rows").stream(1, 3, 1)] == [(4, ROWS[4])]
    with pytest.raises(ValueError, match="no split `train`, only test, dev"):
        open_source("no/train", use_hf=True)
    with pytest.raises(ValueError, match="cannot be loaded from Hugging Face: no route"):
        open_source("no/where", use_hf=True)


def test_modelscope(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install modelscope`, or set --use_hf true"):
        open_source("some/rows")

    def load(repository, subset_name, split, use_streaming):
        assert (repository, subset_name, split, use_streaming) == ("some/rows", "default", "train", False)
        return SimpleNamespace(to_hf_dataset=lambda: datasets.Dataset.from_list(ROWS))

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(MsDataset=SimpleNamespace(load=load)))
    for name in ("some/rows", "ms::some/rows"):
        assert [row for _, _, row in open_source(name, use_hf=name.startswith("ms")).rows(np.arange(7))] == ROWS
