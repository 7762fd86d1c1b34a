"""GRPO on prompts with images: the numbers of transformers and TRL, in several layouts."""

import base64

import pytest
import torch

from tests import tiny_vision
from tests.tasks.distillation.test_teacher_server import teaching
from tests.tasks.preference.runs import assert_close
from tests.tasks.rl.images import FLAGS, Reference, Scored, question, question_of_video, write
from tests.tasks.rl.runs import DIFFERENCE, Place, Trained, assert_same_steps, of_training
from tests.tasks.vision_oracle import ALL

pytestmark = pytest.mark.slow


def test_steps_are_those_of_trl(images: Place) -> None:
    """With another reference, whose own tower sees the images. The tower is trained, and sent to the engine."""
    run = images.run(f"{FLAGS} {ALL} --ref_model vision-other --log_entropy true")
    assert run.steps[0]["kl"] > 0.1
    log = Reference(images, run).steps()
    assert len(run.steps) == len(log) == 3
    for found, wanted in zip(run.steps, log, strict=True):
        assert_close(found, wanted)
    assert [row.get("images", []) for row in run.completions[::4]] == [
        question(number)["images"] for number in range(6)
    ]


VIDEOS = FLAGS.replace("images", "videos")


def test_videos(images: Place) -> None:
    # transformers' forward pass takes no placeholder in a completion, which the seed avoids.
    run = images.run(f"{VIDEOS} {ALL} --ref_model vision-other --log_entropy true --seed 3")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 2e-5
    log = Reference(images, run).steps()
    assert len(run.steps) == len(log) == 3
    for found, wanted in zip(run.steps, log, strict=True):
        assert_close(found, wanted)
    expected = [question_of_video(number)["videos"] for number in range(6)]
    assert [row["videos"] for row in run.completions[::4]] == expected


@pytest.mark.long
def test_videos_with_positions_in_seconds(images: Place) -> None:
    tiny_vision.qwen2_5_vl(images.folder / "vision-seconds")
    run = images.run("--model vision-seconds --dataset videos.jsonl --beta 0")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 1e-4


@pytest.mark.parametrize("trained", ["", ALL])
def test_engine_has_the_weights_of_each_step(trained: str, images: Place) -> None:
    """A trained tower is sent before each generation, a frozen one once."""
    run = images.run(f"{FLAGS} {trained} --steps_per_generation 1 --lr 3e-3 --beta 0")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 2e-5
    sent = [row["weight_sync/gb"] for row in run.steps]
    assert (sent[0] > sent[1]) == (not trained)


@pytest.mark.long
@pytest.mark.parametrize("model", ["glm4v", "qwen3_5", "mistral3", "internvl", "internvl_chat", "llama4"])
def test_engine_has_the_weights_of_other_towers(model: str, images: Place) -> None:
    tiny_vision.FAMILIES[model](images.folder / model)
    run = images.run(f"--model {model} --dataset images.jsonl {ALL} --steps_per_generation 1 --lr 3e-3 --beta 0")
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 1e-4


def test_completions_of_a_prompt_share_its_images(images: Place) -> None:
    """A micro batch has all four completions of a prompt: two prompts a step."""
    run = images.run(f"{FLAGS} --beta 0 --micro_batch_size 4")
    counts = [len(question(number)["images"]) for number in range(6)]
    assert [row.get("images", 0) for row in run.steps] == [
        counts[0] + counts[1],
        counts[2] + counts[3],
        sum(counts[4:]),
    ]


LAYOUTS = {
    "data": "",
    "tensor": "--tensor_model_parallel_size 2 --sequence_parallel true",
    "context": "--context_parallel_size 2",
    "pipeline": "--pipeline_model_parallel_size 2",
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "tensor" else pytest.mark.long) for name in LAYOUTS]
)
def test_layouts_agree(layout: str, images: Place) -> None:
    base = f"{FLAGS} {ALL} --ref_model vision-other --log_entropy true"
    assert_same_steps(images.run(f"{base} {LAYOUTS[layout]}", processes=2), images.run(base))


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("vision", VIDEOS),
        pytest.param("vision", FLAGS, marks=pytest.mark.long),
        pytest.param("seconds", VIDEOS.replace("vision", "seconds"), marks=pytest.mark.long),
    ],
    ids=["videos", "images", "videos with positions in seconds"],
)
def test_a_server_generates_as_the_process_does(model: str, data: str, images: Place) -> None:
    """Each step uses its own weights, the tower among them; some prompts have a video and an image."""
    if model == "seconds":
        tiny_vision.qwen2_5_vl(images.folder / model)
    flags = f"{data} {ALL} --beta 0 --steps_per_generation 1 --lr 3e-3"
    with teaching(images.folder / model, torch_dtype="float32") as (url, _):
        served = images.run(f"{flags} --use_vllm true --vllm_mode server --vllm_server_base_url {url}")
    assert_same_steps(served, images.run(flags))


def test_resumed_steps_see_the_images(images: Place) -> None:
    """The checkpoint holds episodes that are still to be trained on; one image is in base64, and one has a video."""
    rows = [question(number) for number in range(6)]
    data = base64.b64encode((images.folder / "3.png").read_bytes()).decode()
    rows[3]["images"] = [data if name == "3.png" else name for name in rows[3]["images"]]
    rows[5]["videos"] = question_of_video(0)["videos"]
    rows[5]["messages"][0]["content"] += "<video>"
    write(images.folder / "data.jsonl", rows)
    flags = f"--model vision --dataset data.jsonl {ALL} --beta 0 --reward_funcs named --external_plugins named.py"
    (images.folder / "named.py").write_text(NAMED)
    whole = images.run(f"{flags} --no_save_optim false --no_save_rng false --save_steps 1")
    line = images.line(f"{flags} --resume_from_checkpoint {whole.folder}/checkpoint-1", "resumed")
    Trained(images.folder / "resumed", images.megatron(line.replace("--no_save_optim true --no_save_rng true", "")))
    resumed = Trained(images.folder / "resumed", "")
    assert_close(of_training(resumed.steps[-1]), of_training(whole.steps[-1]))


NAMED = """
import math
from megaswift.tasks.rewards import reward


@reward("named")
def named(completion_ids, images, goal, messages, **columns):
    counts = [sum(message["content"].count("<image>") for message in row) for row in messages]
    assert counts == [len(names or ()) for names in images] == [(number + 1) % 4 for number in goal]
    assert all(name for names in images for name in names or ())
    return [math.sin(sum(ids) + number) for ids, number in zip(completion_ids, goal)]
"""


def test_a_reward_model_sees_the_images(images: Place) -> None:
    """By itself each conversation has the logged reward, in transformers."""
    run = images.run(f"{FLAGS} --beta 0 --reward_funcs waves --reward_model vision-critic")
    scored = Scored(images.folder / "vision-critic", images.folder)
    tokenizer = scored.oracle.processor.tokenizer
    for row in run.completions:
        text = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        messages = [*row["messages"], {"role": "assistant", "content": text}]
        with torch.no_grad():
            inputs = scored.oracle.conversation(messages, row.get("images", []))
            expected = scored.score @ scored.oracle.last_hidden(inputs)
        assert abs(row["rewards"]["reward_model"] - expected.item()) < 1e-4
    rewards = [row["rewards"]["reward_model"] for row in run.completions]
    assert max(rewards) - min(rewards) > 0.1


def test_a_reward_model_without_a_tower_is_refused(images: Place) -> None:
    line = images.line(f"{FLAGS} --reward_funcs waves --reward_model other", "refused")
    assert "--reward_model other: has no vision tower, and the run has images" in images.megatron(line, code=1)
