"""GRPO on prompts with images, videos and audios together, and with images and videos of further families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_omni, tiny_vision
from tests.tasks.audio_oracle import write_sounds
from tests.tasks.distillation.test_teacher_server import teaching
from tests.tasks.preference.runs import assert_close
from tests.tasks.rl import upstream
from tests.tasks.rl.images import FRAMES, PICTURES, Seen, SeenPpo, question_of_video, write
from tests.tasks.rl.images import question as question_of_images
from tests.tasks.rl.ppo_reference import Ppo, Settings
from tests.tasks.rl.runs import DIFFERENCE, Place, Trained, assert_same_steps
from tests.tasks.vision_oracle import ALL, Oracle, save_with_head
from tests.templates.media.test_omni import HOP, film, reference

pytestmark = pytest.mark.slow
Checkpoint = Callable[[str], Path]
FURTHER = "glm4v", "llava_onevision", "llava", "mistral3", "internvl", "llama4", "kimi_k25", "gemma3", "gemma4", "ovis2"
FURTHER += ("gemma4_elastic",)
FLAGS = f"--dataset omni.jsonl {ALL} --beta 0"
# The seeds give completions without placeholders: transformers' forward pass takes none.
SEEDS = [("qwen3_omni_moe", 4), ("qwen2_5_omni", 2)]
MODELS = [SEEDS[0], pytest.param(*SEEDS[1], marks=pytest.mark.long)]


def question(number: int) -> dict[str, Any]:
    """A prompt with up to one image, video and audio."""
    images, videos, audios = number % 2, number // 2 % 2, int(number % 3 > 0)
    text = "<audio>" * audios + "what <image>" * images + "colour?" + "<video>" * videos
    frames = [f"frame-{(number + i) % FRAMES}.png" for i in range(2 + number % 3)]
    return {
        "messages": [{"role": "user", "content": text}], "images": [f"{number % PICTURES}.png"] * images,
        "videos": [frames] * videos, "audios": [f"{number}.wav"] * audios, "goal": number, "solution": 5,
    }  # fmt: skip


@pytest.fixture(scope="module")
def omni(place: Place) -> Place:
    for number in range(PICTURES):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place.folder / f"{number}.png")
    for number in range(FRAMES):
        tiny_vision.picture(70, 60, 20 + number).save(place.folder / f"frame-{number}.png")
    write_sounds(place.folder)
    write(place.folder / "omni.jsonl", [question(number) for number in range(6)])
    write(place.folder / "images.jsonl", [question_of_images(number) for number in range(6)])
    rows = [question_of_video(number) for number in range(6)]
    write(place.folder / "videos-and-images.jsonl", rows)
    write(place.folder / "videos.jsonl", [row | {"messages": [VIDEO], "images": []} for row in rows])
    return place


@pytest.fixture
def checkpoint(omni: Place) -> Checkpoint:
    """A function that makes a model, `{family}`, or one of its critics, `{family}-critic`, and returns its folder."""

    def make(name: str) -> Path:
        family, _, is_critic = name.partition("-")
        folder = omni.folder / name
        if not folder.exists() and is_critic:
            save_with_head(tiny_omni.FAMILIES[family](omni.folder / f"{family}-other", seed=1), folder, 1)
        elif not folder.exists():
            (tiny_omni.FAMILIES | tiny_vision.FAMILIES)[family](folder)
        return folder

    return make


VIDEO = {"role": "user", "content": "<video>what?"}


class OmniOracle(Oracle):
    auto_class = "AutoModelForMultimodalLM"

    def of_row(self, row: dict[str, Any]) -> dict[str, Tensor]:
        """The inputs of a prompt."""
        files: dict[str, Any] = {name: row.get(name, []) for name in ("images", "videos", "audios")}
        paths: dict[str, Any] = {
            name: [str(self.pictures / file) for file in files[name]] for name in ("images", "audios")
        }
        paths["videos"] = [[str(self.pictures / frame) for frame in frames] for frames in files["videos"]]
        return reference(self.processor, {"messages": row["messages"], **paths}, 2, prompt=True)


class Reference(Seen):
    """GRPO of the thinker of a model, without a reference."""

    def __init__(self, place: Place, run: Trained, name: str):
        self.oracle = OmniOracle(place.folder / name, place.folder)
        self.oracle.model = self.oracle.model.thinker
        upstream.Reference.__init__(self, place.folder / name, run, self.oracle.model, self.oracle.model, beta=0.0)

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        return self._drawn(self.oracle, self.oracle.of_row(row), row)


class ScoredThinker(torch.nn.Module):
    """A thinker of transformers with a head, as `save_with_head` writes it."""

    def __init__(self, folder: Path, pictures: Path):
        super().__init__()
        self.oracle = thinking(OmniOracle(folder, pictures, has_head=True))
        self.model, self.score = self.oracle.model, self.oracle.score
        self.model.lm_head = torch.nn.Identity()  # logits are hidden states

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def values(self, row: dict[str, Any], *, has_last: bool = False) -> Tensor:
        """Before each token of a completion. has_last: behind the last one too"""
        prompt = self.oracle.of_row(row)
        inputs = self.oracle.continued(prompt, torch.tensor(row["completion_ids"]))
        hidden = self.model(**inputs).logits[0, prompt["input_ids"].shape[1] - 1 :]
        return ((hidden if has_last else hidden[:-1]) @ self.score.t())[:, 0]


def thinking(oracle: OmniOracle) -> OmniOracle:
    oracle.model = oracle.model.thinker
    return oracle


class OmniPpo(SeenPpo):
    """PPO of a thinker with itself as the reference, and a critic with another start."""

    def __init__(self, place: Place, run: Trained, name: str):
        folder = place.folder / name
        self.oracles = [thinking(OmniOracle(folder, place.folder)) for _ in range(2)]
        critic = ScoredThinker(place.folder / f"{name}-critic", place.folder)
        Ppo.__init__(self, folder, run, *(oracle.model for oracle in self.oracles), critic, Settings())

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        oracle = next(oracle for oracle in self.oracles if oracle.model is model)
        return self._drawn(oracle, oracle.of_row(row), row)


@pytest.mark.long
@pytest.mark.parametrize("model", tiny_omni.FAMILIES)
def test_updates_of_ppo(model: str, omni: Place, checkpoint: Checkpoint) -> None:
    checkpoint(model)
    checkpoint(f"{model}-critic")
    seed = dict(SEEDS)[model]
    run = omni.run(
        f"--model {model} --dataset omni.jsonl {ALL} --rlhf_type ppo --critic_model {model}-critic --critic_lr 1e-3 "
        f"--seed {seed}"
    )
    log = OmniPpo(omni, run, model).steps()
    assert len(run.steps) == len(log) == 3
    for row, expected in zip(run.steps, log, strict=True):
        norms = {name: expected.pop(name) for name in ("grad_norm", "critic/grad_norm")}
        assert_close(row, expected)
        assert {name: row[name] for name in norms} == pytest.approx(norms, rel=3e-3)


@pytest.mark.long
@pytest.mark.parametrize("model", tiny_omni.FAMILIES)
def test_a_reward_model_sees_and_hears(model: str, omni: Place, checkpoint: Checkpoint) -> None:
    """By itself each conversation has the logged reward, in transformers."""
    checkpoint(model)
    checkpoint(f"{model}-critic")
    run = omni.run(f"--model {model} {FLAGS} --reward_funcs waves --reward_model {model}-critic")
    scored = ScoredThinker(omni.folder / f"{model}-critic", omni.folder)
    tokenizer = scored.oracle.processor.tokenizer
    rewards = [row["rewards"]["reward_model"] for row in run.completions]
    for row, reward in zip(run.completions, rewards, strict=True):
        text = tokenizer.decode(row["completion_ids"], skip_special_tokens=True) + "<|im_end|>\n"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            expected = scored.values(row | {"completion_ids": ids}, has_last=True)[-1]
        assert abs(reward - expected.item()) < 1e-3
    assert max(rewards) - min(rewards) > 0.1


@pytest.mark.parametrize(("model", "seed"), MODELS)
def test_steps_are_those_of_trl(model: str, seed: int, omni: Place, checkpoint: Checkpoint) -> None:
    """Both towers are trained, and sent to the engine, which samples with the trained weights."""
    checkpoint(model)
    run = omni.run(f"--model {model} {FLAGS} --log_entropy true --steps_per_generation 1 --train_iters 2 --seed {seed}")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 1e-4
    log = Reference(omni, run, model).steps()
    assert len(run.steps) == len(log) == 2
    for found, wanted in zip(run.steps, log, strict=True):
        assert_close(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("model", ["qwen3_omni_moe", "qwen2_5_omni"])
def test_completions_on_videos_that_are_heard(model: str, omni: Place, checkpoint: Checkpoint) -> None:
    checkpoint(model)
    for number in range(2):
        film(omni.folder / f"{number}.mov", 9 + 20 * number, HOP * (300 - 110 * number), number)
    rows = [question(number) | {"videos": [f"{number % 2}.mov"] * (number // 2 % 2)} for number in range(6)]
    write(omni.folder / "films.jsonl", rows)
    flags = f"--model {model} {FLAGS.replace('omni', 'films')} --steps_per_generation 1"
    run = omni.run(f"""{flags} --model_kwargs '{{"use_audio_in_video": true}}'""")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("model", ["qwen3_omni_moe", "qwen2_5_omni"])
def test_a_server_generates_as_the_process_does(
    model: str, omni: Place, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With frames of another rate than the server's."""
    checkpoint(model)
    monkeypatch.setenv("FPS", "1")
    flags = f"--model {model} {FLAGS} --steps_per_generation 1 --lr 3e-3"
    alone = omni.run(flags)
    monkeypatch.delenv("FPS")
    with teaching(omni.folder / model, torch_dtype="float32") as (url, _):
        monkeypatch.setenv("FPS", "1")
        served = omni.run(f"{flags} --use_vllm true --vllm_mode server --vllm_server_base_url {url}")
    assert_same_steps(served, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("glm4v", "videos-and-images"),
        ("glm4v", "videos"),
        ("llava_onevision", "videos"),
        *((name, "images") for name in FURTHER),
    ],
)
def test_completions_are_those_of_training(model: str, data: str, omni: Place, checkpoint: Checkpoint) -> None:
    """In transformers' engine and behind a server."""
    checkpoint(model)
    flags = f"--model {model} --dataset {data}.jsonl {ALL} --beta 0 --steps_per_generation 1"
    if model == "gemma4":  # its third step has placeholders within completions, which transformers takes for padding
        flags += " --train_iters 2"
    if model == "gemma4_elastic":  # with this seed its completions have none
        flags += " --train_iters 2 --seed 4"
    run = omni.run(flags)
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 1e-4
    with teaching(omni.folder / model, torch_dtype="float32") as (url, _):
        served = omni.run(f"{flags} --use_vllm true --vllm_mode server --vllm_server_base_url {url}")
    assert_same_steps(served, run)
