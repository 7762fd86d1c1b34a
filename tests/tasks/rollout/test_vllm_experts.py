"""Runs of GRPO whose completions vLLM writes in the trainer's process, on the CPU: its log-probabilities, and its
experts, are the trainer's.

The kernel for CPUs of vLLM 0.26 chooses experts by itself and does not say which. A kernel that does is imitated: what
it chooses goes to the router's witness, as it does where the router chooses. In 0.32 the router chooses, and nothing
records it without Triton. scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. Each run takes about
a minute.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import prepared
from tests.tasks.rl.runs import COMMON, Place
from tests.tasks.rollout.test_vllm import SHAPE
from tests.vllm_cpu import IS_0_32, PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
SAYING = """
import sys
from megaswift.cli.main import main
from megaswift.tasks.rollout import vllm_engine


def watched(model):
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    running, choose = [], cpu_fused_moe.select_experts

    def select(*arguments, **more):
        weights, experts = choose(*arguments, **more)
        running[-1].router.capture_fn(experts)
        return weights, experts

    cpu_fused_moe.select_experts = select
    for module in model.modules():
        if isinstance(module, MoERunner):
            module.register_forward_pre_hook(lambda module, inputs: running.append(module))


if "says" in sys.argv[1]:
    vllm_engine.monolithic_moe_kernel = watched
if "direct" in sys.argv[1]:  # vLLM computes with its parameters, as on a GPU: they can be copied to
    sys.path.append(ROOT)
    from megaswift.tasks.rollout import factory
    from tests.tasks.rollout.direct_worker import use_parameters

    sync_direct = factory.sync_direct

    def sync_and_tell(*arguments, **settings):
        print("copied directly")
        return sync_direct(*arguments, **settings)

    use_parameters()
    factory.sync_direct = sync_and_tell
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    made = Place(tmp_path_factory.mktemp("vllm"))
    for family in ("qwen3", "qwen3_moe"):
        made.model(f"{family}_wide", family, **SHAPE)
    (made.folder / "script.py").write_text(f"ROOT = {str(prepared.ROOT)!r}\n{SAYING}")
    return made


def run(place: Place, words: str, *, how: str = "plain") -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what was printed, and the log's steps. how: "says" or "direct", as the script reads it."""
    common = COMMON.replace("--use_vllm false", "--use_vllm true --vllm_max_model_len 128 --vllm_max_num_seqs 8")
    if "--steps_per_generation" in words:
        common = common.replace("--steps_per_generation 3", "")
    output = f"run-{len(list(place.folder.iterdir()))}"
    line = f"{common} --micro_batch_size 2 --reward_funcs waves {words} --output_dir {output} --add_version false"
    done = subprocess.run(
        [PYTHON, "script.py", how, "rlhf", "--rlhf_type", "grpo", *line.split()],
        cwd=place.folder,
        env=os.environ | prepared.ON_CPU | {"HF_HOME": str(place.folder / "cache"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    log = Path(place.folder / output / "logging.jsonl")
    rows = [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []
    return done.returncode, done.stdout + done.stderr, [row for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model qwen3_wide", False),
        ("--model qwen3_moe_wide --lr 5e-5", False),
        pytest.param(
            *("--model qwen3_moe_wide --lr 5e-5 --router_replay_mode R3", True),
            marks=pytest.mark.skipif(IS_0_32, reason="vLLM's build for CPUs does not record experts since 0.32"),
        ),
    ],
)
def test_engine_and_trainer_agree(words: str, says: bool, place: Place) -> None:
    """On the log-probabilities of what was drawn, by the weights that drew it; R3: by the experts that vLLM says."""
    code, printed, steps = run(place, words, how="says" if says else "plain")
    assert code == 0, printed[-6000:]
    assert len(steps) == 3
    for row in steps:
        assert 0 < row["sampling/sampling_logp_difference/mean"] <= row["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("words", ["--model qwen3_wide", "--model qwen3_moe_wide --tuner_type lora --lora_rank 3"])
def test_engine_and_trainer_agree_after_direct_copies(words: str, place: Place) -> None:
    """Each step's completions are by new weights: the first by vLLM's loaders, the others by copies."""
    code, printed, steps = run(place, f"{words} --steps_per_generation 1", how="direct")
    assert code == 0, printed[-6000:]
    assert printed.count("copied directly") == len(steps) - 1 == 2
    for row in steps:
        assert 0 < row["sampling/sampling_logp_difference/mean"] <= row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["weight_sync/gb_per_s"] > 0


def test_a_kernel_that_does_not_say_its_experts(place: Place) -> None:
    code, printed, _ = run(place, "--model qwen3_moe_wide --router_replay_mode R3")
    assert code == 1, printed[-6000:]
    if IS_0_32:
        reason = "vLLM records the chosen experts with Triton alone since 0.32"
    else:
        reason = "vLLM's expert kernel on this machine (UnquantizedFusedMoEMethod)"
    assert f"--router_replay_mode R3: {reason}" in printed
    assert "Traceback" not in printed.partition("--router_replay_mode R3: vLLM")[2]
