"""Preference training in two processes is that in one, whatever they share; packed, what it is unpacked."""

import pytest
from safetensors.torch import load_file

from tests.tasks.preference.runs import PACKED, WHOLE, Place, assert_same_steps, assert_same_weights

pytestmark = pytest.mark.slow
TP = "--tensor_model_parallel_size 2 --sequence_parallel true"
PP = "--pipeline_model_parallel_size 2"
CP = "--context_parallel_size 2"
DP = "--use_distributed_optimizer true"
OVERLAPPED = "--overlap_grad_reduce true --overlap_param_gather true"
later = pytest.mark.long


def the_same(place: Place, kind: str, flags: str, processes: int | None, base: str = "", model: str = "") -> None:
    base = WHOLE if "--packing" in flags else base
    found, wanted = place.run(kind, f"{base} {flags}".strip(), processes), place.run(kind, base)
    assert_same_steps(found, wanted)
    start = place.folder / (model or ("reward" if kind == "rm" else "qwen3")) / "model.safetensors"
    assert_same_weights(found.weights, wanted.weights, load_file(start))


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("dpo", TP, id="dpo TP2 SP"),
        pytest.param("dpo", PP, id="dpo PP2", marks=later),
        pytest.param("dpo", f"{PP} --virtual_pipeline_model_parallel_size 2", id="dpo PP2 VPP2", marks=later),
        pytest.param("dpo", CP, id="dpo CP2", marks=later),
        pytest.param("dpo", f"{CP} {PACKED}", id="dpo CP2 packed", marks=later),
        pytest.param("dpo", DP, id="dpo DP2", marks=later),
        pytest.param("dpo", f"{DP} {OVERLAPPED}", id="dpo DP2 overlapped", marks=later),
        pytest.param("dpo", f"{PP} {PACKED}", id="dpo PP2 packed", marks=later),
        pytest.param("kto", f"{CP} {PACKED}", id="kto CP2 packed", marks=later),
        pytest.param("kto", PP, id="kto PP2", marks=later),
        pytest.param("kto", DP, id="kto DP2", marks=later),
        pytest.param("kto", f"{DP} {OVERLAPPED}", id="kto DP2 overlapped", marks=later),
        pytest.param("orpo", f"{CP} {PACKED}", id="orpo CP2 packed", marks=later),
        pytest.param("orpo", PP, id="orpo PP2", marks=later),
        pytest.param("orpo", TP, id="orpo TP2 SP", marks=later),
        pytest.param("orpo", f"{DP} {PACKED}", id="orpo DP2 packed", marks=later),
        pytest.param("simpo", f"{DP} {OVERLAPPED}", id="simpo DP2 overlapped", marks=later),
        pytest.param("simpo", f"{CP} {PACKED}", id="simpo CP2 packed", marks=later),
        pytest.param("cpo", f"{PP} --micro_batch_size 1", id="cpo PP2", marks=later),
        pytest.param("cpo", TP, id="cpo TP2 SP", marks=later),
        pytest.param("rm", f"{CP} {PACKED}", id="rm CP2 packed", marks=later),
        pytest.param("rm", PP, id="rm PP2", marks=later),
        pytest.param("rm", f"{DP} {OVERLAPPED}", id="rm DP2 overlapped", marks=later),
        pytest.param("rm", TP, id="rm TP2 SP", marks=later),
    ],
)
def test_two_processes(kind: str, flags: str, place: Place) -> None:
    the_same(place, kind, flags, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "kto", "rm"])
def test_packed(kind: str, place: Place) -> None:
    the_same(place, kind, PACKED, None)


@pytest.mark.long
def test_more_ranks_than_samples_are_left(place: Place) -> None:
    """Micro batches of one sample on each of three ranks: a global batch has as many fillers as it needs."""
    the_same(place, "dpo", "--micro_batch_size 1 --eval_iters 1", 4, base="--eval_iters 1")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("layout", ["--expert_model_parallel_size 2", f"{TP} --expert_model_parallel_size 2"])
def test_experts(kind: str, layout: str, place: Place) -> None:
    the_same(place, kind, layout, 2, base="--model qwen3_moe", model="qwen3_moe")
