"""Dry runs of ms-swift's commands, on local models and on data in the columns of the named datasets."""

import json
from pathlib import Path

import pytest
from megaswift.bridge.checkpoint import pretrained
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.cli.checks.vision import has_tower
from megaswift.cli.main import main

from tests.cli import ms_swift_stand_ins as stand_ins
from tests.cli.conftest import write_tokenizer
from tests.cli.test_ms_swift_commands import GOLDEN, ROWS, local_words, machine

OUTCOMES = [line.split(" | ")[1] for line in GOLDEN.read_text().splitlines()]
TRAINING = [
    number
    for number, (row, outcome) in enumerate(zip(ROWS, OUTCOMES, strict=True))
    if outcome.startswith("runs") and row["command"].split()[1] != "export"
]
__all__ = ["machine"]  # the fixture


@pytest.mark.long
@pytest.mark.parametrize("number", TRAINING, ids=[f"{number + 1}-{ROWS[number]['file']}" for number in TRAINING])
def test_dry_run(number: int, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    row = ROWS[number]
    monkeypatch.setattr(pretrained, "check_weights", lambda *arguments, **settings: None)  # there are none
    monkeypatch.setenv("NPROC_PER_NODE", str(row["processes"]))
    if "nodes" in row:
        for name, value in (("NNODES", str(row["nodes"])), ("NODE_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, value)
    stand_ins.write_files(machine)
    words = local_words(row, machine, machine)
    stand_ins.write_datasets(machine, words)
    for file in machine.rglob("config.json"):
        if has_tower(read_config(file.parent)):
            stand_ins.write_processor(file.parent)
        else:
            write_tokenizer(file.parent)
            stand_ins.write_chat_template(file.parent)
    code = main("megatron", [*words[1:], "--dry_run", "true"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "steps" in printed.out


@pytest.mark.long
def test_rows_with_images_are_refused_as_such(machine: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """What the golden lines call "images": a model without a tower trains on texts, and refuses rows with images."""
    monkeypatch.setattr(pretrained, "check_weights", lambda *arguments, **settings: None)
    model = stand_ins.write_model_of(machine, "google/gemma-3-27b-it")
    write_tokenizer(model)
    row = {"messages": [{"role": "user", "content": "<image>Read it."}, *stand_ins.MESSAGES["messages"][1:]]}
    file = machine / "rows.jsonl"
    file.write_text(json.dumps(row | {"images": ["a.png"]}) + "\n")
    words = ["sft", "--model", str(model), "--dataset", str(file), "--train_iters", "1", "--dry_run", "true"]
    assert main("megatron", words) != 0
    assert "images" in capsys.readouterr().err
