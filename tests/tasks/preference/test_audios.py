"""Preferences between answers to questions with audios: the numbers of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests import tiny_audio
from tests.tasks.audio_oracle import SOUNDS, AudioOracle, write_sounds
from tests.tasks.vision_oracle import ALL, BATCH, STEPS, Oracle, Place, log, save_with_head

pytestmark = pytest.mark.slow
BETA = 0.1
NAMES = "loss", "grad_norm", "audios", "audio_tokens"
PAIRED = "logps/chosen", "logps/rejected", "rewards/margins"


class AudioPlace(Place):
    """A folder with a tiny Qwen3-ASR, sounds, and runs on them."""

    def __init__(self, folder: Path):
        self.folder, self._runs = folder, {}
        tiny_audio.qwen3_asr(folder / "asr")
        write_sounds(folder)


def pair(number: int) -> dict[str, Any]:
    """A question with an audio or none. Every fourth row differs in its rejected audio alone."""
    count = int(number % 4 > 0)
    question = {"role": "user", "content": "<audio>" * count + "what colour?"}
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    row = {"messages": [question, answer], "audios": [f"{number % SOUNDS}.wav"] * count}
    if number % 4 == 2:
        return row | {"rejected_audios": [f"{(number + 3) % SOUNDS}.wav"]}
    return row | {"rejected_response": "a blue square" + " of the sky" * (number % 2)}


def sides(row: dict[str, Any]) -> list[tuple[list[dict], list[str]]]:
    """Conversation and audios of the chosen and of the rejected answer."""
    rejected = row["messages"]
    if "rejected_response" in row:
        rejected = [*rejected[:-1], {"role": "assistant", "content": row["rejected_response"]}]
    return [(row["messages"], row["audios"]), (rejected, row.get("rejected_audios", row["audios"]))]


ROWS = [pair(number) for number in range(STEPS * BATCH)]
JUDGED = [
    {"messages": row["messages"], "audios": row["audios"], "label": number % 3 != 1} for number, row in enumerate(ROWS)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> AudioPlace:
    place = AudioPlace(tmp_path_factory.mktemp("audios"))
    save_with_head(place.folder / "asr", place.folder / "reward", 1)
    place.write("pairs.jsonl", ROWS)
    place.write("kto.jsonl", JUDGED)
    return place


def rlhf(place: Place, kind: str, flags: str = "", processes: int = 1) -> Path:
    model, data = "reward" if kind == "rm" else "asr", "kto" if kind == "kto" else "pairs"
    words = f"rlhf --rlhf_type {kind} --model {model} --dataset {data}.jsonl {ALL} --micro_batch_size 2 {flags}"
    return place.run(words, processes)


def pairs_by_hand(place: Place, kind: str) -> list[list[float]]:
    policy = AudioOracle(place.folder / ("reward" if kind == "rm" else "asr"), place.folder, has_head=kind == "rm")
    frozen = AudioOracle(place.folder / "asr", place.folder)

    def log_probs(model: Oracle, rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
        values = torch.stack([model.log_prob(*side) for row in rows for side in sides(row)])
        return values[::2], values[1::2]

    def dpo(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        chosen, rejected = log_probs(policy, rows)
        with torch.no_grad():
            ref_chosen, ref_rejected = log_probs(frozen, rows)
        margins = BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))
        return -logsigmoid(margins).mean(), [value.mean().item() for value in (chosen, rejected, margins)]

    def rm(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        rewards = [policy.scores(policy.conversation(*side))[0] for row in rows for side in sides(row)]
        margins = torch.stack(rewards)[::2] - torch.stack(rewards)[1::2]
        return -logsigmoid(margins).mean(), [margins.mean().item()]

    return policy.steps(ROWS, {"dpo": dpo, "rm": rm}[kind])


def kto_by_hand(place: Place) -> list[list[float]]:
    policy, frozen = (AudioOracle(place.folder / "asr", place.folder) for _ in range(2))

    def loss(numbers: Sequence[int]) -> tuple[Tensor, list[float]]:
        ratios, other_ratios = [], []
        for number in numbers:
            messages, names = JUDGED[number]["messages"], JUDGED[number]["audios"]
            other = [*messages[:-1], JUDGED[number - 1]["messages"][-1]]
            with torch.no_grad():
                before = frozen.log_prob(messages, names)
                other_ratios.append(policy.log_prob(other, names) - frozen.log_prob(other, names))
            ratios.append(policy.log_prob(messages, names) - before)
        kl = torch.stack(other_ratios).mean().clamp(min=0)
        signs = torch.tensor([1.0 if JUDGED[number]["label"] else -1.0 for number in numbers])
        return (1 - torch.sigmoid(signs * BETA * (torch.stack(ratios) - kl))).mean(), [kl.item()]

    return policy.steps(range(STEPS * BATCH), loss)


@pytest.mark.parametrize(("kind", "names"), [("dpo", PAIRED), ("rm", ("rewards/margins",))])
def test_pairs_are_those_of_transformers(kind, names, place):
    run = rlhf(place, kind)
    expected = pairs_by_hand(place, kind)
    torch.testing.assert_close(log(run, "loss", "grad_norm", *names), expected, rtol=2e-4, atol=1e-6)
    counts = [len({*row["audios"], *row.get("rejected_audios", [])}) for row in ROWS]  # one in both is encoded once
    assert log(run, "audios") == [[sum(counts[step * BATCH : (step + 1) * BATCH])] for step in range(STEPS)]


@pytest.mark.long
def test_kto_is_that_of_transformers(place):
    run = rlhf(place, "kto")
    torch.testing.assert_close(log(run, "loss", "grad_norm", "kl"), kto_by_hand(place), rtol=2e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("dpo", "--tensor_model_parallel_size 2 --sequence_parallel true", id="dpo TP2 SP"),
        pytest.param("dpo", "--pipeline_model_parallel_size 2", id="dpo PP2"),
        pytest.param("kto", "--context_parallel_size 2", id="kto CP2"),
        pytest.param("rm", "--pipeline_model_parallel_size 2", id="rm PP2"),
    ],
)
def test_a_layout_gives_the_numbers_of_one_process(kind, flags, place):
    layout, alone = rlhf(place, kind, flags, 2), rlhf(place, kind)
    torch.testing.assert_close(log(layout, *NAMES), log(alone, *NAMES), rtol=1e-4, atol=0)
