"""Three steps of GRPO beside TRL's loss on transformers' model, on the completions that the run has logged."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.preference.runs import assert_close, assert_same_weights
from tests.tasks.rl import upstream
from tests.tasks.rl.runs import BASE, LORA, MOE, MOE_RATE, Place, Trained
from tests.tasks.rl.upstream import Reference

pytestmark = pytest.mark.slow
later = pytest.mark.long


def agree(run: Trained, reference: Reference) -> None:
    """Logs and weights."""
    start = {name: tensor.clone() for name, tensor in reference.policy.state_dict().items()}
    log = reference.steps()
    assert len(run.steps) == len(log) == 3
    for found, wanted in zip(run.steps, log, strict=True):
        if "entropy" not in found:
            del wanted["entropy"]
        norm = wanted.pop("grad_norm")
        assert_close(found, wanted)
        # Rounding in the weights of the step before is larger in gradients.
        assert found["grad_norm"] == pytest.approx(norm, rel=3e-5)
    wanted = reference.policy.state_dict()
    if any("experts" in name for name in wanted):  # which transformers holds fused, and files by themselves
        wanted, start = (upstream.as_filed(reference.policy, each) for each in (wanted, start))
    assert_same_weights(run.weights, wanted, start)
    assert_close(run.steps[0], upstream.rollout_means(run))


def reference(place: Place, run: Trained, model: str = "qwen3", ref: str | None = None, **settings: Any) -> Reference:
    folder = place.folder / model
    return Reference(folder, run, *upstream.models(folder, place.folder / ref if ref else None), **settings)


def clipped(run: Trained) -> float:
    names = "clip_ratio/region_mean", "cispo_clip_ratio"
    return max(row[name] for row in run.steps for name in names if name in row)


def test_grpo(place: Place) -> None:
    """With another reference, so that its divergence counts from the first step on."""
    run = place.run(BASE)
    assert run.steps[0]["kl"] > 0.1
    assert clipped(run) > 0.05
    agree(run, reference(place, run, ref="other"))


@pytest.mark.long
def test_dapo(place: Place) -> None:
    """Measured against the weights that it begins with."""
    run = place.run("--loss_type dapo --epsilon 0.1 --epsilon_high 0.15 --delta 1.3")
    assert run.steps[0]["kl"] == 0 < run.steps[2]["kl"]
    assert clipped(run) > 0.05
    agree(run, reference(place, run, loss_type="dapo", epsilon_low=0.1, epsilon_high=0.15, args={"delta": 1.3}))


@later
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "bnpo"])
def test_losses(loss_type: str, level: str, place: Place) -> None:
    settings: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level}
    flags = f"--ref_model other --loss_type {loss_type} --importance_sampling_level {level}"
    match loss_type:
        case "cispo":
            flags, settings = f"{flags} --epsilon_high 1.05", settings | {"epsilon_high": 1.05}
        case "sapo":
            flags, settings = f"{flags} --tau_pos 0.8", settings | {"args": {"sapo_temperature_pos": 0.8}}
        case "bnpo":  # a mean over micro batches: of one
            flags += " --micro_batch_size 8"
    if loss_type not in ("cispo", "sapo"):
        flags, settings = f"{flags} --epsilon 0.05", settings | {"epsilon_low": 0.05, "epsilon_high": 0.05}
    run = place.run(flags)
    assert loss_type == "sapo" or clipped(run) > 0.02
    agree(run, reference(place, run, ref="other", **settings))


@later
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--beta 0.3 --temperature 0.7", {"beta": 0.3, "temperature": 0.7}),
        ("--beta 0", {"beta": 0.0}),
        # Twice through what was generated, of one step: the second time the policy is another; then anew.
        ("--steps_per_generation 1 --num_iterations 2", {"iterations": 2}),
        ("--steps_per_generation 1", {}),
        ("--off_policy_sequence_mask_delta 1e-3", {"off_policy_mask_threshold": 1e-3}),
        ("--overlong_filter true", {"without_cut_off": True}),
        ("--overlong_filter true --loss_type dapo", {"without_cut_off": True, "loss_type": "dapo"}),
        ("--top_entropy_quantile 0.3", {"top_entropy_quantile": 0.3}),
        ("--kl_in_reward true --ref_model other", {"kl_in_reward": True}),
        (MOE, {"model": "qwen3_moe", "rate": MOE_RATE}),
    ],
)
def test_options(flags: str, settings: dict[str, Any], place: Place) -> None:
    run = place.run(flags)
    ref = "other" if "--ref_model" in flags else None
    assert any(row["finish_reason"] == "length" for row in run.completions)
    agree(run, reference(place, run, ref=ref, **settings))
    if "off_policy_mask_threshold" in settings:
        masked = [row["sampling/off_policy_masked"] for row in run.steps]
        assert masked[0] == 0 < masked[2] < 1
    if "--kl_in_reward" in flags:
        assert all("kl" not in row for row in run.steps)
        # The reward that is logged, and written down, is the functions'; what is compared is less.
        given = torch.tensor([row["reward"] for row in run.completions])
        torch.testing.assert_close(given, upstream.rewards_of(run.completions))
        assert run.steps[0]["reward"] == pytest.approx(given.mean().item(), abs=1e-6)
        assert max(abs(row["kl_penalty"]) for row in run.completions) > 0.05


def groups(rewards: Tensor) -> Tensor:
    return rewards.double().view(-1, 4)


def rloo(rewards: Tensor) -> Tensor:
    """https://arxiv.org/abs/2402.14740: over the mean of the prompt's other completions."""
    of = groups(rewards)
    return (of - (of.sum(1, keepdim=True) - of) / 3).flatten().float()


def over_all(rewards: Tensor) -> Tensor:
    """https://arxiv.org/abs/2501.03262: over the group's mean, divided by the spread of this in the whole batch."""
    above = groups(rewards) - groups(rewards).mean(1, keepdim=True)
    return (above / (above.std() + 1e-4)).flatten().float()


def of_the_batch(rewards: Tensor) -> Tensor:
    return (
        ((groups(rewards) - groups(rewards).mean(1, keepdim=True)) / (rewards.double().std() + 1e-4)).flatten().float()
    )


def plain(rewards: Tensor) -> Tensor:
    return (groups(rewards) - groups(rewards).mean(1, keepdim=True)).flatten().float()


@later
@pytest.mark.parametrize(
    ("flags", "by_hand"),
    [
        ("--advantage_estimator rloo", rloo),
        ("--advantage_estimator reinforce_plus_plus", over_all),
        ("--scale_rewards batch", of_the_batch),
        ("--scale_rewards none", plain),
    ],
)
def test_advantages(flags: str, by_hand: Any, place: Place) -> None:
    run = place.run(flags)
    agree(run, reference(place, run, advantages=by_hand))


@later
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_an_engine_that_is_exact_needs_no_correction(mode: str, place: Place) -> None:
    run, without = place.run(f"{BASE} --rollout_importance_sampling_mode {mode}"), place.run(BASE)
    for found, wanted in zip(run.steps, without.steps, strict=True):
        assert abs(found["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4
        for name in ("loss", "grad_norm", "kl", "clip_ratio/region_mean"):
            assert abs(found[name] - wanted[name]) < 1e-4 * max(1, abs(wanted[name])), name
    worst = max(float((run.weights[name] - tensor).abs().max()) for name, tensor in without.weights.items())
    assert worst < 1e-4


@later
def test_lora(place: Place) -> None:
    """Beside PEFT, from an adapter that is no zero; the reference is the model without it."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    adapter = place.adapter()
    run = place.run(LORA)
    assert run.steps[0]["kl"] > 0.01
    base, ref = (AutoModelForCausalLM.from_pretrained(place.folder / "qwen3", dtype=torch.float32) for _ in range(2))
    policy: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    start = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(policy).items()}
    log = Reference(place.folder / "qwen3", run, policy, ref).steps()
    for found, wanted in zip(run.steps, log, strict=True):
        assert_close(found, {name: value for name, value in wanted.items() if name != "entropy"})
    assert_same_weights(run.adapter, get_peft_model_state_dict(policy), start)
