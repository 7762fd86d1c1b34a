"""Runs of distillation that are killed go on bit for bit: which steps are the student's, what is written in them."""

from contextlib import nullcontext

import pytest

from tests import tiny
from tests.resume.harness import LAYOUTS, LORA, Case, Output
from tests.tasks.distillation.test_teacher_server import teaching

pytestmark = pytest.mark.slow
GKD = (
    "rlhf --rlhf_type gkd --dataset train.jsonl --teacher_model teacher --use_vllm false --max_completion_length 8 "
    "--packing_length 160"
)
CASES = {
    "gkd DP2": (LAYOUTS["DP2"], "--sft_alpha 0.2 --val_dataset val.jsonl --eval_steps 2"),
    "gkd PP2 LoRA": (f"{LAYOUTS['PP2']} {LORA}", "--gkd_logits_topk 5"),
    "gkd TP2 teacher writes": (LAYOUTS["TP2"], "--seq_kd true --async_save true"),
    "gkd EP2": (LAYOUTS["EP2"], ""),
    "gkd DP2 teacher TP2": (LAYOUTS["DP2"], "--teacher_tensor_model_parallel_size 2"),
    "gkd PP2 teacher served": (LAYOUTS["PP2"], "--gkd_logits_topk 5"),
}


@pytest.fixture(scope="module")
def taught(place):
    tiny.save_tokenizer(tiny.save(place / "teacher", "qwen3", 1))
    return place


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_killed_and_resumed(name, taught):
    with teaching(taught / "teacher") if "served" in name else nullcontext((None, None)) as (url, _):
        command = GKD.replace("--teacher_model teacher", f"--teacher_model_server {url}") if url else GKD
        killed_and_resumed(name, taught, command)


def killed_and_resumed(name, taught, command):
    flags, more = CASES[name]
    model = "qwen3_moe" if "EP2" in name else "qwen3"
    case = Case(taught, name, f"{flags} {more}", model, steps=6, command=command)
    output = Output(case)
    for step in (4, 6):
        assert output.run({"rank": 0, "label": f"step {step}", "count": 1, "how": "kill"}).killed
    output.run()
    output.compare()
    own = [row["gkd/on_policy_fraction"] for row in output.rows if "gkd/on_policy_fraction" in row]
    assert 0 < sum(own) < 6
