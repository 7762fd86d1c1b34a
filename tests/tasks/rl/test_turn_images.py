"""Episodes whose tools and schedulers send images: tokens, log-probabilities and what rewards get."""

import json
import re
from collections.abc import Sequence

import pytest
import torch

from tests.tasks.preference.runs import assert_close
from tests.tasks.rl.images import FLAGS, Scored, question, write
from tests.tasks.rl.runs import DIFFERENCE, Place, Trained, assert_same_steps, of_training
from tests.tasks.rl.test_turns import DUMPED
from tests.tasks.vision_oracle import ALL, Oracle

pytestmark = pytest.mark.slow
PLACEHOLDERS = 5, 6  # token ids of images and videos
MESSAGE = "<|im_start|>tool\nseen <|vision_start|><|image_pad|><|vision_end|>.<|im_end|>\n<|im_start|>assistant\n"
GOALS = range(3, 24, 4)  # numbers of prompts without images
ROOM = 90  # tokens of an episode behind its prompt
PLUGIN = """
import math

from PIL import Image
from megaswift.tasks.multi_turn import scheduler, tool
from megaswift.tasks.rewards import reward


@scheduler("shows")
def shows(turn):  # a picture by a block, by a column, as a picture of PIL, and none
    number = turn.columns["goal"]
    assert sum(message["content"].count("<image>") for message in turn.messages) == (number + 1) % 4 + turn.number - 1
    if turn.number == 3:
        return None
    name = f"{(number + turn.number) % 6}.png"
    block = {"type": "image", "image": name if turn.number == 1 else Image.open(name)}
    if number % 2:
        return {"role": "tool", "content": "seen <image>.", "images": [name]}
    return [{"role": "tool", "content": [{"type": "text", "text": "seen "}, block, {"type": "text", "text": "."}]}]


@scheduler("breaks")
def breaks(turn):
    return {"role": "tool", "content": "", "images": ["nowhere.png"]}


@reward("counted")
def counted(completion_ids, messages, images, goal, **columns):
    for row, names, number in zip(messages, images, goal):
        tags = sum(message["content"].count("<image>") for message in row if message["role"] != "assistant")
        assert tags == len(names or ()) >= (number + 1) % 4
        assert all(names or ())
    return [math.sin(sum(ids) + number) for ids, number in zip(completion_ids, goal)]
"""
TURNS = (
    f"{FLAGS} --external_plugins shows.py rewards.py --multi_turn_scheduler shows --reward_funcs counted --beta 0 "
    f"--max_completion_length {ROOM} --stop_words e o --seed 7"
)
ON_TEXTS = TURNS.replace("images.jsonl", "texts.jsonl")


@pytest.fixture
def turns(images: Place) -> Place:
    (images.folder / "shows.py").write_text(PLUGIN)
    rows = [{name: value for name, value in question(goal).items() if name != "images"} for goal in GOALS]
    write(images.folder / "texts.jsonl", rows)
    return images


def episodes(run: Trained) -> list[dict]:
    dumped = [json.loads(line) for line in (run.folder / "episodes.jsonl").read_text().splitlines()]
    return [row | episode for row, episode in zip(run.completions, dumped, strict=True)]


@pytest.mark.parametrize(
    ("flags", "goals"),
    [
        pytest.param(f"{TURNS} {ALL}", range(6), id="with images"),
        pytest.param(
            f"{ON_TEXTS} {ALL} --turn_images 2", GOALS, id="without images in the data", marks=pytest.mark.long
        ),
    ],
)
def test_episodes_are_those_of_transformers(flags: str, goals: Sequence[int], turns: Place) -> None:
    """The first step is by the initial model, whose log-probabilities the engine's are."""
    run = turns.run(flags, script=DUMPED)
    assert max(row[f"{DIFFERENCE}/max"] for row in run.steps) < 2e-5
    oracle = Oracle(turns.folder / "vision", turns.folder)
    decode = oracle.processor.tokenizer.decode
    shown = 0
    for number, row in enumerate(episodes(run)):
        goal, sent = goals[number // 4], sum(turn["role"] == "tool" for turn in row["turns"])
        if any(token in PLACEHOLDERS for token in row["completion_ids"]):
            continue  # the model has drawn one, which transformers' forward pass does not take
        shown += sent
        images = [f"{(goal + i) % 6}.png" for i in range((goal + 1) % 4)]
        images += [f"{(goal + turn) % 6}.png" for turn in range(1, sent + 1)]
        text = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", decode(row["tokens"]))
        assert text.count(MESSAGE) == sent
        inputs = oracle.inputs(text, images)
        assert decode(inputs["input_ids"][0]) == decode(row["tokens"])
        tokens = torch.tensor([row["tokens"]])
        inputs |= {"input_ids": tokens, "mm_token_type_ids": (tokens == 5).int(), "attention_mask": tokens * 0 + 1}
        with torch.no_grad():
            log_probs = (oracle.model(**inputs).logits[0, :-1].float() / 0.9).log_softmax(-1)
        drawn = torch.tensor(row["trained"])[1:] > 0
        chosen = log_probs.gather(1, tokens[0, 1:, None])[:, 0][drawn]
        torch.testing.assert_close(chosen, torch.tensor(row["sampled"])[1:][drawn], atol=2e-5, rtol=0)
    assert shown > 10


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--tensor_model_parallel_size 2 --sequence_parallel true", id="TP2", marks=pytest.mark.long),
        pytest.param("", id="DP2", marks=pytest.mark.long),
        pytest.param("--context_parallel_size 2", id="CP2", marks=pytest.mark.long),
    ],
)
def test_layouts_agree(layout: str, turns: Place) -> None:
    assert_same_steps(turns.run(f"{TURNS} {ALL} {layout}", 2), turns.run(f"{TURNS} {ALL}", script=DUMPED))


@pytest.mark.long
def test_a_reward_model_sees_what_tools_send(turns: Place) -> None:
    run = turns.run(f"{TURNS} --reward_model vision-critic --train_iters 1", script=DUMPED)
    scored = Scored(turns.folder / "vision-critic", turns.folder)
    for number, row in enumerate(episodes(run)):
        goal, turn_count = number // 4, sum(turn["role"] == "tool" for turn in row["turns"])
        images = [f"{(goal + i) % 6}.png" for i in range((goal + 1) % 4)]
        images += [f"{(goal + turn) % 6}.png" for turn in range(1, turn_count + 1)]
        with torch.no_grad():
            inputs = scored.oracle.conversation([*row["messages"], *row["turns"]], images)
            expected = scored.score @ scored.oracle.last_hidden(inputs)
        assert abs(row["rewards"]["reward_model"] - expected.item()) < 1e-4


@pytest.mark.long
def test_resumed_steps_see_the_images(turns: Place) -> None:
    whole = turns.run(f"{TURNS} --no_save_optim false --no_save_rng false --save_steps 1")
    line = turns.line(f"{TURNS} --resume_from_checkpoint {whole.folder}/checkpoint-1", "resumed-turns")
    printed = turns.megatron(line.replace("--no_save_optim true --no_save_rng true", ""))
    resumed = Trained(turns.folder / "resumed-turns", printed)
    assert_close(of_training(resumed.steps[-1]), of_training(whole.steps[-1]))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        pytest.param("", "an image, and no vision tower is built, since the data has none", marks=pytest.mark.long),
        ("--turn_images 1", "it has image 2, and --turn_images is 1 (what it says to row "),
        ("--turn_images 1 --language_model_only true", "--turn_images 1 cannot be used with --language_model_only"),
        ("--turn_images 1 --model qwen3", "--turn_images 1: the model has no vision tower that is supported"),
    ],
)
def test_more_images_than_the_run_expects(flags: str, problem: str, turns: Place) -> None:
    base = ON_TEXTS.replace("counted", "waves")
    base = base.replace("--model vision", "") if "--model" in flags else base
    line = turns.line(f"{base} {flags}", "unexpected")
    assert problem in turns.megatron(line, code=2 if problem.startswith("--") else 1)


def test_an_image_that_cannot_be_read_ends_the_run(turns: Place) -> None:
    line = turns.line(TURNS.replace("scheduler shows", "scheduler breaks"), "broken")
    printed = turns.megatron(line, code=1)
    assert "--multi_turn_scheduler breaks: " in printed
    assert "(no such file or directory) (what it says to row 1 of images.jsonl, turn 1" in printed
