"""GRPO of a mixture of experts whose choices are repeated: in one process, and in two whatever they share.

Where an engine and a trainer agree on all choices, to repeat them says nothing. So others are put in their place.
"""

import pytest

from tests.tasks.preference.runs import assert_same_weights
from tests.tasks.rl.runs import DIFFERENCE, MOE, Place, assert_same_steps
from tests.tasks.rl.test_grpo_layouts import CP, DP, EP, PACKED, PP, TP, VPP

pytestmark = pytest.mark.slow
later = pytest.mark.long
FULL = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
# The experts that a step has been told of are the next ones (of eight).
OTHERS = """
import sys
import numpy as np
from megaswift.cli.main import main
from megaswift.tasks.rl import grpo
from megaswift.tasks.rollout.engine import Completion

gather_experts, experts_of = grpo.gather_experts, Completion.padded_experts


def others(experts):
    return None if experts is None else np.where(experts < 0, experts, (experts + 1) % 8).astype(np.int16)


grpo.gather_experts = lambda *given: [others(experts) for experts in gather_experts(*given)]
Completion.padded_experts = lambda self, length: others(experts_of(self, length))
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""


def test_the_engines_experts(place: Place) -> None:
    """Its tokens go to the same ones before the first step, with or without; later the policy has others of its own."""
    run = place.run(f"{MOE} --router_replay_mode R3")
    assert all(0 < row[f"{DIFFERENCE}/max"] < 1e-4 for row in run.steps)
    assert run.steps[0]["clip_ratio/region_mean"] == 0


@later
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_own_experts_change_nothing_before_the_weights_do(mode: str, place: Place) -> None:
    found, plain = place.run(f"{MOE} --router_replay_mode {mode}"), place.run(MOE)
    for name in ("loss", "grad_norm", "kl"):
        assert found.steps[0][name] == pytest.approx(plain.steps[0][name], rel=1e-6, abs=1e-7)
        assert found.steps[2][name] != plain.steps[2][name]


@later
def test_engine_and_trainer_are_closer_in_bf16(place: Place) -> None:
    """Where rounding changes choices: a token that goes elsewhere is far off."""
    plain, found = (
        place.run(f"{MOE} --torch_dtype bfloat16 {flag}".strip()) for flag in ("", "--router_replay_mode R3")
    )
    for one, other in zip(found.steps, plain.steps, strict=True):
        assert one[f"{DIFFERENCE}/mean"] < 0.8 * other[f"{DIFFERENCE}/mean"]
    assert (
        max(row[f"{DIFFERENCE}/max"] for row in found.steps)
        < 0.3
        < max(row[f"{DIFFERENCE}/max"] for row in plain.steps)
    )


@later
def test_other_experts_of_the_engine(place: Place) -> None:
    """They are those of old log-probabilities and of training alike, and not those of the reference."""
    first = place.run(f"{MOE} --router_replay_mode R3", script=OTHERS).steps[0]
    assert first["clip_ratio/region_mean"] == 0
    assert first[f"{DIFFERENCE}/max"] > 0.1
    assert first["kl"] > 0.01
    assert place.run(MOE).steps[0]["kl"] == pytest.approx(0, abs=1e-6)


@later
def test_other_experts_than_before(place: Place) -> None:
    """They are those of training alone."""
    first = place.run(f"{MOE} --router_replay_mode R2", script=OTHERS).steps[0]
    assert first["clip_ratio/region_mean"] > 0.1
    assert first[f"{DIFFERENCE}/max"] < 1e-4


@later
@pytest.mark.parametrize(
    ("mode", "layout", "processes"),
    [
        ("R3", TP, 2),
        ("R3", f"{VPP} {FULL}", 2),
        ("R3", f"{CP} {PACKED}", 2),
        ("R3", EP, 2),
        ("R3", f"{FULL} {PACKED}", None),
        ("R2", f"{TP} {EP} {PACKED}", 2),
        ("R2", PP, 2),
        ("R2", CP, 2),
        ("R2", f"{DP} --top_entropy_quantile 0.5", 2),
    ],
)
def test_in_two_processes(mode: str, layout: str, processes: int | None, place: Place) -> None:
    base = f"{MOE} --router_replay_mode {mode}"
    if "--top_entropy_quantile" in layout:
        layout, _, share = layout.rpartition(" --top_entropy_quantile")
        base += f" --top_entropy_quantile{share}"
    found, wanted = place.run(f"{base} {layout}", processes, script=OTHERS), place.run(base, script=OTHERS)
    assert_same_steps(found, wanted)
    assert_same_weights(found.weights, wanted.weights, place.start("qwen3_moe"))
