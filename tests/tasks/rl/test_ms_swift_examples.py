"""ms-swift's example plugins, unchanged, under GRPO, from the folder that MS_SWIFT_EXAMPLES names."""

import json
import os
from pathlib import Path

import pytest
from megaswift.tasks.multi_turn import multi_turns
from megaswift.tasks.multi_turn.gym_env import envs
from megaswift.tasks.rewards import orms
from megaswift.tasks.rewards.reward_fn import TrainerState
from megaswift.tasks.system.ms_swift_imports import ms_swift_imports
from megaswift.tasks.system.plugins import load_plugins

from tests.tasks.preference.runs import write
from tests.tasks.rewards.conftest import own_registry  # noqa: F401  (a fixture)
from tests.tasks.rl.runs import Place
from tests.tasks.rl.test_ms_swift_turns import END, one_process, play, tokenizer  # noqa: F401  (fixtures)

FOLDER = Path(os.environ.get("MS_SWIFT_EXAMPLES", "."))
PLUGINS = [FOLDER / f"{name}.py" for name in ("plugin", "gsm8k_plugin", "frozen_lake_plugin")]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "MS_SWIFT_EXAMPLES" not in os.environ, reason="MS_SWIFT_EXAMPLES: folder of ms-swift's examples"
    ),
]
REWARDS = [
    *("external_countdown", "external_r1v_acc", "external_code_format", "external_tooluse_format_reward"),
    *("external_tooluse_length_reward", "external_tooluse_correct_reward", "thinking_tips"),
    *("gsm8k_accuracy", "gsm8k_format"),
]
ROWS = [
    {
        "messages": [{"role": "user", "content": f"{number} + 2?"}],
        "target": number + 2,
        "nums": [number, 2],
        "solution": f"#### {number + 2}",
        "verification_info": {"language": "python"},
    }
    for number in range(6)
]
# The first answer of an episode is a tool call, since an untrained model makes none.
CALLS_TOOLS = """
import sys
from dataclasses import replace
from megaswift.cli.main import main
from megaswift.tasks.rl.sampler import Sampler

sample = Sampler.__call__
TEXT = "Action: calculator\\nAction Input: 3*4\\n"


def called(self, prompts):
    completions = sample(self, prompts)
    from transformers import AutoTokenizer
    ids = AutoTokenizer.from_pretrained("qwen3").encode(TEXT, add_special_tokens=False)
    return [replace(each, tokens=ids, log_probs=[-1.0] * len(ids), finish="stop") for each in completions]


Sampler.__call__ = called
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def plugins(own_registry):  # noqa: F811
    before = [(registry, dict(registry)) for registry in (multi_turns, envs)]
    load_plugins([str(file) for file in PLUGINS])
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def test_rewards(place: Place) -> None:
    """The logged rewards are what the classes return for the logged completions."""
    write(place.folder / "examples.jsonl", ROWS)
    files = " ".join(map(str, PLUGINS))
    found = place.run(
        f"--dataset examples.jsonl --external_plugins {files} --reward_funcs {' '.join(REWARDS)} "
        "--steps_per_generation 1 --beta 0"
    )
    assert len(found.steps) == 3
    assert len(found.completions) == 24
    with ms_swift_imports():
        functions = {name: orms[name](args=None) for name in REWARDS}
    columns = {row["messages"][0]["content"]: row for row in ROWS}
    for position, row in enumerate(found.completions):
        data, text = columns[row["messages"][0]["content"]], row["completion"]
        state = TrainerState(position // 8, 3)
        trajectory = {"r": [{"messages": [{"role": "assistant", "content": text}], "solution": data["solution"]}]}
        arguments = {name: [data[name]] for name in ("target", "nums", "solution", "verification_info")}
        arguments |= {"trainer_state": state, "request_id": ["r"], "trajectory_inputs": trajectory}
        with ms_swift_imports():
            wanted = {name: function([text], **arguments)[0] for name, function in functions.items()}
        assert row["rewards"] == wanted


def test_rewards_of_written_answers() -> None:
    arguments = {"target": [7], "nums": [[3, 4]], "solution": ["#### 7"], "trainer_state": TrainerState(0, 1)}
    with ms_swift_imports():
        assert orms["external_countdown"]()(["<answer>3 + 4</answer>"], **arguments) == [1]
        assert orms["gsm8k_accuracy"]()(["so \\boxed{7}"], **arguments) == [1]
        answers = ["<think>a b</think>", "no"]
        assert orms["external_tooluse_format_reward"]()(
            answers, solution=["x", "x"], trainer_state=TrainerState(0, 1)
        ) == [1, 0]


def test_frozen_lake(place: Place) -> None:
    rows = [{"messages": [{"role": "user", "content": "-"}], "env_config": {"size": 4, "seed": n}} for n in range(6)]
    write(place.folder / "lake.jsonl", rows)
    found = place.run(
        f"--dataset lake.jsonl --external_plugins {PLUGINS[2]} --multi_turn_scheduler gym_scheduler "
        "--gym_env frozen_lake --max_turns 3 --max_completion_length 400 --steps_per_generation 1 --beta 0 "
        "--reward_funcs format"
    )
    assert len(found.steps) == 3
    for row in found.completions:
        assert row["messages"][0]["role"] == "system"
        assert "FrozenLake 4x4" in row["messages"][1]["content"]
        assert row["rewards"] == {"format": 0, "gym_reward": row["info"]["total_reward"]}
        assert row["info"]["num_turns"] == len(row["info"]["step_rewards"])
    assert any(row["info"]["num_turns"] == 3 for row in found.completions)
    assert any("could not find a move" in json.dumps(row["turns"]) for row in found.completions)


def test_tool_calls(tokenizer, one_process, tmp_path, monkeypatch) -> None:  # noqa: F811
    texts = ["Thought\nAction: calculator\nAction Input: 3*4\n", "It is 12." + END]
    (episode,), engine = play(
        tokenizer,
        tmp_path,
        texts,
        [{"query": "?"}],
        multi_turn_scheduler="tool_call_scheduler",
        reward_funcs=["format"],
    )
    assert engine.prompts[1] == f"{engine.prompts[0]}{texts[0]}Result: 12"
    assert tokenizer.decode(episode.tokens[episode.loss_mask > 0]) == "".join(texts)
    assert episode.info == {"tool_results": "Result: 12", "num_turns": 2}


def test_tool_calls_are_trained_on(place: Place) -> None:
    write(place.folder / "examples.jsonl", ROWS)
    found = place.run(
        f"--dataset examples.jsonl --external_plugins {PLUGINS[0]} rewards.py "
        "--multi_turn_scheduler tool_call_scheduler --max_turns 3 --max_completion_length 80 --steps_per_generation 1 "
        "--beta 0 --reward_funcs external_countdown",
        script=CALLS_TOOLS,
    )
    assert len(found.steps) == 3
    for row in found.completions:
        assert row["info"]["tool_results"] == "Result: 12"
        assert "Action Input: 3*4\nResult: 12" in row["completion"]
