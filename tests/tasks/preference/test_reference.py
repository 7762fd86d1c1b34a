"""What DPO and KTO measure against, and what evaluations say: by transformers and by the formulas."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.preference import by_hand, upstream
from tests.tasks.preference.runs import (
    PACKED,
    WHOLE,
    Place,
    Trained,
    assert_close,
    assert_same_steps,
    assert_same_weights,
    judged,
)

pytestmark = pytest.mark.slow
PRECOMPUTED = "--precompute_ref_log_probs true"
DP_PACKED = f"--use_distributed_optimizer true {PACKED}"


def evaluated(run: Trained) -> dict[str, float]:
    (row,) = run.evaluations
    return {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}


def start(place: Place) -> Path:
    return place.folder / "qwen3"


def test_an_evaluation_of_dpo_is_the_formula(place: Place) -> None:
    run = place.run("dpo")
    wanted = by_hand.dpo(upstream.causal(run.checkpoint), upstream.causal(start(place)), start(place), place.val)
    assert_close(evaluated(run), wanted)


def test_an_evaluation_of_kto_is_the_formula(place: Place) -> None:
    run = place.run("kto")
    policy, reference = upstream.causal(run.checkpoint), upstream.causal(start(place))
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    assert_close(evaluated(run), by_hand.kto(policy, reference, start(place), judged(place.val), 4, **weights))


def test_an_evaluation_of_a_reward_model_is_the_formula(place: Place) -> None:
    run = place.run("rm")
    wanted = by_hand.reward(upstream.scoring(run.checkpoint), start(place), place.val, centering=0.05)
    assert_close(evaluated(run), wanted)


@pytest.mark.parametrize(
    ("kind", "flags", "processes"),
    [
        ("dpo", "", None),
        pytest.param("dpo", DP_PACKED, 2, marks=pytest.mark.long),
        pytest.param("dpo", "--pipeline_model_parallel_size 2", 2, marks=pytest.mark.long),
        pytest.param("dpo", f"--context_parallel_size 2 {PACKED}", 2, marks=pytest.mark.long),
        pytest.param("kto", f"--pipeline_model_parallel_size 2 {PACKED}", 2, marks=pytest.mark.long),
        pytest.param("kto", "", None, marks=pytest.mark.long),
        pytest.param("kto", DP_PACKED, 2, marks=pytest.mark.long),
    ],
)
def test_computed_before_training_the_reference_is_the_same(
    kind: str, flags: str, processes: int | None, place: Place
) -> None:
    base = WHOLE if "--packing" in flags else ""
    found, wanted = place.run(kind, f"{base} {PRECOMPUTED} {flags}", processes), place.run(kind, base)
    assert "whose log-probabilities were computed before training" in found.printed
    assert_same_steps(found, wanted)
    assert_same_weights(found.weights, wanted.weights, load_file(start(place) / "model.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_that_follows(kind: str, place: Place) -> None:
    """Of 2 of 3 steps it becomes 0.6 of the policy."""
    run = place.run(kind, "--sync_ref_model true --ref_model_sync_steps 2 --save_steps 1")
    found, policy = (
        load_file(run.folder / "checkpoint-2" / name / "model.safetensors") for name in ("training_state/reference", "")
    )
    for name, tensor in load_file(start(place) / "model.safetensors").items():
        assert found[name].equal(tensor.mul(1 - 0.6).add(policy[name], alpha=0.6))
    last = load_file(run.checkpoint / "training_state" / "reference" / "model.safetensors")
    assert all(tensor.equal(last[name]) for name, tensor in found.items())
    assert run.steps[2]["loss"] != place.run(kind).steps[2]["loss"]


@pytest.mark.long
def test_over_several_epochs_in_shuffled_order_too(place: Place) -> None:
    """What was computed before is found by sample, not by place."""
    flags = "--train_dataloader_shuffle true --global_batch_size 8"
    found, wanted = place.run("dpo", f"{PRECOMPUTED} {flags}"), place.run("dpo", flags)
    assert_same_steps(found, wanted)
    in_order = place.run("dpo", "--global_batch_size 8")
    assert found.steps[0]["logps/chosen"] != pytest.approx(in_order.steps[0]["logps/chosen"], abs=1e-3)


def test_without_a_reference_and_with_the_answers_own_loss(place: Place) -> None:
    run = place.run("dpo", "--reference_free true --rpo_alpha 0.7 --beta 0.02")
    policy = upstream.causal(start(place))
    rows = place.train[:4]
    wanted = by_hand.dpo(policy, None, start(place), rows, beta=0.02)
    sums, tokens = by_hand.answers(policy, start(place), rows, "chosen")
    likelihood = float(-sums.sum() / tokens.sum())
    wanted |= {"loss": wanted["loss"] + 0.7 * likelihood, "nll_loss": likelihood}
    assert_close(run.steps[0], wanted)
    assert "reference:" not in run.printed


@pytest.mark.long
def test_the_answers_own_loss_in_two_processes(place: Place) -> None:
    """A mean over tokens among means over pairs: of all ranks' tokens."""
    flags = "--rpo_alpha 0.7"
    one = place.run("dpo", f"{flags} {WHOLE}")
    for layout in (DP_PACKED, "--context_parallel_size 2", "--pipeline_model_parallel_size 2 --micro_batch_size 1"):
        two = place.run("dpo", f"{flags} {WHOLE} {layout}", 2)
        for found, wanted in zip(two.steps, one.steps, strict=True):
            assert_close(found, {name: wanted[name] for name in ("loss", "nll_loss", "grad_norm", "rewards/margins")})
        assert_same_weights(two.weights, one.weights, load_file(start(place) / "model.safetensors"))


@pytest.mark.long
def test_a_reference_in_megatron_cores_format(place: Place) -> None:
    place.swift("export --model other --to_mcore true --output_dir other-mcore")
    read = place.run("dpo", "--mcore_ref_model other-mcore --tensor_model_parallel_size 2", 2)
    assert_same_steps(read, place.run("dpo", "--ref_model other"))


@pytest.mark.long
def test_another_reference_in_kto(place: Place) -> None:
    run = place.run("kto", "--ref_model other")
    policy, reference = upstream.causal(run.checkpoint), upstream.causal(place.folder / "other")
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    assert_close(evaluated(run), by_hand.kto(policy, reference, start(place), judged(place.val), 4, **weights))


def test_a_document_that_is_all_prompt_would_be_seen(place: Place) -> None:
    """The numbers by hand can fail: of other tokens they are others."""
    policy = upstream.causal(start(place))
    tokens, prompt = by_hand.tokenized(start(place), place.val[0], place.val[0]["chosen"])
    right, wrong = by_hand.log_prob(policy, tokens, prompt), by_hand.log_prob(policy, tokens, prompt - 1)
    assert not torch.isclose(right, wrong, rtol=1e-2)
