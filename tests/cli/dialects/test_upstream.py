"""Upstream's example configs against expected.tsv, where MEGASWIFT_DIALECTS names their folder."""

import csv
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.dialects.known_configs import UPSTREAM, needs_upstream, translated, tree_of, upstream_files

# Columns of expected.tsv that are flags of the same names.
FLAGS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "global_batch_size", "micro_batch_size", "num_generations",
    "steps_per_generation", "train_iters", "num_train_epochs", "save_steps", "eval_steps", "lr", "beta", "epsilon",
    "epsilon_high", "delta", "temperature", "loss_type", "importance_sampling_level", "max_length",
    "max_completion_length",
)  # fmt: skip
OURS = {  # defaults of this project, which a translation may leave out
    "virtual_pipeline_model_parallel_size": None, "temperature": 0.9, "importance_sampling_level": "token",
    **dict.fromkeys(FLAGS[:5], 1), "loss_type": "grpo", "epsilon": 0.2, "micro_batch_size": 1,
}  # fmt: skip
# file -> refused: beginnings of the refused keys; corrected: columns whose number here has the reason beside it
KNOWN: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "upstream.yaml").read_text())
FILES = {path.relative_to(UPSTREAM).as_posix(): (path, name) for path, name in upstream_files().items()}


def expected_rows() -> dict[str, dict[str, str]]:
    with (UPSTREAM / "expected.tsv").open() as file:
        return {row["file"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


@needs_upstream
@pytest.mark.parametrize("file", FILES)
def test_an_upstream_config(file: str) -> None:
    path, name = FILES[file]
    exceptions, row = KNOWN.get(file, {}), expected_rows()[file]
    start_time = time.perf_counter()
    tree, _, problems = tree_of(path, name)
    translation = translated(tree, name, file)
    assert time.perf_counter() - start_time < 1
    refused = [text.split()[0] for text in (*problems, *translation.refused)]
    keys = exceptions.get("refused", [])
    assert [key for key in refused if not key.startswith(tuple(keys))] == [], translation.refused
    assert [key for key in keys if not any(text.startswith(key) for text in refused)] == []
    if row["type"] == "refuse":
        assert refused
        return
    assert translation.flags.get("rlhf_type", translation.command) == row["type"].split()[0]
    expected = {column: row[column] for column in FLAGS if row[column] and "x" not in row[column].split()}
    expected |= {column: str(value) for column, value in exceptions.get("corrected", {}).items()}
    different = {}
    for column, text in expected.items():
        value = translation.flags.get(column, OURS.get(column))
        if not _is_equal(value, text):
            different[column] = (value, text)
    assert different == {}
    if row["processes"].isdecimal():
        assert translation.processes == int(row["processes"])
    _check_engine(row["vllm"], translation.flags)


def _is_equal(value: Any, text: str) -> bool:
    try:
        return value is not None and float(value) == pytest.approx(float(text))
    except ValueError:
        return value == text


def _check_engine(text: str, flags: dict[str, Any]) -> None:
    if text.startswith("none"):
        assert flags["use_vllm"] is False
    elif text.startswith("colocate"):
        assert flags["vllm_mode"] == "colocate"
        tensor = re.search(r"TP (\d+)", text)
        # An engine beyond a node is refused.
        if tensor and int(tensor[1]) <= 8:
            assert flags.get("vllm_tensor_parallel_size", 1) == int(tensor[1])
    elif text.startswith("server"):
        assert flags["vllm_mode"] == "server"
