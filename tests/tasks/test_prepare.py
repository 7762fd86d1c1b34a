"""`swift prepare` on local copies and on a stand-in for the hub."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megaswift.cli.main import main

GSM8K = [{"question": f"q{n}", "answer": f"so it is {n}\n#### {n}"} for n in range(5)]
MATH = [
    {"problem": f"p{n}", "solution": rf"so $\boxed{{{n}}}$", "level": "Level 1", "type": "Algebra"} for n in range(4)
]
DEEPSCALER = [{"problem": f"p{n}", "answer": str(n), "solution": f"s{n}"} for n in range(40)]


def write_parquet(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def swift(words: str) -> int:
    return main("swift", ["prepare", *words.split()])


def rows_of(folder: Path, split: str) -> list[dict]:
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def truths(folder: Path, split: str) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows_of(folder, split)]


@pytest.mark.parametrize("place", ["copy", "openai/gsm8k"])  # the second: a path that has a preset
def test_gsm8k_of_a_snapshot(place, tmp_path, capsys):
    copy, out = tmp_path / place, tmp_path / "new" / "out"
    for split, rows in (("train", GSM8K[:3]), ("test", GSM8K[3:])):
        write_parquet(copy / "main" / f"{split}-00000-of-00001.parquet", rows)
        write_parquet(copy / "socratic" / f"{split}-00000-of-00001.parquet", [{"question": "no", "answer": "#### 9"}])
    assert swift(f"gsm8k --local_dir {out} --local_dataset_path {copy}") == 0
    assert (truths(out, "train"), truths(out, "test")) == (["0", "1", "2"], ["3", "4"])
    row = rows_of(out, "test")[1]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["extra_info"] == {"split": "test", "index": 1, "answer": GSM8K[4]["answer"], "question": "q4"}
    assert sorted(file.name for file in out.iterdir()) == ["test.parquet", "train.parquet"]
    printed = capsys.readouterr().out
    assert f"{out}/train.parquet: 3 rows" in printed
    assert "The first prompt: q0 Let's think step by step" in printed


@pytest.mark.parametrize("place", ["copy", "DigitalLearningGmbH/MATH-lighteval"])
def test_math_of_files(place, tmp_path):
    copy, out = tmp_path / place, tmp_path / "out"
    copy.mkdir(parents=True)
    for split, rows in (("train", MATH[:3]), ("test", MATH[3:])):
        (copy / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert swift(f"--recipe math --local_dir {out} --local_dataset_path {copy}") == 0
    assert (truths(out, "train"), truths(out, "test")) == (["0", "1", "2"], ["3"])


def test_deepscaler_is_split_as_siirl_does(tmp_path):
    (tmp_path / "deepscaler.json").write_text(json.dumps(DEEPSCALER))
    assert swift(f"deepscaler --local_dir {tmp_path / 'out'} --local_dataset_path {tmp_path / 'deepscaler.json'}") == 0
    parts = datasets.Dataset.from_list(DEEPSCALER).train_test_split(test_size=0.1, seed=15)
    assert truths(tmp_path / "out", "train") == list(parts["train"]["answer"])
    assert truths(tmp_path / "out", "test") == list(parts["test"]["answer"])
    assert [row["extra_info"]["index"] for row in rows_of(tmp_path / "out", "test")] == [0, 1, 2, 3]


def test_from_the_hub(tmp_path, monkeypatch):
    asked = []

    def load(repository, subset, *, token, streaming):
        asked.append((repository, subset, token))
        return datasets.DatasetDict(
            train=datasets.Dataset.from_list(GSM8K[:3]), test=datasets.Dataset.from_list(GSM8K[3:])
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert swift(f"gsm8k --local_dir {tmp_path} --hub_token t") == 0
    assert set(asked) == {("openai/gsm8k", "main", "t")}
    assert (truths(tmp_path, "train"), truths(tmp_path, "test")) == (["0", "1", "2"], ["3", "4"])


def test_a_hub_that_is_not_reached(tmp_path, monkeypatch, capsys):
    def load(*_: object, **__: object):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert swift(f"gsm8k --local_dir {tmp_path / 'out'}") == 1
    error = capsys.readouterr().err
    assert "error: swift prepare: openai/gsm8k:main@train: " in error
    assert "Couldn't reach the Hub. Where no hub is reached, set --local_dataset_path to a copy." in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ("--local_dir OUT", 2, "--recipe: missing. Set it, as in swift prepare gsm8k"),
        ("gsm8k", 2, "--local_dir: missing"),
        ("gsm9k --local_dir OUT", 2, "--recipe gsm9k: choose one of gsm8k, math, deepscaler"),
        ("gsm8k --local_dir FILE", 2, "it is a file. Set a folder"),
        ("gsm8k --local_dir OUT --local_dataset_path none", 2, "--local_dataset_path none: no such file or folder"),
        (
            "gsm8k --local_dir OUT --local_dataset_path COPY",
            1,
            "row 1: lacks the column 'answer'; it has problem, solution. Set",
        ),
        ("math --local_dir OUT --local_dataset_path COPY", 1, r"train row 2: its solution has no \boxed"),
        ("math --local_dir OUT --local_dataset_path EMPTY", 1, "the folder has no data file"),
    ],
)
def test_what_cannot_be_prepared(words, code, problem, tmp_path, capsys):
    copy, empty, file = tmp_path / "copy", tmp_path / "empty", tmp_path / "file"
    for split in ("train", "test"):
        write_parquet(copy / f"{split}.parquet", [{"problem": "p", "solution": s} for s in (r"\boxed{1}", "no")])
    empty.mkdir()
    file.touch()
    for name, path in {"OUT": tmp_path / "out", "COPY": copy, "EMPTY": empty, "FILE": file}.items():
        words = words.replace(name, str(path))
    assert swift(words) == code
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
