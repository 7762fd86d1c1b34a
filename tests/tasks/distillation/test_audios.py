"""Distillation on questions with audios: TRL's divergence of transformers' logits, and the student's answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_audio
from tests.tasks.audio_oracle import SOUNDS, AudioOracle, write_sounds
from tests.tasks.distillation.test_images import LENGTH, greedy
from tests.tasks.distillation.test_teacher_server import teaching
from tests.tasks.vision_oracle import ALL, BATCH, STEPS, Place, log

pytestmark = pytest.mark.slow
BETA, TEMPERATURE = 0.3, 0.7
NAMES = "loss", "grad_norm"
FLAGS = f"--beta {BETA} --temperature {TEMPERATURE} --model asr --teacher_model teacher --micro_batch_size 2 {ALL}"


def question(number: int) -> dict[str, Any]:
    count = int(number % 4 > 0)
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    messages = [{"role": "user", "content": "<audio>" * count + "what colour?"}, answer]
    return {"messages": messages, "audios": [f"{number % SOUNDS}.wav"] * count}


ROWS = [question(number) for number in range(STEPS * BATCH)]


class AudioPlace(Place):
    """A folder with a student and a teacher of audios, sounds, and runs on them."""

    def __init__(self, folder: Path):
        self.folder, self._runs = folder, {}
        for name, seed in (("asr", 0), ("teacher", 1)):
            tiny_audio.qwen3_asr(folder / name, seed)
        write_sounds(folder)
        self.write("rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return AudioPlace(tmp_path_factory.mktemp("audios"))


def distil(place: Place, flags: str, processes: int = 1, **more: Any) -> Any:
    return place.run(f"rlhf --rlhf_type gkd {FLAGS} --dataset rows.jsonl {flags}", processes, **more)


def by_hand(place: Place, *, by_student: bool = False) -> list[list[float]]:
    """Loss and gradient norm of each step, on the data's answers or the student's likeliest ones."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher = (AudioOracle(place.folder / name, place.folder) for name in ("asr", "teacher"))

    def logits_of(row: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the student's and the teacher's logits at the tokens of an answer."""
        if not by_student:
            student_logits, teacher_logits = (
                oracle.answer(row["messages"], row["audios"])[0] for oracle in (student, teacher)
            )
            return student_logits, teacher_logits.detach()
        prompt = student.conversation(row["messages"][:1], row["audios"], prompt=True)
        ids = greedy(student.model, prompt)
        return student.completion(prompt, ids), teacher.completion(prompt, ids).detach()

    def loss(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        total, tokens = torch.zeros(()), 0
        for row in rows:
            logits, taught = logits_of(row)
            settings = {"beta": BETA, "temperature": TEMPERATURE, "reduction": "sum"}
            total = total + GKDTrainer.generalized_jsd_loss(logits, taught, **settings)
            tokens += len(logits)
        return total / tokens, []

    return student.steps(ROWS, loss)


@pytest.mark.long
def test_steps_are_those_of_trl(place: Place) -> None:
    run = distil(place, "--lmbda 0")
    torch.testing.assert_close(log(run, *NAMES), by_hand(place), rtol=2e-4, atol=1e-6)


def test_answers_of_the_student(place: Place) -> None:
    """By transformers in the process, with the weights of each step, those of its tower among them."""
    run = distil(place, f"--lmbda 1 --use_vllm false --top_k 1 --max_completion_length {LENGTH}")
    torch.testing.assert_close(log(run, *NAMES), by_hand(place, by_student=True), rtol=2e-4, atol=1e-6)


@pytest.mark.long
def test_a_layout_gives_the_numbers_of_one_process(place: Place) -> None:
    layout = distil(place, "--lmbda 0 --tensor_model_parallel_size 2 --sequence_parallel true", 2)
    torch.testing.assert_close(log(layout, *NAMES), log(distil(place, "--lmbda 0"), *NAMES), rtol=1e-4, atol=0)


@pytest.mark.long
def test_a_teacher_behind_a_server_is_that_in_the_process(place: Place) -> None:
    with teaching(place.folder / "teacher", torch_dtype="float32") as (url, _):
        flags = FLAGS.replace("--teacher_model teacher", f"--teacher_model_server {url}")
        words = "--dataset rows.jsonl --lmbda 0 --gkd_logits_topk 9"
        served = place.run(f"rlhf --rlhf_type gkd {flags} {words}")
    inside = place.run(f"rlhf --rlhf_type gkd {FLAGS} {words}")
    torch.testing.assert_close(log(served, *NAMES), log(inside, *NAMES), rtol=1e-5, atol=0)
