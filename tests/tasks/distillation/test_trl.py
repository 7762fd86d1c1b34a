"""Three steps of `megatron rlhf --rlhf_type gkd` on the data's answers beside TRL's, and beside plain PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.distillation import upstream
from tests.tasks.distillation.runs import OFF_POLICY, Distilled
from tests.tasks.preference.runs import Trained, assert_close, assert_same_weights, write

pytestmark = pytest.mark.slow


def agree(ours: Trained, theirs: tuple[upstream.Log, Any], place: Distilled) -> None:
    log, student = theirs
    assert len(ours.steps) == len(log) == 3
    for found, row in zip(ours.steps, log, strict=True):
        names = [name for name in ("loss", "jsd", "nll_loss", "grad_norm") if name in row]
        assert_close(found, {name: row[name] for name in names})
    assert_same_weights(
        ours.weights, dict(student.state_dict()), load_file(place.folder / "qwen3" / "model.safetensors")
    )


@pytest.mark.parametrize(
    "beta", [0.5, pytest.param(0.0, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.long)]
)
def test_trl(beta: float, place: Distilled) -> None:
    """Whose temperature is that of its sampling alone: ours is of the distributions too, as ms-swift's."""
    ours = place.run(f"{OFF_POLICY} --beta {beta} --temperature 1 --teacher_model teacher")
    agree(ours, upstream.trained(place.folder, place.train, beta=beta), place)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4])
def test_the_data_s_answers(size: int, place: Distilled) -> None:
    """With the answers' own loss, at a temperature, by a teacher whose output matrix has more rows."""
    ours = place.run(f"{OFF_POLICY} --beta 0.3 --temperature 0.7 --sft_alpha 0.4 --micro_batch_size {size}")
    samples = upstream.answers(place.folder, place.train)
    theirs = upstream.by_hand(place.folder, samples, alpha=0.4, beta=0.3, temperature=0.7)
    assert abs(theirs[0][0]["nll_loss"] - theirs[0][0]["jsd"]) > 1
    agree(ours, theirs, place)


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.3, 0.0])
def test_likeliest_tokens_alone(beta: float, place: Distilled) -> None:
    ours = place.run(f"{OFF_POLICY} --beta {beta} --temperature 0.7 --gkd_logits_topk 9")
    samples = upstream.answers(place.folder, place.train)
    theirs = upstream.by_hand(place.folder, samples, top=9, beta=beta, temperature=0.7)
    agree(ours, theirs, place)


def completions(place: Distilled, folder: str, *, temperature: float) -> upstream.Samples:
    """Of four rows a step, by an engine of the model in `folder`, or where it is qwen3 by the student as it is then."""
    from megaswift.tasks.rollout.engine import Request, Sampling
    from megaswift.tasks.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine(place.folder / folder, dtype=torch.float32)
    sampling = Sampling(temperature, max_new_tokens=8)
    rows = upstream.answers(place.folder, place.train)

    def samples(step: int, student: Any) -> list[upstream.Sample]:
        if folder == "qwen3":
            engine.update((name, tensor.detach()) for name, tensor in student.state_dict().items())
        seeds = np.random.SeedSequence([42, 4 * step]).generate_state(4, np.uint64) >> 1
        prompts = [ids[:first] for ids, first in rows(step, student)]
        asked = [Request(prompt, int(seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
        found = zip(prompts, engine.generate(asked, sampling), strict=True)
        return [(prompt + completion.tokens, len(prompt)) for prompt, completion in found]

    return samples


@pytest.mark.long
def test_the_student_s_own_completions(place: Distilled) -> None:
    """The weights of each step are those that generate for the next; the answers' own loss has no part in it."""
    ours = place.run("--lmbda 1 --max_completion_length 8 --temperature 1.2 --top_p 1")
    assert all(row["gkd/on_policy_fraction"] == 1 and 0 < row["completions/mean_length"] <= 8 for row in ours.steps)
    samples = completions(place, "qwen3", temperature=1.2)
    agree(ours, upstream.by_hand(place.folder, samples, beta=0.5, temperature=1.2), place)


@pytest.mark.long
def test_the_teacher_s_completions(place: Distilled) -> None:
    """In the place of answers, which the rows need not have."""
    write(place.folder / "asked.jsonl", [{"messages": row["messages"][:-1]} for row in place.train])
    flags = "--lmbda 0 --seq_kd true --max_completion_length 8 --sft_alpha 0.2 --dataset asked.jsonl"
    ours = place.run(f"{flags} --teacher_model teacher")
    assert all(row["gkd/on_policy_fraction"] == 0 and 0 < row["completions/mean_length"] <= 8 for row in ours.steps)
    samples = completions(place, "teacher", temperature=0.9)
    theirs = upstream.by_hand(place.folder, samples, teacher="teacher", alpha=0.2, beta=0.5, temperature=0.9)
    agree(ours, theirs, place)
