"""Rows that no preference can be learnt from, and references that do not fit: what the user reads."""

import json
from typing import Any

import pytest

from tests import tiny
from tests.tasks.preference.runs import COMMON, Place, judged, messages, write

pytestmark = pytest.mark.slow


def train(place: Place, kind: str, rows: list[dict[str, Any]], flags: str = "", *, fails: bool = True) -> str:
    """What `megatron rlhf` prints where it is given these rows."""
    name = f"rows-{abs(hash(json.dumps(rows)))}.jsonl"
    write(place.folder / name, rows)
    line = f"--rlhf_type {kind} --model qwen3 --dataset {name} --micro_batch_size 2 {COMMON} --train_iters 1 {flags}"
    printed = place.megatron(f"{line} --output_dir bad --save_safetensors true", fails=fails)
    assert "Traceback" not in printed
    return printed


def test_pairs_that_are_none_are_left_out_with_the_reason(place: Place) -> None:
    good = [messages(row) for row in place.train[:4]]
    empty = good[0] | {"rejected_response": " "}
    equal = good[1] | {"rejected_response": good[1]["messages"][-1]["content"]}
    silent = {"messages": good[2]["messages"], "margin": 0.0}
    printed = train(place, "dpo", [*good, empty, equal, silent, equal], fails=False)
    assert "its rejected answer is empty" in printed
    assert "it has no rejected answer: add rejected_response" in printed
    (line,) = [line for line in printed.splitlines() if "equal" in line or "the same" in line]
    assert "2" in line


@pytest.mark.long
def test_without_a_pair_there_is_no_run(place: Place) -> None:
    rows = [row | {"rejected_response": ""} for row in map(messages, place.train[:3])]
    printed = train(place, "dpo", rows)
    assert "no row of the dataset can be used" in printed
    assert "its rejected answer is empty" in printed


def test_labels_that_are_none(place: Place) -> None:
    rows = [messages(row) | {"label": "good"} for row in judged(place.train[:4])]
    printed = train(place, "kto", rows)
    assert "no row of the dataset can be used" in printed
    assert "its label is 'good', where true, false, 1 or 0 is expected" in printed


def test_labels_of_one_kind(place: Place) -> None:
    rows = [messages(row) | {"label": True} for row in judged(place.train[:4])]
    printed = train(place, "kto", rows)
    assert "the label of every row is true, and KTO learns from responses of both kinds" in printed


def test_a_reference_of_another_vocabulary(place: Place) -> None:
    from transformers import AutoTokenizer

    folder = place.tokenized(tiny.save(place.folder / "foreign", "qwen3"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["stone"])
    tokenizer.save_pretrained(folder)
    printed = train(place, "dpo", [messages(row) for row in place.train[:4]], "--ref_model foreign")
    assert "--ref_model foreign has another vocabulary than the trained model: 'stone' is token" in printed


@pytest.mark.long
def test_prompts_that_leave_no_room(place: Place) -> None:
    rows = [messages(row) for row in place.train[:4]]
    printed = train(place, "dpo", rows, "--max_length 5 --truncation_strategy right")
    assert "no row of the dataset can be used" in printed
    assert "--max_length 5" in printed
