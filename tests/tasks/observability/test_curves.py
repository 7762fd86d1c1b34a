"""Curves: which pictures a run leaves, and what is smoothed."""

import numpy as np
import pytest
from megaswift.tasks.observability import curves

GRPO = {
    "reward": 0.5, "reward_std": 0.1, "loss": 0.1, "kl": 0.01, "entropy": 1.0, "grad_norm": 1.0, "learning_rate": 1e-6,
    "completions/mean_length": 200.0, "tokens_per_second_per_gpu": 900.0, "timing_s/gen": 2.0, "weight_sync/gb": 1.0,
    "weight_sync/gb_per_s": 9.0, "memory/training_gib": 1.0, "data_wait": 0.1, "seconds_per_step": 1.0,
}  # fmt: skip
SFT = {name: GRPO[name] for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second_per_gpu")}
DPO = SFT | {f"rewards/{name}": 0.5 for name in ("chosen", "rejected", "margins", "accuracies")}


def rows_of(metrics: dict[str, float], steps: int = 3) -> list[dict[str, float]]:
    training = [
        {"step": step, "max_steps": steps, "elapsed": 1.0, "tokens": 9} | metrics for step in range(1, steps + 1)
    ]
    return [*training, {"step": steps, "eval_loss": 0.7}, {"step": steps, "save_wait": 0.7}]


@pytest.fixture
def drawn(monkeypatch):
    """Record each picture's metrics by plot."""
    pictures: dict[str, list[tuple[str, ...]]] = {}

    def note(page, plots, rows, path):
        assert page.figure.get_suptitle() == "tiny/v0"
        pictures[path.name] = [plot.metrics for plot in plots]
        return path

    monkeypatch.setattr(curves._Page, "draw", note)
    return pictures


@pytest.mark.parametrize(
    ("metrics", "first"),
    [
        (SFT, ["loss", "grad_norm", "learning_rate", "tokens_per_second_per_gpu"]),
        (GRPO, ["reward", "loss", "completions/mean_length", "kl", "entropy", "grad_norm"]),
        (DPO, ["loss", "rewards/margins", "rewards/chosen", "rewards/accuracies", "grad_norm", "learning_rate"]),
    ],
)
def test_the_overview_has_what_matters_for_the_task(metrics, first, drawn, tmp_path):
    curves.draw(rows_of(metrics), tmp_path / "images", "tiny/v0")
    assert [names[0] for names in drawn["overview.png"]] == first
    assert ("loss", "eval_loss") in drawn["overview.png"]


def test_a_metric_of_the_machine_has_no_picture_of_its_own(drawn, tmp_path):
    curves.draw(rows_of(GRPO), tmp_path / "images", "tiny/v0")
    expected = [
        "reward",
        "reward_std",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "learning_rate",
        "tokens_per_second_per_gpu",
    ]
    assert {*drawn} == {f"{name}.png" for name in [*expected, "overview", "completions_mean_length"]}
    assert drawn["loss.png"] == [("loss", "eval_loss")]


def test_pictures_are_drawn(tmp_path):
    noise = np.random.default_rng(0).normal(size=60)
    rows = [row | {"loss": 2 / step + 0.2 * noise[step - 1]} for step, row in enumerate(rows_of(SFT, 60)[:60], 1)]
    rows[5]["grad_norm"] = float("nan")
    pictures = curves.draw([*rows, {"step": 60, "eval_loss": 0.1}], tmp_path / "images", "tiny/v0")
    assert [path.name for path in pictures[:2]] == ["overview.png", "loss.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert curves.draw([], tmp_path / "images", "tiny/v0") == []


def test_a_picture_does_not_depend_on_those_before_it(tmp_path):
    """One that is drawn on the axes of others, of other ranges, kinds and curves, is byte for byte the same."""
    noise = np.random.default_rng(0).normal(size=60)
    changes = {"kl": lambda step: 1e6 * step, "entropy": lambda step: -1e-9 * noise[step], "grad_norm": lambda _: 7.0}
    rows = [row | {name: of(row["step"] - 1) for name, of in changes.items()} for row in rows_of(GRPO, 60)[:60]]
    rows += [{"step": 60, "eval_loss": 0.7}]
    together = curves.draw(rows, tmp_path / "together", "tiny/v0")
    for name in ("loss", "kl", "grad_norm"):
        one = [{key: row[key] for key in ("step", name, f"eval_{name}") if key in row} for row in rows]
        (alone,) = curves.draw(one, tmp_path / name, "tiny/v0")[1:]
        (drawn,) = [path for path in together if path.name == f"{name}.png"]
        assert alone.read_bytes() == drawn.read_bytes()


def test_only_what_is_noisy_is_smoothed():
    line, noise = np.linspace(0, 1, 100), np.random.default_rng(0).normal(size=100)
    assert not curves._is_noisy(line)
    assert not curves._is_noisy(np.cos(3 * line))  # a learning rate
    assert not curves._is_noisy(noise[:10])
    assert curves._is_noisy(line + 0.3 * noise)
    assert curves.smooth(line)[5:-5] == pytest.approx(line[5:-5])  # a straight line stays one
    assert curves.smooth(noise)[[0, 1, 50, 99]] == pytest.approx(
        [noise[:6].mean(), noise[:7].mean(), noise[45:56].mean(), noise[94:].mean()]
    )
