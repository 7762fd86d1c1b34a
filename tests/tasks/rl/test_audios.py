"""GRPO and PPO on prompts with audios: the numbers of transformers and TRL."""

from typing import Any

import pytest
import torch

from tests import tiny_audio
from tests.tasks.audio_oracle import AudioOracle, write_sounds
from tests.tasks.distillation.test_teacher_server import teaching
from tests.tasks.preference.runs import assert_close, assert_same_weights
from tests.tasks.rl import upstream
from tests.tasks.rl.images import Scored, Seen, SeenPpo, write
from tests.tasks.rl.ppo_reference import Settings
from tests.tasks.rl.runs import DIFFERENCE, Place, Trained, assert_same_steps
from tests.tasks.rl.test_ppo import critic_of
from tests.tasks.vision_oracle import ALL, save_with_head

pytestmark = pytest.mark.slow
FLAGS = f"--model hears --dataset audios.jsonl {ALL}"


def question(number: int) -> dict[str, Any]:
    """A prompt with an audio or none."""
    count = int(number % 3 > 0)
    messages = [{"role": "user", "content": "<audio>" * count + "what colour?"}]
    return {"messages": messages, "audios": [f"{number}.wav"] * count, "goal": number, "solution": 5}


@pytest.fixture(scope="module")
def audios(place: Place) -> Place:
    for name, seed in (("hears", 0), ("hears-other", 1)):
        tiny_audio.qwen3_asr(place.folder / name, seed)
    save_with_head(place.folder / "hears-other", place.folder / "hears-critic", 1)
    write_sounds(place.folder)
    write(place.folder / "audios.jsonl", [question(number) for number in range(6)])
    return place


class Reference(Seen):
    """GRPO of `hears` with the reference `hears-other`."""

    def __init__(self, place: Place, run: Trained):
        self.oracles = [AudioOracle(place.folder / name, place.folder) for name in ("hears", "hears-other")]
        upstream.Reference.__init__(self, place.folder / "hears", run, *(oracle.model for oracle in self.oracles))


class HeardPpo(SeenPpo):
    name, tower, oracle = "hears", "audio_tower", AudioOracle


def test_steps_are_those_of_trl(audios: Place) -> None:
    """With another reference, whose own tower hears the audios. The tower is trained, and sent to the engine."""
    # transformers' forward pass takes no placeholder in a completion, which the seed avoids.
    run = audios.run(f"{FLAGS} --ref_model hears-other --log_entropy true --seed 4")
    assert run.steps[0]["kl"] > 0.1
    log = Reference(audios, run).steps()
    assert len(run.steps) == len(log) == 3
    for found, wanted in zip(run.steps, log, strict=True):
        assert_close(found, wanted)
    assert [row.get("audios", []) for row in run.completions[::4]] == [question(n)["audios"] for n in range(6)]


def test_a_reward_model_hears_the_audios(audios: Place) -> None:
    """By itself each conversation has the logged reward, in transformers."""
    run = audios.run(f"{FLAGS} --beta 0 --reward_funcs waves --reward_model hears-critic")
    scored = Scored(audios.folder / "hears-critic", audios.folder, AudioOracle)
    tokenizer = scored.oracle.processor.tokenizer
    rewards = [row["rewards"]["reward_model"] for row in run.completions]
    for row, reward in zip(run.completions, rewards, strict=True):
        text = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        messages = [*row["messages"], {"role": "assistant", "content": text}]
        with torch.no_grad():
            inputs = scored.oracle.conversation(messages, row.get("audios", []))
            expected = scored.score @ scored.oracle.last_hidden(inputs)
        assert abs(reward - expected.item()) < 1e-4
    assert max(rewards) - min(rewards) > 0.1


@pytest.mark.long
def test_updates_of_ppo(audios: Place) -> None:
    """The critic has another tower than the policy."""
    run = audios.run(
        f"{FLAGS} --rlhf_type ppo --ref_model hears-other --critic_model hears-critic --critic_lr 1e-3 --seed 4"
    )
    reference = HeardPpo(audios, run, Settings(), trains_tower=True)
    start = reference.critic.weights()
    log = reference.steps()
    assert len(run.steps) == len(log) == 3
    for row, expected in zip(run.steps, log, strict=True):
        norms = {name: expected.pop(name) for name in ("grad_norm", "critic/grad_norm")}
        assert_close(row, expected)
        assert {name: row[name] for name in norms} == pytest.approx(norms, rel=2e-4)
    weights, expected = critic_of(run), reference.critic.weights()
    assert weights.keys() == expected.keys()
    names = {name for name in weights if not name.endswith("k_proj.bias")}  # their exact gradient is 0
    assert_same_weights(*({name: tensors[name] for name in names} for tensors in (weights, expected)), start)


@pytest.mark.long
@pytest.mark.parametrize("trained", ["", ALL])
def test_the_engine_has_the_weights_of_each_step(trained: str, audios: Place) -> None:
    """A trained tower is sent before each generation, a frozen one once."""
    flags = FLAGS.replace(ALL, trained)
    run = audios.run(f"{flags} --steps_per_generation 1 --lr 3e-3 --beta 0")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 2e-5
    sent = [row["weight_sync/gb"] for row in run.steps]
    assert (sent[0] > sent[1]) == (not trained)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor_model_parallel_size 2 --sequence_parallel true",
        "--context_parallel_size 2",
        "--pipeline_model_parallel_size 2",
    ],
)
def test_layouts_agree(layout: str, audios: Place) -> None:
    base = f"{FLAGS} --ref_model hears-other --log_entropy true --seed 4"
    assert_same_steps(audios.run(f"{base} {layout}", processes=2), audios.run(base))


@pytest.mark.long
def test_a_server_generates_as_the_process_does(audios: Place) -> None:
    """Each step uses its own weights, the tower among them."""
    flags = f"{FLAGS} --beta 0 --steps_per_generation 1 --lr 3e-3"
    with teaching(audios.folder / "hears", torch_dtype="float32") as (url, _):
        served = audios.run(f"{flags} --use_vllm true --vllm_mode server --vllm_server_base_url {url}")
    assert_same_steps(served, audios.run(flags))
