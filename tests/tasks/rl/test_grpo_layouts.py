"""GRPO in two processes is that in one, whatever they share: completions, rewards, losses, weights."""

import pytest

from tests.tasks.preference.runs import assert_same_weights
from tests.tasks.rl.runs import BASE, LORA, MOE, Place, assert_same_steps

pytestmark = pytest.mark.slow
later = pytest.mark.long
TP = "--tensor_model_parallel_size 2 --sequence_parallel true"
PP = "--pipeline_model_parallel_size 2"
VPP = f"{PP} --virtual_pipeline_model_parallel_size 2"
CP = "--context_parallel_size 2"
DP = "--use_distributed_optimizer true"
OVERLAPPED = "--overlap_grad_reduce true --overlap_param_gather true"
EP = "--expert_model_parallel_size 2"
FIPO = "--loss_type fipo --fipo_clip_high_only false --fipo_decay_rate 3"
TEACHER = "--teacher_model other --teacher_kl_coef 0.3 --beta 0"
PACKED = "--packing true --packing_length 160 --micro_batch_size 1"


def the_same(place: Place, layout: str, base: str, processes: int | None = 2) -> None:
    found, wanted = place.run(f"{base} {layout}".strip(), processes), place.run(base)
    assert_same_steps(found, wanted)
    start = place.start("qwen3_moe" if "qwen3_moe" in base else "qwen3")
    if "--tuner_type" in base:
        assert max(float((found.adapter[name] - tensor).abs().max()) for name, tensor in wanted.adapter.items()) < 1e-4
    else:
        assert_same_weights(found.weights, wanted.weights, start)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP, id="TP2 SP"),
        pytest.param(PP, id="PP2", marks=later),
        pytest.param(VPP, id="PP2 VPP2", marks=later),
        pytest.param(CP, id="CP2", marks=later),
        pytest.param(f"{CP} {PACKED}", id="CP2 packed", marks=later),
        pytest.param(f"{PP} {PACKED}", id="PP2 packed", marks=later),
        pytest.param(DP, id="DP2", marks=later),
        pytest.param(f"{DP} {OVERLAPPED}", id="DP2 overlapped", marks=later),
        pytest.param(f"{DP} {PACKED}", id="DP2 packed", marks=later),
    ],
)
def test_two_processes(layout: str, place: Place) -> None:
    the_same(place, layout, BASE)


@later
def test_packed(place: Place) -> None:
    the_same(place, PACKED, BASE, None)


@later
@pytest.mark.parametrize("layout", [EP, f"{TP} {EP}", f"{TP} {EP} {PACKED}", PP, CP])
def test_experts(layout: str, place: Place) -> None:
    the_same(place, layout, MOE)


@later
@pytest.mark.parametrize("layout", [TP, PP, CP, f"{DP} {OVERLAPPED}"])
def test_lora(layout: str, place: Place) -> None:
    place.adapter()
    the_same(place, layout, LORA)


@later
@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--importance_sampling_level sequence", CP),
        ("--importance_sampling_level sequence_token --loss_type dapo", f"{CP} {PACKED}"),
        ("--loss_type dr_grpo", f"{DP} {PACKED}"),
        ("--loss_type cispo", DP),
        ("--loss_type sapo", CP),
        ("--loss_type bnpo --micro_batch_size 1", DP),
        (FIPO, CP),
        (FIPO, f"{CP} {PACKED}"),
        (FIPO, f"{DP} {PACKED}"),
        (FIPO, PP),
        ("--loss_type real", CP),
        ("--loss_type real --micro_batch_size 1", DP),
        ("--loss_type real", VPP),
        ("--loss_type real", f"{TP} {PACKED}"),
        (TEACHER, CP),
        (TEACHER, f"{DP} {PACKED}"),
        (TEACHER, VPP),
        (TEACHER, TP),
        (TEACHER, f"{DP} --teacher_tensor_model_parallel_size 2"),
        (TEACHER, f"{TP} --teacher_tensor_model_parallel_size 1 --teacher_context_parallel_size 2"),
        (TEACHER, f"{CP} {PACKED} --teacher_context_parallel_size 1 --teacher_pipeline_model_parallel_size 2"),
        ("--log_rollout_offpolicy_metrics true", f"{CP} {PACKED}"),
        ("--log_rollout_offpolicy_metrics true", DP),
        ("--top_entropy_quantile 0.3", CP),
        ("--top_entropy_quantile 0.3", DP),
        ("--top_entropy_quantile 0.3", PP),
        ("--top_entropy_quantile 0.3", TP),
        ("--kl_in_reward true --ref_model other", CP),
        ("--kl_in_reward true --ref_model other", VPP),
        ("--kl_in_reward true --ref_model other", f"{DP} {PACKED}"),
        ("--rollout_importance_sampling_mode sequence_truncate", CP),
        ("--overlong_filter true --loss_type dapo", DP),
        ("--steps_per_generation 1 --num_iterations 2", PP),
        ("--steps_per_generation 1 --num_iterations 2", TP),
    ],
)
def test_options_in_two_processes(flags: str, layout: str, place: Place) -> None:
    the_same(place, layout, flags)
