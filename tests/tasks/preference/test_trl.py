"""Three steps of `megatron rlhf` beside three of TRL's trainers, on the same folder and rows: log and weights."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.tasks.preference import upstream
from tests.tasks.preference.runs import (
    EVALUATED,
    Place,
    Trained,
    assert_close,
    assert_same_steps,
    assert_same_weights,
    judged,
)

pytestmark = pytest.mark.slow
NAMES = (
    "loss",
    "grad_norm",
    "kl",
    "learning_rate",
    "nll_loss",
    "log_odds_chosen",
    "log_odds_ratio",
)  # and all of rewards/ and logps/
# TRL's reward trainer has other names.
OF_REWARDS = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}

OTHER_SIZES = ("kto", 4), ("dpo", 1), ("dpo", 4), ("kto", 1), ("rm", 1), ("rm", 4)


def agree(ours: Trained, theirs: tuple[upstream.Log, Any], place: Place, model: str) -> None:
    log, trained = theirs
    assert len(ours.steps) == len(log) == 3
    for found, row in zip(ours.steps, log, strict=True):
        wanted = {OF_REWARDS.get(name, name): value for name, value in row.items()}
        if row.get("nll_loss") == 0:  # of a weight of 0
            del wanted["nll_loss"]
        wanted = {
            name: value for name, value in wanted.items() if "rewards/" in name or "logps/" in name or name in NAMES
        }
        assert len(wanted) >= 5
        assert_close(found, wanted)
        if "mean_reward" in row:
            assert_close({"": (found["rewards/chosen"] + found["rewards/rejected"]) / 2}, {"": row["mean_reward"]})
    assert_same_weights(ours.weights, dict(trained.state_dict()), load_file(place.folder / model / "model.safetensors"))


def dpo(place: Place, *, ref_model: str | None = None, **settings: Any) -> tuple[upstream.Log, Any]:
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in place.train]
    reference = ref_model and upstream.causal(place.folder / ref_model)
    return upstream.dpo(place.folder, upstream.causal(place.folder / "qwen3"), rows, reference, **settings)


def test_dpo(place: Place) -> None:
    ours = place.run("dpo")
    assert "prompts of pairs are computed once: " in ours.printed
    agree(ours, dpo(place), place, "qwen3")


def test_dpo_with_several_losses_and_another_reference(place: Place) -> None:
    """In TRL's own format of rows too."""
    flags = "--loss_type sigmoid sft ipo --loss_weights 0.8 0.5 0.3 --beta 0.3 --ref_model other --dataset trl.jsonl"
    ours = place.run("dpo", flags)
    settings = {"loss_type": ["sigmoid", "sft", "ipo"], "loss_weights": [0.8, 0.5, 0.3], "beta": 0.3}
    theirs = dpo(place, ref_model="other", **settings)
    assert abs(ours.steps[0]["rewards/chosen"]) > 1
    agree(ours, theirs, place, "qwen3")


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        "--loss_type exo_pair --label_smoothing 0.1",
        "--loss_type robust --label_smoothing 0.1",
        "--loss_type ipo",
        "--loss_type bco_pair",
        "--loss_type hinge",
        "--loss_type nca_pair",
        "--loss_type sppo_hard",
        "--loss_type apo_zero",
        "--loss_type apo_down",
        "--loss_type discopop --discopop_tau 0.1",
        "--loss_type sigmoid_norm --beta 0.3",
        "--f_divergence_type js_divergence",
        "--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.7",
        "--loss_type aot --micro_batch_size 4",
        "--loss_type aot_unpaired --micro_batch_size 4 --label_smoothing 0.1",
    ],
)
def test_other_losses(flags: str, place: Place) -> None:
    words = flags.split()
    settings: dict[str, Any] = {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}
    settings.pop("micro_batch_size", None)
    for name in settings.keys() - {"loss_type", "f_divergence_type"}:
        settings[name] = float(settings[name])
    if "loss_type" in settings:
        settings["loss_type"] = [settings["loss_type"]]
    agree(place.run("dpo", flags), dpo(place, **settings), place, "qwen3")


@pytest.mark.parametrize(
    ("kind", "flags", "trainer", "settings"),
    [
        ("orpo", "--beta 0.4 --loss_scale last_round", "orpo", {"beta": 0.4}),
        pytest.param(
            "simpo",
            "",
            "cpo",
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 1.0},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "simpo",
            "--simpo_gamma 0.5 --cpo_alpha 0 --beta 1.5",
            "cpo",
            {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
            marks=pytest.mark.long,
        ),
        pytest.param("cpo", "--cpo_alpha 0.7", "cpo", {"cpo_alpha": 0.7}, marks=pytest.mark.long),
        pytest.param("cpo", "--loss_type ipo", "cpo", {"loss_type": "ipo"}, marks=pytest.mark.long),
        pytest.param("cpo", "--loss_type hinge", "cpo", {"loss_type": "hinge"}, marks=pytest.mark.long),
    ],
)
def test_pairs_without_a_reference(kind: str, flags: str, trainer: str, settings: dict[str, Any], place: Place) -> None:
    ours = place.run(kind, f"{flags} --micro_batch_size 4".strip())
    assert "reference:" not in ours.printed
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in place.train]
    theirs = upstream.unreferenced(place.folder, upstream.causal(place.folder / "qwen3"), rows, trainer, **settings)
    agree(ours, theirs, place, "qwen3")


def kto(place: Place, **settings: Any) -> tuple[upstream.Log, Any]:
    model = upstream.causal(place.folder / "qwen3")
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    return upstream.kto(place.folder, model, judged(place.train), **weights, **settings)


def test_kto(place: Place) -> None:
    assert "--desirable_weight 1.3 --undesirable_weight 0.6" in EVALUATED["kto"]
    ours = place.run("kto")
    assert all(row["kl"] > 0.1 for row in ours.steps[1:])
    agree(ours, kto(place), place, "qwen3")


@pytest.mark.long
def test_kto_without_a_zero(place: Place) -> None:
    ours = place.run("kto", "--loss_type apo_zero_unpaired")
    agree(ours, kto(place, loss_type="apo_zero_unpaired"), place, "qwen3")


def test_reward_model(place: Place) -> None:
    assert "--center_rewards_coefficient 0.05" in EVALUATED["rm"]
    theirs = upstream.reward(
        place.folder, upstream.scoring(place.folder / "reward"), place.train, center_rewards_coefficient=0.05
    )
    agree(place.run("rm"), theirs, place, "reward")


@pytest.mark.parametrize(("kind", "size"), [pytest.param(*case, marks=pytest.mark.long) for case in OTHER_SIZES])
def test_micro_batches_of_any_size_give_the_same(kind: str, size: int, place: Place) -> None:
    """The others here are of two samples."""
    split, whole = place.run(kind, f"--micro_batch_size {size}"), place.run(kind)
    assert_same_steps(split, whole)
    start = load_file(place.folder / ("reward" if kind == "rm" else "qwen3") / "model.safetensors")
    assert_same_weights(split.weights, whole.weights, start)
