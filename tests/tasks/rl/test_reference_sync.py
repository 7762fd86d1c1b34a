"""References that follow the policy, beside TRL's callback: bit for bit what it makes of the run's own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.tasks.losses import upstream
from tests.tasks.rl.runs import LORA, MOE, Place, Trained
from tests.tasks.rl.test_grpo_layouts import DP, EP, OVERLAPPED, PACKED, TP, VPP
from tests.tasks.rl.test_grpo_numbers import reference

pytestmark = pytest.mark.slow
later = pytest.mark.long
ONE = "--steps_per_generation 1"
# The first and the third step leave it as it is.
FOLLOWS = f"{ONE} --sync_ref_model true --ref_model_sync_steps 2 --train_iters 4 --save_steps 1"
SHARE = 0.6


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def of_reference(run: Trained, step: int) -> dict[str, Tensor]:
    return weights(run.folder / f"checkpoint-{step}" / "training_state" / "reference")


class Parameters(nn.Module):
    """Tensors as TRL's callback sees a model."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        for number, name in enumerate(sorted(tensors)):
            self.register_parameter(str(number), nn.Parameter(tensors[name].clone()))


def followed(start: dict[str, Tensor], policies: list[dict[str, Tensor]], share: float) -> dict[str, Tensor]:
    """What becomes of a reference."""
    found = Parameters(start)
    for policy in policies:
        upstream.follow(Parameters(policy), found, share)
    return dict(zip(sorted(start), found.parameters(), strict=True))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in found.items() if not tensor.equal(wanted[name])] == []


def follows(run: Trained, start: dict[str, Tensor], suffix: str = "") -> None:
    policy = {step: weights(run.folder / f"checkpoint-{step}{suffix}") for step in (2, 4)}
    same(of_reference(run, 1), start)
    for step, policies in ((2, [policy[2]]), (3, [policy[2]]), (4, [policy[2], policy[4]])):
        same(of_reference(run, step), followed(start, policies, SHARE))


@later
def test_as_trl_does_it(place: Place) -> None:
    """Its weights, and the divergences from it that are trained with."""
    run = place.run(f"{FOLLOWS} --ref_model other")
    assert "reference: other, and it follows the model" in run.printed
    follows(run, place.start("other"))
    beside: Any = reference(place, run, ref="other", follows=(2, SHARE))
    log = beside.steps()
    assert abs(log[2]["kl"] - log[1]["kl"]) > 0.1
    for found, wanted in zip(run.steps, log, strict=True):
        assert found["kl"] == pytest.approx(wanted["kl"], rel=1e-4)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-5)


@later
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (TP, 2),
        (VPP, 2),
        (f"{DP} {OVERLAPPED} {PACKED}", 2),
        (f"{MOE} {EP}", 2),
        ("--async_save true --offload_ref_model true", None),
        ("--kl_in_reward true --ref_model other", None),
    ],
)
def test_layouts(flags: str, processes: int | None, place: Place) -> None:
    run = place.run(f"{flags} {FOLLOWS}", processes)
    start = "other" if "--ref_model other" in flags else "qwen3_moe" if "qwen3_moe" in flags else "qwen3"
    follows(run, place.start(start))
    if "--ref_model" not in flags:
        assert run.steps[0]["kl"] == 0 < run.steps[1]["kl"]


@later
def test_an_adapter_is_followed_with_what_it_is_beside(place: Place) -> None:
    """A reference of its own is needed, and moves towards the merged weights."""
    place.adapter()
    merged = LORA.replace("merge_lora false", "merge_lora true")
    run = place.run(f"{merged} {FOLLOWS} --ref_model other")
    policy = weights(run.folder / "checkpoint-2-merged")
    for name, tensor in of_reference(run, 2).items():
        wanted = (1 - SHARE) * place.start("other")[name] + SHARE * policy[name]
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)
    same(of_reference(run, 3), of_reference(run, 2))


@later
def test_half_precision(place: Place) -> None:
    """In the dtype of the weights, as TRL has it."""
    run = place.run(f"{FOLLOWS} --torch_dtype bfloat16")
    follows(run, {name: tensor.bfloat16() for name, tensor in place.start().items()})


@later
def test_one_of_another_shape(place: Place) -> None:
    printed = place.megatron(place.line(f"{FOLLOWS} --ref_model qwen3_moe", "another-shape"), code=1)
    assert (
        "error: --sync_ref_model true: the reference follows the model tensor by tensor, and decoder.layers" in printed
    )
    assert "Traceback" not in printed
