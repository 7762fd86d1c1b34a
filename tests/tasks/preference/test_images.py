"""Preferences between answers to questions with images: the numbers of transformers, in several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests import tiny_vision
from tests.tasks.vision_oracle import (
    ALL,
    BATCH,
    COUNTED,
    PICTURES,
    STEPS,
    Oracle,
    Place,
    encoded_patches,
    log,
    save_with_head,
)

pytestmark = pytest.mark.slow
BETA = 0.1
NAMES = "loss", "grad_norm", "images"
PAIRED = "logps/chosen", "logps/rejected", "rewards/margins"


def pair(number: int) -> dict[str, Any]:
    """A question with no to three images. Every third row with some differs in its rejected images alone."""
    count = number * 7 % 4
    question = {"role": "user", "content": "what <image>" * count + "colour?"}
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    row = {"messages": [question, answer], "images": [f"{(number + i) % PICTURES}.png" for i in range(count)]}
    if count and number % 3 == 2:  # the last is another picture
        last = f"{(number + count) % PICTURES}.png"
        return row | {"rejected_images": [*row["images"][:-1], last]}
    return row | {"rejected_response": "a blue square" + " of the sky" * (number % 2)}


def sides(row: dict[str, Any]) -> list[tuple[list[dict], list[str]]]:
    """Conversation and images of the chosen and of the rejected answer."""
    rejected = row["messages"]
    if "rejected_response" in row:
        rejected = [*rejected[:-1], {"role": "assistant", "content": row["rejected_response"]}]
    return [(row["messages"], row["images"]), (rejected, row.get("rejected_images", row["images"]))]


ROWS = [pair(number) for number in range(STEPS * BATCH)]
JUDGED = [
    {"messages": row["messages"], "images": row["images"], "label": number % 3 != 1} for number, row in enumerate(ROWS)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("images"))
    tiny_vision.qwen3_vl(place.folder / "other", seed=1)
    save_with_head(place.folder / "qwen3", place.folder / "reward", 1)
    place.write("pairs.jsonl", ROWS)
    place.write("kto.jsonl", JUDGED)
    return place


def rlhf(place: Place, kind: str, flags: str = "", processes: int = 1, **more: Any) -> Path:
    model, data = "reward" if kind == "rm" else "qwen3", "kto" if kind == "kto" else "pairs"
    tower = "" if "freeze" in flags else ALL
    micro = "" if "micro_batch_size" in flags else "--micro_batch_size 2"
    return place.run(
        f"rlhf --rlhf_type {kind} --model {model} --dataset {data}.jsonl {tower} {micro} {flags}", processes, **more
    )


def images(rows: list[dict[str, Any]], *, is_paired: bool = True) -> list[float]:
    """Distinct images of each step's rows."""
    return [
        float(
            sum(
                len({*row["images"], *(row.get("rejected_images", []) if is_paired else [])})
                for row in rows[step * BATCH : (step + 1) * BATCH]
            )
        )
        for step in range(STEPS)
    ]


def by_hand(place: Place, kind: str, reference: str = "qwen3", *, trains_tower: bool = True) -> list[list[float]]:
    policy = Oracle(place.folder / ("reward" if kind == "rm" else "qwen3"), place.folder, has_head=kind == "rm")
    policy.model.model.visual.requires_grad_(trains_tower)
    frozen = Oracle(place.folder / reference, place.folder)

    def log_probs(model: Oracle, rows: list[dict]) -> tuple[Tensor, Tensor]:
        values = torch.stack([model.log_prob(*side) for row in rows for side in sides(row)])
        return values[::2], values[1::2]

    def dpo(rows: list[dict]) -> tuple[Tensor, list[float]]:
        chosen, rejected = log_probs(policy, rows)
        with torch.no_grad():
            ref_chosen, ref_rejected = log_probs(frozen, rows)
        margins = BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))
        values = chosen.mean(), rejected.mean(), margins.mean()
        return -logsigmoid(margins).mean(), [value.item() for value in values]

    def simpo(rows: list[dict]) -> tuple[Tensor, list[float]]:
        values = []
        for row in rows:
            for messages, names in sides(row):
                answer = policy.processor.tokenizer(messages[-1]["content"])["input_ids"]
                values.append(policy.log_prob(messages, names) / (len(answer) + 1))
        chosen, rejected = torch.stack(values)[::2], torch.stack(values)[1::2]
        losses = -logsigmoid(2.0 * (chosen - rejected) - 1.0)
        metrics = chosen.mean(), rejected.mean(), 2.0 * (chosen - rejected).mean()
        return losses.mean(), [value.item() for value in metrics]

    def rm(rows: list[dict]) -> tuple[Tensor, list[float]]:
        rewards = [policy.scores(policy.conversation(*side))[0] for row in rows for side in sides(row)]
        chosen, rejected = torch.stack(rewards)[::2], torch.stack(rewards)[1::2]
        return -logsigmoid(chosen - rejected).mean(), [(chosen - rejected).mean().item()]

    return policy.steps(ROWS, {"dpo": dpo, "simpo": simpo, "rm": rm}[kind])


def kto_by_hand(place: Place) -> list[list[float]]:
    policy, frozen = (Oracle(place.folder / "qwen3", place.folder) for _ in range(2))

    def loss(numbers: list[int]) -> tuple[Tensor, list[float]]:
        ratios, other_ratios = [], []
        for number in numbers:
            messages, names = JUDGED[number]["messages"], JUDGED[number]["images"]
            other = [*messages[:-1], JUDGED[number - 1]["messages"][-1]]
            with torch.no_grad():
                before, other_before = frozen.log_prob(messages, names), frozen.log_prob(other, names)
                other_ratios.append(policy.log_prob(other, names) - other_before)
            ratios.append(policy.log_prob(messages, names) - before)
        kl = torch.stack(other_ratios).mean().clamp(min=0)
        signs = torch.tensor([1.0 if JUDGED[number]["label"] else -1.0 for number in numbers])
        return (1 - torch.sigmoid(signs * BETA * (torch.stack(ratios) - kl))).mean(), [kl.item()]

    return policy.steps(range(STEPS * BATCH), loss)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dpo", PAIRED),
        pytest.param("rm", ("rewards/margins",), marks=pytest.mark.long),
        pytest.param("simpo", PAIRED, marks=pytest.mark.long),
    ],
)
def test_pairs_are_those_of_transformers(kind, names, place):
    run = rlhf(place, kind, "--simpo_gamma 1 --beta 2 --cpo_alpha 0" if kind == "simpo" else "")
    torch.testing.assert_close(log(run, "loss", "grad_norm", *names), by_hand(place, kind), rtol=2e-4, atol=1e-6)
    assert [number for (number,) in log(run, "images")] == images(ROWS)


def test_kto_is_that_of_transformers(place):
    run = rlhf(place, "kto")
    torch.testing.assert_close(log(run, "loss", "grad_norm", "kl"), kto_by_hand(place), rtol=2e-4, atol=1e-6)
    assert [number for (number,) in log(run, "images")] == images(JUDGED, is_paired=False)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("dpo", "--tensor_model_parallel_size 2 --sequence_parallel true", id="dpo TP2 SP"),
        pytest.param("kto", "--context_parallel_size 2", id="kto CP2"),
        pytest.param("dpo", "--pipeline_model_parallel_size 2", id="dpo PP2", marks=pytest.mark.long),
        pytest.param("dpo", "--context_parallel_size 2", id="dpo CP2", marks=pytest.mark.long),
        pytest.param("kto", "--pipeline_model_parallel_size 2", id="kto PP2", marks=pytest.mark.long),
        pytest.param("rm", "--tensor_model_parallel_size 2", id="rm TP2", marks=pytest.mark.long),
        pytest.param("rm", "--pipeline_model_parallel_size 2", id="rm PP2", marks=pytest.mark.long),
        pytest.param("rm", "--context_parallel_size 2", id="rm CP2", marks=pytest.mark.long),
    ],
)
def test_a_layout_gives_the_numbers_of_one_process(kind, flags, place):
    torch.testing.assert_close(
        log(rlhf(place, kind, flags, 2), *NAMES), log(rlhf(place, kind), *NAMES), rtol=1e-4, atol=0
    )


@pytest.mark.long
def test_another_model_is_the_reference(place):
    run = rlhf(place, "dpo", "--ref_model other --precompute_ref_log_probs true")
    expected = by_hand(place, "dpo", reference="other")
    torch.testing.assert_close(log(run, "loss", "grad_norm", *PAIRED), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.long
def test_precomputed_packed_and_trained_alike(place):
    """The reference's values do not depend on when they are computed, nor a step on packs."""
    steps = log(rlhf(place, "dpo"), *NAMES)
    precomputed_steps = log(rlhf(place, "dpo", "--precompute_ref_log_probs true"), *NAMES)
    torch.testing.assert_close(precomputed_steps, steps, rtol=1e-4, atol=0)
    whole = "--global_batch_size 8 --train_iters 1"
    packs = "--global_batch_size 1 --train_iters 1 --micro_batch_size 1 --packing true --max_length 4096"
    torch.testing.assert_close(
        log(rlhf(place, "dpo", packs), *NAMES), log(rlhf(place, "dpo", whole), *NAMES), rtol=1e-4, atol=0
    )


def test_adapters_have_the_model_without_them_as_reference(place):
    """Adapters of the tower too: at first no answer is preferred, and later the reference has not moved."""
    lora = f"--tuner_type lora --lora_rank 4 --lora_dropout 0 --target_modules all-linear {ALL}"
    run = rlhf(place, "dpo", lora)
    first, *_, last = log(run, "loss", "rewards/margins", "logps/chosen", "rewards/chosen")
    assert first[0] == pytest.approx(0.6931472, abs=1e-6)
    assert abs(last[1]) > 1e-3
    separate = rlhf(place, "dpo", f"{lora} --ref_model qwen3")
    torch.testing.assert_close(log(run, *NAMES), log(separate, *NAMES), rtol=1e-4, atol=0)


def test_a_reference_with_the_same_frozen_tower_reads_the_model_s_features(place):
    frozen = "--freeze_vit true"
    run, apart = (rlhf(place, "dpo", f"{frozen} {more}", program=COUNTED) for more in ("", "--ref_model other"))
    expected = by_hand(place, "dpo", trains_tower=False)
    torch.testing.assert_close(log(run, "loss", "grad_norm", *PAIRED), expected, rtol=2e-4, atol=1e-6)
    assert 0 < 2 * encoded_patches(run) == encoded_patches(apart)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("layout", ["--pipeline_model_parallel_size 2", "--tensor_model_parallel_size 2"])
def test_shared_features_in_a_layout(kind, layout, place):
    lora = "--freeze_vit true --tuner_type lora --lora_rank 4 --lora_dropout 0"
    divided, alone = rlhf(place, kind, f"{lora} {layout}", 2, program=COUNTED), rlhf(place, kind, lora, program=COUNTED)
    torch.testing.assert_close(log(divided, *NAMES), log(alone, *NAMES), rtol=1e-4, atol=0)
    assert encoded_patches(divided) == encoded_patches(alone)


def test_a_reference_without_tower_is_refused(place):
    from tests import tiny

    if not (place.folder / "text").is_dir():
        tiny.save_tokenizer(tiny.save(place.folder / "text", "qwen3", 0))
    words = "rlhf --rlhf_type dpo --model qwen3 --dataset pairs.jsonl --micro_batch_size 2 --ref_model text"
    assert "--ref_model text" in place.run(words, fails=True)
