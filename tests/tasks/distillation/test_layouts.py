"""Distillation in two processes is that in one, whatever they share; packed, what it is unpacked."""

import pytest
from safetensors.torch import load_file

from tests.tasks.distillation.runs import OFF_POLICY, ON_POLICY, PACKED, Distilled, assert_same_run
from tests.tasks.preference.runs import assert_same_weights

pytestmark = pytest.mark.slow
TP = "--tensor_model_parallel_size 2 --sequence_parallel true"
PP = "--pipeline_model_parallel_size 2"
CP = "--context_parallel_size 2"
EP = "--expert_model_parallel_size 2"
DP = "--use_distributed_optimizer true"
BASE = f"{OFF_POLICY} --sft_alpha 0.4"
TOP = "--gkd_logits_topk 9"
EXPERTS = "--model qwen3_moe --teacher_model teacher_moe"
later = pytest.mark.long


def the_same(place: Distilled, base: str, flags: str, processes: int | None = 2, model: str = "qwen3") -> None:
    found, wanted = place.run(f"{base} {flags}", processes), place.run(base)
    assert_same_run(found, wanted)
    assert_same_weights(found.weights, wanted.weights, load_file(place.folder / model / "model.safetensors"))


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        pytest.param(ON_POLICY, TP, id="TP2 SP on policy"),
        pytest.param(BASE, TP, id="TP2 SP", marks=later),
        pytest.param(f"{BASE} {TOP}", TP, id="TP2 SP top", marks=later),
        pytest.param(BASE, PP, id="PP2", marks=later),
        pytest.param(f"{BASE} {TOP}", PP, id="PP2 top", marks=later),
        pytest.param(ON_POLICY, f"{PP} --virtual_pipeline_model_parallel_size 2", id="PP2 VPP2", marks=later),
        pytest.param(BASE, CP, id="CP2", marks=later),
        pytest.param(ON_POLICY, f"{CP} {PACKED}", id="CP2 packed", marks=later),
        pytest.param(BASE, DP, id="DP2", marks=later),
        pytest.param("--max_completion_length 8", f"{DP} {PACKED}", id="DP2 packed", marks=later),
        pytest.param(f"{ON_POLICY} {EXPERTS}", EP, id="EP2 on policy", marks=later),
        pytest.param(f"{BASE} {EXPERTS}", f"{TP} {EP}", id="TP2 SP EP2", marks=later),
        pytest.param(f"{BASE} --model qwen3_moe", EP, id="EP2, a dense teacher", marks=later),
        pytest.param(f"{BASE} --teacher_model teacher_moe", TP, id="TP2 SP, a teacher of experts", marks=later),
    ],
)
def test_two_processes(base: str, flags: str, place: Distilled) -> None:
    the_same(place, base, flags, model="qwen3_moe" if "--model qwen3_moe" in base else "qwen3")


@pytest.mark.long
@pytest.mark.parametrize("processes", [None, 4])
def test_packed(processes: int | None, place: Distilled) -> None:
    """In four processes there are fewer packs than ranks."""
    the_same(place, BASE, PACKED, processes)


@pytest.mark.long
@pytest.mark.parametrize("layout", [TP, PP, f"{DP} --overlap_grad_reduce true --overlap_param_gather true"])
def test_lora(layout: str, place: Distilled) -> None:
    """From an adapter that does something; on steps of both kinds."""
    first = place.run(f"{OFF_POLICY} --tuner_type lora --merge_lora false").checkpoint
    base = f"--tuner_type lora --adapters {first} --max_completion_length 8 --lora_dropout 0 --seed 1 --lr 1e-2"
    found, wanted = place.run(f"{base} {layout}", 2), place.run(base)
    assert 0 < sum(row["gkd/on_policy_fraction"] for row in wanted.steps) < 3
    assert_same_run(found, wanted)
    assert wanted.steps[-1]["loss"] < wanted.steps[0]["loss"] + 0.1
    assert found.adapter.keys() == wanted.adapter.keys()
    assert max(float((found.adapter[name] - wanted.adapter[name]).abs().max()) for name in found.adapter) < 1e-4
