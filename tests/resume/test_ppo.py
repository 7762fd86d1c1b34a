"""PPO goes on bit for bit, both models: killed in a generation, in the critic's warmup, between the two updates."""

import json

import pytest

from tests.resume.harness import LAYOUTS, LORA, Case, Output

pytestmark = pytest.mark.slow
# A reward that writes into the output folder, where the run can be killed: within a generation.
SCORED = """
import json
import os
from pathlib import Path

from megaswift.tasks.rewards import reward

FILE = Path(json.loads(os.environ["WATCH"])["output"]) / "scored"


@reward("letters")
def letters(completions, **columns):
    with FILE.open("a") as file:
        file.write(f"{len(completions)}\\n")
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]
"""
PPO = (
    "rlhf --rlhf_type ppo --dataset train.jsonl --external_plugins scored.py --reward_funcs letters --use_vllm false "
    "--max_completion_length 8 --packing_length 160 --critic_warmup 3 --critic_lr 1e-3 --lr_warmup_iters 1"
)
SEVERAL = "--steps_per_generation 2 --num_iterations 2"  # a step in the midst of what was generated at a time
CASES = {
    "ppo DP2": (f"{LAYOUTS['DP2']} --critic_tensor_model_parallel_size 2", ""),
    "ppo PP2 LoRA": (f"{LAYOUTS['PP2']} {LORA} --critic_pipeline_model_parallel_size 1", SEVERAL),
    "ppo EP2": (f"{LAYOUTS['EP2']} --critic_expert_model_parallel_size 1", SEVERAL),
    "ppo TP2 async": (f"{LAYOUTS['TP2']} --async_save true", SEVERAL),
    "ppo DP2 offload": (f"{LAYOUTS['DP2']} --offload_critic true --offload_model true", SEVERAL),
}
WITHIN_WARMUP = {"label": "step 3", "count": 1}
BETWEEN_UPDATES = {"label": "step 5", "count": 2}
WITHIN_GENERATION = {"label": "open scored", "count": 2}


@pytest.fixture(scope="module")
def scored(place):
    (place / "scored.py").write_text(SCORED)
    return place


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ppo DP2" else pytest.mark.long) for n in CASES])
def test_killed_and_resumed(name, scored):
    flags, more = CASES[name]
    model = "qwen3_moe" if "EP2" in name else "qwen3"
    output = Output(Case(scored, name, f"{flags} {more}", model, steps=8, command=PPO))
    for at in (WITHIN_WARMUP, BETWEEN_UPDATES, WITHIN_GENERATION):
        if at is not WITHIN_GENERATION or not more:  # the second one of a run that has so much left to do
            assert output.run({"rank": 0, "how": "kill"} | at).killed
    output.run()
    output.compare()
    critic = next(output.run_folder.glob("checkpoint-8/training_state/critic/config.json"))
    assert json.loads(critic.read_text())["architectures"][0].endswith("ForSequenceClassification")


@pytest.mark.long
def test_the_critic_changes_its_layout(scored):
    """Its optimizer too: the steps after it are those of the run that did not, up to rounding."""
    case = Case(scored, "ppo other layout", LAYOUTS["DP2"], steps=6, command=PPO)
    output = Output(case, strict=False)
    assert output.run({"rank": 0, "how": "kill"} | BETWEEN_UPDATES).killed
    output.run(flags="--critic_tensor_model_parallel_size 2")
    for row, expected in zip(output.rows, case.reference.rows, strict=True):
        for key in ("loss", "reward", "critic/loss", "critic/grad_norm", "values/mean"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), (row["step"], key)


@pytest.mark.long
def test_a_run_without_a_critic_is_not_resumed(scored):
    grpo = PPO.replace("ppo", "grpo").replace("--critic_warmup 3 --critic_lr 1e-3", "--num_generations 2")
    output = Output(Case(scored, "grpo then ppo", "", processes=None, steps=2, command=grpo))
    output.run()
    case = Case(scored, "grpo then ppo", "", processes=None, steps=4, command=PPO)
    ended = output.run(case=case, code=1)
    assert "it has no training_state/critic, so its run was not of --rlhf_type ppo" in ended.said


@pytest.mark.long
def test_a_resumed_run_adds_a_reference(scored):
    """The rest of a rollout batch gets the reference's log-probabilities, which its checkpoint lacks."""
    grpo = PPO.replace("ppo", "grpo").replace("--critic_warmup 3 --critic_lr 1e-3", f"--num_generations 2 {SEVERAL}")
    output = Output(Case(scored, "grpo adds", "", processes=None, steps=2, command=f"{grpo} --beta 0"))
    output.run()
    output.run(case=Case(scored, "grpo adds", "", processes=None, steps=3, command=f"{grpo} --beta 0.1"))
    assert output.rows[-1]["step"] == 3
    assert output.rows[-1]["kl"] > 0
