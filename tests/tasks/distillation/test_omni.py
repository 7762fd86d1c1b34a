"""Distillation of Omni models: a student's answers to images, videos and audios, and a teacher behind a server."""

from pathlib import Path

import pytest
import torch

from tests import tiny_omni, tiny_vision
from tests.tasks.audio_oracle import write_sounds
from tests.tasks.distillation.test_teacher_server import teaching
from tests.tasks.rl.images import FRAMES, PICTURES
from tests.tasks.rl.test_omni import question
from tests.tasks.vision_oracle import ALL, BATCH, STEPS, Place, log

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = "loss", "grad_norm"


class OmniPlace(Place):
    def __init__(self, folder: Path):
        self.folder, self._runs = folder, {}
        for name, make in tiny_omni.FAMILIES.items():
            make(folder / name)
            make(folder / f"{name}-teacher", seed=1)
        for number in range(PICTURES):
            tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(folder / f"{number}.png")
        for number in range(FRAMES):
            tiny_vision.picture(70, 60, 20 + number).save(folder / f"frame-{number}.png")
        write_sounds(folder)
        rows = [question(number % 6) for number in range(STEPS * BATCH)]
        answer = {"role": "assistant", "content": "a red circle"}
        self.write("rows.jsonl", [row | {"messages": [*row["messages"], answer]} for row in rows])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return OmniPlace(tmp_path_factory.mktemp("omni"))


@pytest.mark.parametrize("model", tiny_omni.FAMILIES)
def test_a_teacher_behind_a_server_is_that_in_the_process(model: str, place: Place) -> None:
    """On the student's likeliest answers, which may have tokens of media."""
    words = f"rlhf --rlhf_type gkd --model {model} --dataset rows.jsonl {ALL} --gkd_logits_topk 9"
    words += " --lmbda 1 --use_vllm false --top_k 1 --max_completion_length 8"
    with teaching(place.folder / f"{model}-teacher", torch_dtype="float32") as (url, _):
        served = place.run(f"{words} --teacher_model_server {url}")
    inside = place.run(f"{words} --teacher_model {model}-teacher")
    torch.testing.assert_close(log(served, *NAMES), log(inside, *NAMES), rtol=1e-4, atol=0)
