"""GRPO on prompts with audios: the numbers of transformers and TRL."""

from typing import Any

import pytest
from torch import Tensor

from tests import tiny_audio
from tests.tasks.audio_oracle import AudioOracle, write_sounds
from tests.tasks.preference.runs import assert_close
from tests.tasks.rl import upstream
from tests.tasks.rl.images import Seen, write
from tests.tasks.rl.runs import DIFFERENCE, Place, Trained, assert_same_steps
from tests.tasks.vision_oracle import ALL

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
    write_sounds(place.folder)
    write(place.folder / "audios.jsonl", [question(number) for number in range(6)])
    return place


class Reference(Seen):
    """GRPO of `hears` with the reference `hears-other`."""

    def __init__(self, place: Place, run: Trained):
        self.oracles = [AudioOracle(place.folder / name, place.folder) for name in ("hears", "hears-other")]
        upstream.Reference.__init__(self, place.folder / "hears", run, *(oracle.model for oracle in self.oracles))

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        return super()._completion(model, row | {"images": row.get("audios", [])})


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


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--use_vllm true --vllm_mode server --vllm_server_base_url http://127.0.0.1:9",
            "error: --vllm_mode server: the data has audios, which this version sends to no such engine.",
        ),
        ("--rlhf_type ppo", "transformers has no sequence classification for qwen3_asr models"),
    ],
)
def test_what_does_not_hear_is_refused(flags: str, error: str, audios: Place) -> None:
    assert error in audios.megatron(audios.line(f"{FLAGS} {flags}", "deaf"), code=1)
