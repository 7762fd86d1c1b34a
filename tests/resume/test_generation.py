"""Runs that generate go on bit for bit: completions that wait for steps, random numbers, the place among prompts."""

from pathlib import Path

import pytest

from tests.resume.harness import LAYOUTS, LORA, Case, Output

pytestmark = pytest.mark.slow
LETTERS = """
from megaswift.tasks.rewards import reward
from megaswift.tasks.multi_turn import scheduler


@reward("letters")
def letters(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


@scheduler("asks")
def asks(turn):
    turn.info["said"] = turn.completion
    return None if turn.number == 3 else "More?"
"""
GRPO = (
    "rlhf --rlhf_type grpo --dataset train.jsonl --external_plugins letters.py --reward_funcs letters --use_vllm false "
    "--num_generations 2 --max_completion_length 8 --packing_length 160"
)
SEVERAL = "--steps_per_generation 2 --num_iterations 2"  # a step in the midst of what was generated at a time
ASIDE = Path(__file__).parents[1] / "tasks" / "rl" / "aside.py"
BESIDE = "--use_vllm true --vllm_mode server --async_generate true"
TURNS = (
    "--multi_turn_scheduler asks --stop_words a e i o u r n t s --max_completion_length 48 --packing_length 176 "
    f"{SEVERAL}"
)
RUNNING = (  # what a generation leaves to the next one: a coefficient, and moments of rewards
    "--advantage_estimator reinforce --num_generations 1 --kl_in_reward true --target_kl 0.01 --kl_horizon 20 "
    "--normalize_rewards true --whiten_advantages true --advantage_clip 2"
)
CASES = {
    "grpo DP2": (LAYOUTS["DP2"], SEVERAL),
    "grpo DP2 running": (LAYOUTS["DP2"], f"{SEVERAL} {RUNNING}"),
    "grpo PP2 running": (LAYOUTS["PP2"], RUNNING),
    "grpo DP2 turns": (LAYOUTS["DP2"], TURNS),
    "grpo PP2 LoRA": (f"{LAYOUTS['PP2']} {LORA}", ""),
    "grpo EP2 dynamic": (LAYOUTS["EP2"], "--dynamic_sample true --logging_steps 3 --kl_in_reward true"),
    "grpo EP2 R2": (LAYOUTS["EP2"], f"{SEVERAL} --router_replay_mode R2"),
    "grpo EP2 R3": (LAYOUTS["EP2"], f"{SEVERAL} --router_replay_mode R3"),
    "grpo PP2 following": (LAYOUTS["PP2"], "--sync_ref_model true --ref_model_sync_steps 1"),
    # An engine in the place of servers, of which completions come while training goes on.
    "grpo DP2 beside": (LAYOUTS["DP2"], f"{SEVERAL} {BESIDE}"),
    "grpo PP2 beside dynamic": (LAYOUTS["PP2"], f"{BESIDE} --dynamic_sample true --kl_in_reward true"),
    "grpo DP2 offload": (LAYOUTS["DP2"], f"{SEVERAL} --offload_model true --offload_optimizer true"),
    "grpo TP2 async": (f"{LAYOUTS['TP2']} --async_save true", SEVERAL),
}


@pytest.fixture(scope="module")
def letters(place):
    (place / "letters.py").write_text(LETTERS)
    return place


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "grpo DP2" else pytest.mark.long) for n in CASES])
def test_killed_and_resumed(name, letters):
    flags, more = CASES[name]
    model = "qwen3_moe" if "EP2" in name else "qwen3"
    command = GRPO.replace("letters.py", f"letters.py {ASIDE}") if "beside" in name else GRPO
    case = Case(letters, name, f"{flags} {more}", model, steps=6, command=command)
    output = Output(case)
    for step in (4, 6):
        assert output.run({"rank": 0, "label": f"step {step}", "count": 1, "how": "kill"}).killed
    output.run()
    output.compare()
    if "running" in name:
        assert len({row["kl_coef"] for row in output.rows if "kl_coef" in row}) > 1
    assert "turns" not in name or max(row.get("num_turns", 0) for row in output.rows) > 1
