"""GRPO over episodes of several turns: what is trained on, in every layout; what is logged; what goes wrong."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tasks.preference.runs import assert_close, assert_same_weights
from tests.tasks.rl.runs import LENGTH, MOE, Place, Trained, assert_same_steps, of_training
from tests.tasks.rl.test_grpo_layouts import CP, DP, EP, OVERLAPPED, PP, TP, VPP
from tests.templates.conftest import QWEN3

pytestmark = pytest.mark.slow
later = pytest.mark.long
ROOT = Path(__file__).parents[3]
ROOM = 30  # tokens of an episode behind its prompt
PLUGIN = """
import asyncio
import json
from pathlib import Path

from megaswift.tasks.rewards import reward
from megaswift.tasks.multi_turn import scheduler, tool


@scheduler("asks")
async def asks(turn):  # again and again, of some rows a tool and the user at a time
    await asyncio.sleep(0.001 * (5 - turn.columns["goal"]))
    turn.state["seen"] = [*turn.state.get("seen", []), turn.completion]
    turn.info["answers"] = len(turn.state["seen"])
    assert turn.number == len(turn.state["seen"])
    turn.info["wanted"] = 2 + turn.columns["goal"] % 3
    if turn.number == turn.info["wanted"]:
        return None
    asked = {"role": "user", "content": f"more {turn.number}"}
    return [{"role": "tool", "content": "7"}, asked] if turn.columns["goal"] % 2 else asked["content"]


@scheduler("raises")
def raises(turn):
    if turn.columns["goal"] == 1:
        raise KeyError("x")


@reward("depth")
def depth(completions, completion_ids, messages, rollout_infos, **columns):
    for text, said, info in zip(completions, messages, rollout_infos):
        answers = [each for each in said if each["role"] == "assistant"]
        assert said[-1] == {"role": "assistant", "content": text}
        assert info["num_turns"] == info["answers"] <= len(answers)
    return [len(ids) / 10 + info["num_turns"] for ids, info in zip(completion_ids, rollout_infos)]
"""
FLAGS = (
    "--external_plugins turns.py rewards.py --multi_turn_scheduler asks --reward_funcs depth waves "
    f"--max_completion_length {ROOM} --beta 0"
)
# Writes down the episodes as they are trained on.
DUMPED = """
import json
import sys
from pathlib import Path
from megaswift.cli.main import main
from megaswift.tasks.rl.grpo import Grpo

log_episodes = Grpo.log_episodes


def logged(self, episodes):
    log_episodes(self, episodes)
    if self.run.writes:
        rows = [
            {"prompt": e.columns["messages"], "tokens": e.tokens.tolist(), "trained": e.loss_mask.tolist(),
             "sampled": e.rollout_log_probs.tolist(), "advantage": e.advantage} for e in episodes
        ]
        (self.run.folder / "episodes.jsonl").open("a").write("".join(json.dumps(row) + "\\n" for row in rows))


Grpo.log_episodes = logged
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""


@pytest.fixture
def turns(place: Place) -> Place:
    (place.folder / "turns.py").write_text(PLUGIN)
    return place


def run(place: Place, more: str = "", processes: int | None = None, *, script: str = "") -> Trained:
    return place.run(f"{FLAGS} {more} --reward_weights 1 0.5".strip(), processes, script=script)


def test_what_is_trained_on(turns: Place) -> None:
    """The model's own tokens, as they were drawn, behind prompts and messages as the template has them."""
    found = run(turns, script=DUMPED)
    tokenizer = AutoTokenizer.from_pretrained(turns.folder / "qwen3")
    episodes = [json.loads(line) for line in (found.folder / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == len(found.completions) == 24
    several = 0
    for row, of in zip(found.completions, episodes, strict=True):
        tokens, trained, sampled = (np.array(of[name]) for name in ("tokens", "trained", "sampled"))
        prompt = tokenizer.apply_chat_template(of["prompt"], add_generation_prompt=True, return_dict=False)
        assert tokens[: len(prompt)].tolist() == prompt
        assert not trained[: len(prompt)].any()
        assert len(tokens) - len(prompt) <= ROOM
        assert ((sampled < 0) == (trained == 1)).all()
        assert tokens[trained == 1].tolist() == row["completion_ids"]
        # Stretches of its own tokens and of others, in turn; each of the first, but the last, ends a turn.
        edges = np.flatnonzero(np.diff(trained[len(prompt) :])) + len(prompt) + 1
        parts = np.split(tokens, [len(prompt), *edges])[1:]
        own, others = parts[::2], parts[1::2]
        said = row["turns"] or [{"role": "assistant", "content": row["completion"]}]
        assert [m["content"] for m in said if m["role"] == "assistant"] == [
            tokenizer.decode(part, skip_special_tokens=True) for part in own
        ]
        assert all(part[-1] == tokenizer.eos_token_id for part in own[:-1])
        texts = []
        for message in said:
            if message["role"] == "assistant":
                texts.append("")
            else:
                texts[-1] += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>"
        assert [tokenizer.decode(part) for part in others] == [f"{t}<|im_start|>assistant\n" for t in texts[:-1]]
        assert row["info"]["num_turns"] == len(own)
        several += len(own) > 1
        if row["finish_reason"] == "stop":  # it ended by the scheduler's will
            assert row["info"]["num_turns"] == row["info"]["wanted"]
    assert several > 5
    turns_of = [row["info"]["num_turns"] for row in found.completions]
    assert found.steps[0]["num_turns"] == pytest.approx(np.mean(turns_of))
    assert found.steps[0]["completions/mean_length"] == pytest.approx(
        np.mean([len(row["completion_ids"]) for row in found.completions])
    )
    assert found.steps[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert found.steps[0]["grad_norm"] == pytest.approx(gradient(turns.folder / "qwen3", episodes[:8]), rel=1e-3)
    assert all(math.isfinite(row["loss"]) for row in found.steps)


def gradient(model: Path, episodes: list[dict]) -> float:
    """The norm of the gradient of GRPO's loss where the policy is the one that has drawn them, by transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for of in episodes:
        tokens, trained = torch.tensor([of["tokens"]]), torch.tensor(of["trained"])[1:]
        logits = policy(tokens).logits[0, :-1] / 0.9
        log_probs = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            log_probs.detach() * trained, torch.tensor(of["sampled"])[1:], atol=1e-4, rtol=0, check_dtype=False
        )
        (-of["advantage"] * (log_probs * trained).sum() / trained.sum() / len(episodes)).backward()
    return float(sum(p.grad.square().sum() for p in policy.parameters() if p.grad is not None).sqrt())


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP, id="TP2 SP", marks=later),
        pytest.param(f"{PP} --packing true --packing_length 192 --micro_batch_size 1", id="PP2 packed", marks=later),
        pytest.param(VPP, id="PP2 VPP2", marks=later),
        pytest.param(CP, id="CP2", marks=later),
        pytest.param(f"{DP} {OVERLAPPED}", id="DP2", marks=later),
        pytest.param(f"{CP} --packing true --packing_length 192 --micro_batch_size 1", id="CP2 packed", marks=later),
    ],
)
def test_two_processes(layout: str, turns: Place) -> None:
    found, wanted = run(turns, layout, 2), run(turns, script=DUMPED)
    assert_same_steps(found, wanted)
    assert [row["turns"] for row in found.completions] == [row["turns"] for row in wanted.completions]
    assert_same_weights(found.weights, wanted.weights, turns.start("qwen3"))


@later
def test_experts(turns: Place) -> None:
    found, wanted = run(turns, f"{MOE} {EP}", 2), run(turns, MOE)
    assert_same_steps(found, wanted)


@later
def test_the_engine_s_experts_are_those_of_all_turns(turns: Place) -> None:
    """R3: its choices for each token, and so the numbers where nothing is replayed, before weights are others."""
    found, wanted = run(turns, f"{MOE} --router_replay_mode R3"), run(turns, MOE)
    assert [row["completion_ids"] for row in found.completions] == [row["completion_ids"] for row in wanted.completions]
    assert_close(of_training(found.steps[0]), of_training(wanted.steps[0]))


@later
def test_dynamic_sampling_and_evaluation(turns: Place) -> None:
    """Whatever asks for completions has episodes."""
    more = "--steps_per_generation 1 --dynamic_sample true --max_turns 2 --val_dataset val.jsonl --eval_steps 3"
    found = run(turns, f"{more} --kl_in_reward true --beta 0.1 --ref_model other --overlong_filter true")
    assert {row["info"]["num_turns"] for row in found.completions} == {1, 2}
    (evaluation,) = found.evaluations
    assert 1 < evaluation["eval_num_turns"] <= 2
    again = run(turns, f"{more} --kl_in_reward true --beta 0.1 --ref_model other --overlong_filter true {DP}", 2)
    assert_same_steps(again, found)


@later
def test_no_room_is_the_end(turns: Place) -> None:
    """Messages that do not fit are left out, and the episode counts as cut off."""
    found = run(turns, f"--max_completion_length {LENGTH} --steps_per_generation 1 --train_iters 1")
    assert all(row["info"]["num_turns"] == 1 for row in found.completions)
    assert all(row["finish_reason"] == "length" and not row["turns"] for row in found.completions)
    assert found.steps[0]["completions/clipped_ratio"] == 1


def test_one_that_raises_ends_the_run(turns: Place) -> None:
    printed = turns.megatron(turns.line(f"{FLAGS} --multi_turn_scheduler raises", "raised"), 2, code=1)
    said = r"error: --multi_turn_scheduler raises raised KeyError: 'x' \(turns.py, line 26\) for row 2 of train.jsonl"
    assert len(re.findall(said, printed)) == 1


# Every other first answer calls the tool of docs/grpo.md, rightly or wrongly; what follows is the model's own.
CALLING = """
import sys
from pathlib import Path
from megaswift.cli.main import main
from megaswift.tasks.rollout.engine import Completion
from megaswift.tasks.rollout.transformers_engine import TransformersEngine

generate = TransformersEngine.generate


def generated(self, requests, sampling):
    found = generate(self, requests, sampling)
    for place, (request, each) in enumerate(zip(requests, found)):
        said = self.tokenizer.decode(request.tokens)
        Path("asked.txt").open("a").write(said + "\\n\\0")
        if place % 2 and "tool_response" not in said:
            text = "6 * 7" if place % 4 == 1 else "x"
            call = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call><|im_end|>' % text
            ids = self.tokenizer.encode(call)
            found[place] = Completion(ids, [-1.0] * len(ids), "stop")
    return found


TransformersEngine.generate = generated
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""


@later
def test_the_guide_s_calculator(place: Place) -> None:
    """As docs/grpo.md has it, under Qwen3's template."""
    guide = (ROOT / "docs" / "grpo.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "def calculate" in block]
    (place.folder / "calculator.py").write_text(code)
    model = place.model("hermes")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(model)
    rows = [{"query": f"What is {n} * 7?", "solution": str(7 * n)} for n in range(6)]
    (place.folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--model hermes --dataset questions.jsonl --external_plugins calculator.py --multi_turn_scheduler tools"
    more = "--max_turns 4 --reward_funcs right --reward_weights 1 --max_completion_length 300 --train_iters 1 --beta 0"
    found = place.run(f"{flags} {more} --steps_per_generation 1", script=CALLING)
    asked = (place.folder / "asked.txt").read_text().split("\0")
    assert all('"name": "calculate", "description": "Computes an expression' in said for said in asked[:-1])
    calls, results = found.completions[1::2], ["42", "Error: ValueError: x cannot be computed"] * 2
    for row, result in zip(calls, results, strict=True):
        assert row["turns"][1] == {"role": "tool", "content": result, "name": "calculate"}
        assert row["info"] == {"tool_calls": 1, "tool_errors": int(result != "42"), "num_turns": 2}
        assert row["reward"] == pytest.approx(row["rewards"]["right"])
        said = next(text for text in asked if f"<tool_response>\n{result}\n</tool_response><|im_end|>\n" in text)
        assert said.endswith("<|im_start|>assistant\n\n")
        assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>" in said
    assert [row["reward"] for row in calls] == pytest.approx([0, -0.1] * 2)
    assert found.steps[0]["num_turns"] == 1.5
