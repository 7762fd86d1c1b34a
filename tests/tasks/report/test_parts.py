"""Parts of a page by themselves: thinned curves, time by phase, charts, completions and replies."""

import json

import numpy as np
import pytest
from megaswift.tasks.report import samples
from megaswift.tasks.report.charts import charts_of
from megaswift.tasks.report.log_rows import LogRows
from megaswift.tasks.report.phases import phases_of
from megaswift.tasks.report.series import thin

from tests.tasks.report.pages import completion_row, train_row, write_completions, write_log


@pytest.mark.parametrize("count", [1, 10, 11, 12, 999, 12_345])
def test_thinned_curves_have_the_extremes_of_each_part(count):
    random = np.random.default_rng(count)
    steps, values = np.cumsum(random.integers(1, 5, count)), random.standard_cauchy(count)
    curve = thin(steps, values, points=10)
    assert len(curve["steps"]) <= 12
    assert curve["steps"] == sorted(set(curve["steps"]))
    assert {int(steps[0]), int(steps[-1])} <= set(curve["steps"])
    assert max(curve["values"]) == pytest.approx(values.max(), rel=1e-5)
    assert min(curve["values"]) == pytest.approx(values.min(), rel=1e-5)
    for part in np.array_split(np.arange(count), 5) if count % 5 == 0 and count > 10 else ():
        assert float(f"{values[part].max():.6g}") in curve["values"]


def test_means_of_a_thinned_curve_are_those_of_its_parts():
    values = np.arange(1000.0)
    curve = thin(np.arange(1000), values, points=10)
    assert sorted(set(curve["means"])) == pytest.approx([part.mean() for part in np.split(values, 5)])


def test_time_by_phase_adds_up_to_the_run(tmp_path):
    """Rows of every fifth step: a row's seconds are those of a mean step since the one before."""
    rows = [
        train_row(step, 10, seconds_per_step=2.0, data_wait=0.25, elapsed=2.0 * step + 3, vision_share=0.25)
        | {"timing_s/gen": 0.5}
        for step in (1, 5, 10)
    ]
    rows += [{"step": 10, "max_steps": 10, "save_wait": 1.0, "elapsed": 24.0}]
    rows += [{"step": 10, "max_steps": 10, "last_checkpoint": None, "elapsed": 26.0}]
    phases = phases_of(LogRows.read(write_log(tmp_path, rows) / "logging.jsonl"))
    assert phases["totals"] == pytest.approx(
        {
            "data wait": 2.5,
            "generation": 5.0,
            "vision tower": 5.0,
            "training": 7.5,
            "saving": 1.0,
            "evaluation and other": 5.0,
        }
    )
    assert phases["steps"] == [1, 5, 10]
    assert {name: values[0] for name, values in phases["seconds"].items()} == pytest.approx(
        {"data wait": 0.25, "generation": 0.5, "vision tower": 0.5, "training": 0.75}
    )


def test_every_metric_has_one_chart():
    metrics = [
        "loss", "eval_loss", "grad_norm", "reward", "reward_std", "eval_reward", "eval_reward_std",
        "rewards/exact/mean", "rewards/exact/std", "completions/mean_length", "completions/min_length",
        "completions/max_length", "rewards/chosen", "rewards/margins", "memory/held_gib",
        "my_metric", "eval_my_metric", "eval_alone",
    ]  # fmt: skip
    charts = [
        chart for topic in charts_of([*metrics, "tokens", "elapsed", "timing_s/gen"]) for chart in topic["charts"]
    ]
    drawn = [name for chart in charts for name in (*chart["lines"], *chart["limits"], *filter(None, [chart["spread"]]))]
    assert sorted(drawn) == sorted(metrics)
    assert {"lines": ["reward", "eval_reward"], "spread": "reward_std"}.items() <= charts[0].items()


def test_few_completions_are_all_there(tmp_path):
    write_completions(tmp_path, [completion_row(1, "a"), completion_row(2, "b", reward=None)])
    with (tmp_path / "completions.jsonl").open("a") as file:
        file.write('{"generation": 3, "messages": [')
    content = samples.completions_of(tmp_path)
    assert content["total"] == 2
    assert [(row["completion"], row["reward"]) for row in content["rows"]] == [("a", 1.0), ("b", None)]
    assert content["rows"][0]["prompt"] == "why?"


def test_many_completions_are_spread_over_the_run_with_whole_groups(tmp_path):
    rows = [
        completion_row(generation, f"{generation} {number}", prompt=f"{generation} {number // 4}")
        for generation in range(1, 501)
        for number in range(16)
    ]
    write_completions(tmp_path, rows)
    content = samples.completions_of(tmp_path)
    assert content["total"] == len(rows)
    assert len(content["rows"]) <= samples.MAX_COMPLETIONS
    generations = [row["generation"] for row in content["rows"]]
    assert (min(generations), max(generations)) == (1, 500)
    assert max(np.diff(sorted(set(generations)))) <= 5
    prompts = [row["prompt"] for row in content["rows"]]
    assert {prompts.count(prompt) for prompt in prompts} == {4}


def test_some_prompts_are_kept_over_the_whole_run(tmp_path):
    rows = [
        completion_row(generation, f"{generation} {number}", prompt=f"{(generation * 7 + number // 4) % 100}")
        for generation in range(1, 1001)
        for number in range(16)
    ]
    write_completions(tmp_path, rows)
    content = samples.completions_of(tmp_path)["rows"]
    assert 0.9 * samples.MAX_COMPLETIONS < len(content) <= samples.MAX_COMPLETIONS
    generations = {row["prompt"]: set() for row in content}
    for row in content:
        generations[row["prompt"]].add(row["generation"])
    followed = [sorted(batches) for batches in generations.values() if len(batches) >= samples.RECURRENCES]
    assert len(followed) >= 10
    assert all(batches[0] < 100 and batches[-1] > 850 for batches in followed)


def test_a_large_file_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "BLOCK_BYTES", 2000)
    rows = [completion_row(generation, "x" * (generation % 300)) for generation in range(1, 3001)]
    write_completions(tmp_path, rows)
    content = samples.completions_of(tmp_path)
    assert content["total"] is None
    generations = [row["generation"] for row in content["rows"]]
    assert 100 < len(set(generations)) == len(generations) < 3000
    assert max(np.diff(generations)) < 3000 / 30
    assert all(len(row["completion"]) == row["generation"] % 300 for row in content["rows"])


def test_long_texts_lose_their_middle():
    text = samples.shorten("a" * 5000 + "b" * 5000)
    assert len(text) < samples.MAX_TEXT + 100
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "4,000 characters" in text


def test_replies_of_checkpoints(tmp_path):
    folder = tmp_path / "infer_result"
    folder.mkdir()
    question = {"role": "user", "content": "2 + 2?"}
    for name, reply in (("20-merged-20260102-000000", "4"), ("5-20260101-000000", "x"), ("5-20260103-000000", "5")):
        row = {"messages": [question, {"role": "assistant", "content": "4"}], "response": reply, "labels": "4"}
        (folder / f"checkpoint-{name}.jsonl").write_text(json.dumps(row) + "\n")
    replies = samples.replies_of(tmp_path)
    assert [(reply["step"], reply["rows"]) for reply in replies] == [
        (5, [{"prompt": "2 + 2?", "response": "5", "label": "4"}]),
        (20, [{"prompt": "2 + 2?", "response": "4", "label": "4"}]),
    ]
