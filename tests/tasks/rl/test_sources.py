"""GRPO on verl's columns: a Parquet file of several sources, and what ends such a run."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tasks.rl.runs import Place

pytestmark = pytest.mark.slow

ECHO_TESTS = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "2"]})
SOURCES = {  # source -> ground truth, scores that completions may have
    "openai/gsm8k": ("72", {0.0, 1.0}),
    "lighteval/MATH": (r"\frac{1}{2}", {0.0, 1.0}),
    "crossthinkqa": ("C", {1.0, 0.5, -0.5, -1.0}),
    "ifeval": ('{"func_name": "validate_no_commas"}', {0.0, 1.0}),
    "taco": (ECHO_TESTS, {0.0, 0.5, 1.0}),
    "left": ("nothing", {None}),
}


def write(file: Path, *sources: str, **changes: object) -> None:
    """Write a row of verl's columns for each source. changes: columns to change; None: without the column."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"What is {number}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": SOURCES[source][0]},
            "extra_info": {"split": "train", "index": number},
        }
        | changes
        for number, source in enumerate(sources)
    ]
    pq.write_table(pa.Table.from_pylist([{n: v for n, v in row.items() if v is not None} for row in rows]), file)


def test_a_file_of_several_sources(place: Place) -> None:
    write(place.folder / "mixed.parquet", *SOURCES)
    rules = """--source_rules '{"left": "none"}'"""
    run_words = place.line("--dataset mixed.parquet --reward_funcs by_source --train_iters 2", "mixed")
    printed = place.megatron(f"{run_words} {rules}")
    assert "--reward_funcs by_source: no reward scores" in printed  # the note on unscored completions
    rows = [json.loads(line) for line in (place.folder / "mixed" / "completions.jsonl").open(encoding="utf-8")]
    assert len(rows) == 24
    scores: dict[str, set] = {}
    for row in rows:
        assert [message["role"] for message in row["messages"]][:2] == ["system", "user"]
        number = int(row["messages"][1]["content"].removeprefix("What is ").removesuffix("?"))
        scores.setdefault([*SOURCES][number], set()).add(row["rewards"]["by_source"])
    assert set(scores) == set(SOURCES)
    for source, values in scores.items():
        assert values <= SOURCES[source][1], source
    assert scores["crossthinkqa"] <= {-1.0, 0.5}  # noise has no box
    assert 1.0 in scores["ifeval"]  # few texts of twelve tokens have a comma
    steps = [json.loads(line) for line in (place.folder / "mixed" / "logging.jsonl").open()]
    ratios = [step["completions/unscored_ratio"] for step in steps if "completions/unscored_ratio" in step]
    assert ratios
    assert max(ratios) > 0


def test_a_source_without_a_rule(place: Place) -> None:
    write(place.folder / "left.parquet", *SOURCES)
    printed = place.megatron(place.line("--dataset left.parquet --reward_funcs by_source", "left"), code=1)
    assert "error: --reward_funcs by_source: no rule for the source 'left'. Name one, as in --source_rules" in printed
    assert "(rules: gsm8k, math, crossthinkqa, countdown, ifeval, code, code_share, judge, none)" in printed
    assert "Traceback" not in printed


def test_a_file_without_the_columns_is_refused_before_the_model_is_loaded(place: Place) -> None:
    write(place.folder / "none.parquet", "openai/gsm8k", data_source=None)
    broken = place.model("broken")
    (broken / "model.safetensors").write_bytes(b"")  # a run that loads it ends with another error
    printed = place.megatron(
        place.line("--model broken --dataset none.parquet --reward_funcs by_source", "refused"), code=1
    )
    assert (
        "error: --reward_funcs by_source: it requires the column data_source or tag, and the dataset has ability, "
        "extra_info, prompt, reward_model. Add it, or rename one (--columns "
    ) in printed
    assert "Traceback" not in printed


def test_a_dotted_column(place: Place) -> None:
    write(place.folder / "dotted.parquet", *["openai/gsm8k"] * 6)
    words = place.line("--dataset dotted.parquet --reward_funcs accuracy --train_iters 1", "dotted")
    place.megatron(f"""{words} --columns '{{"reward_model.ground_truth": "solution"}}'""")
    rows = [json.loads(line) for line in (place.folder / "dotted" / "completions.jsonl").open(encoding="utf-8")]
    assert {row["rewards"]["accuracy"] for row in rows} <= {0.0, 1.0}  # None without a solution
