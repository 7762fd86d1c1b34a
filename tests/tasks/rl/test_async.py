"""Generation beside training: what overlaps, by which weights completions are drawn, and what goes wrong meanwhile."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks.rl.runs import END, Place, Trained, assert_same_steps, prompts
from tests.tasks.rl.test_grpo_layouts import DP, PP, TP
from tests.tasks.rl.test_grpo_numbers import agree, reference

pytestmark = pytest.mark.slow
later = pytest.mark.long
ASIDE = Path(__file__).with_name("aside.py")
SERVED = "--use_vllm true --vllm_mode server"
ONE = "--steps_per_generation 1"


def beside(flags: str = "") -> str:
    return f"{SERVED} --async_generate true --external_plugins rewards.py {ASIDE} {flags}".strip()


@pytest.fixture
def events(place: Place, monkeypatch: pytest.MonkeyPatch):
    """What a run's engine and steps were, in their order, once it has ended. What is generated beside waits for a
    step."""
    file = place.folder / "events.jsonl"
    file.unlink(missing_ok=True)
    monkeypatch.setenv("ASIDE_WAITS", "1")

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()]

    return read


def drawn(place: Place, model: Path, generation: int) -> list[list[int]]:
    """What a model draws for a run's generation of two prompts' four completions: tokens."""
    from megaswift.tasks.rollout.engine import Request, Sampling
    from megaswift.tasks.rollout.transformers_engine import TransformersEngine
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(place.folder / "qwen3")
    asked = 8 * (generation - 1)
    rows = [prompts(6)[(asked // 4 + number // 4) % 6] for number in range(8)]
    tokens = [tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, return_dict=False) for r in rows]
    seeds = np.random.SeedSequence([42, asked]).generate_state(8, np.uint64) >> 1
    requests = [Request(ids, int(seed)) for ids, seed in zip(tokens, seeds, strict=True)]
    engine = TransformersEngine(model, dtype=torch.float32)
    return [each.tokens for each in engine.generate(requests, Sampling(temperature=0.9, max_new_tokens=12))]


def of_generation(run: Trained, generation: int) -> list[list[int]]:
    return [row["completion_ids"] for row in run.completions if row["generation"] == generation]


def test_completions_are_drawn_while_the_ones_before_are_trained_on(place: Place, events: Any) -> None:
    """By the weights of one generation before; what is trained on them is what TRL would."""
    run = place.run(beside(f"{ONE} --train_iters 4 --save_steps 1 --no_save_optim false --no_save_rng false --lr 3e-3"))
    seen = events()
    what = [event["what"] for event in seen]
    places = [place for place, name in enumerate(what) if name.endswith("begins")]
    ended = [place for place, name in enumerate(what) if name.endswith("ends")]
    assert len(places) == len(ended) == 4
    assert [seen[place]["thread"] for place in places] == ["MainThread", *["async rollout"] * 3]
    for number, (begin, end) in enumerate(zip(places, ended, strict=True)):
        within = what[begin + 1 : end]
        # Steps of training, of which each of the later generations has waited for one; no weights on their way.
        assert within == ["step"] * (number > 0)
    assert what.count("weights begin") == 3  # the last step's are wanted by nobody
    weights = [place.folder / "qwen3"] * 2 + [run.folder / f"checkpoint-{step}" for step in (1, 2)]
    for generation, model in enumerate(weights, 1):
        assert of_generation(run, generation) == drawn(place, model, generation)
    assert of_generation(run, 4) != drawn(place, weights[2], 4)
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in run.steps]
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])
    assert all(row["timing_s/idle"] >= 0 < row["timing_s/gen"] for row in run.steps)


@pytest.mark.long
def test_the_run_says_what_ends_a_completion(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was started from a folder with another end token draws what one of the run's own would."""
    monkeypatch.setenv("ASIDE_END", "5")
    found, wanted = place.run(f"{SERVED} --external_plugins rewards.py {ASIDE} {ONE}"), place.run(ONE)
    assert [row["completion_ids"] for row in found.completions] == [row["completion_ids"] for row in wanted.completions]
    assert any(row["completion_ids"][-1] == END for row in found.completions)


@later
def test_what_is_trained_is_trls(place: Place) -> None:
    """Old log-probabilities are the trainer's, from the start of the steps."""
    run = place.run(beside())
    agree(run, reference(place, run))
    several = place.run(beside(f"{ONE} --num_iterations 2"))
    for found, wanted in zip(several.steps, reference(place, several, iterations=2).steps(), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
        assert found["kl"] == pytest.approx(wanted["kl"], rel=1e-4, abs=1e-6)
        # Of completions that the model no longer holds for likely the parts of the gradient cancel less evenly.
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


@later
@pytest.mark.parametrize("layout", [f"{TP}", PP, f"{DP} --overlap_grad_reduce true --overlap_param_gather true"])
def test_layouts(layout: str, place: Place) -> None:
    base = f"{ONE} --train_iters 4"
    assert_same_steps(place.run(beside(f"{base} {layout}"), 2), place.run(beside(base)))


@later
def test_an_evaluation_in_between(place: Place, events: Any) -> None:
    """It waits for what is drawn, which stays what it was; its own completions are by the weights as they are."""
    base = f"{ONE} --train_iters 4"
    with_it = place.run(beside(f"{base} --val_dataset val.jsonl --eval_steps 1"))
    what = [event["what"] for event in events()]
    inside = [(one, other) for one, other in pairwise(what) if one == "generate begins" and "weights" in other]
    assert not inside
    assert_same_steps(with_it, place.run(beside(base)))
    plain = place.run("--val_dataset val.jsonl --eval_steps 3")
    served = place.run(beside("--val_dataset val.jsonl --eval_steps 3"))  # all drawn at the beginning: the same
    assert_same_steps(served, plain)
    assert served.evaluations[0]["eval_reward"] == pytest.approx(plain.evaluations[0]["eval_reward"])


@later
def test_a_run_that_goes_on_without_it(place: Place) -> None:
    """What was drawn ahead is trained on, and no prompt is passed over."""
    flags = f"{ONE} --train_iters 4 --save_steps 1 --no_save_optim false --no_save_rng false"
    run = place.run(beside(flags))
    asked = [[row["messages"] for row in run.completions if row["generation"] == number] for number in (1, 2, 3, 4)]
    third = of_generation(run, 3)
    line = place.line(beside(flags).replace("async_generate true", "async_generate false"), run.folder.name)
    place.megatron(f"{line} --resume_from_checkpoint {run.folder}/checkpoint-2")
    after = Trained(run.folder, "")
    assert [row["step"] for row in after.log if "loss" in row] == [1, 2, 3, 4]
    assert of_generation(after, 3) == third
    assert [[r["messages"] for r in after.completions if r["generation"] == number] for number in (1, 2, 3, 4)] == asked


@later
def test_prompts_that_teach_nothing_are_replaced(place: Place) -> None:
    """Meanwhile, too: rewards are given there."""
    flags = f"{ONE} --reward_funcs odd --dynamic_sample true"
    found, wanted = place.run(beside(flags)), place.run(flags)
    goals = [[row["messages"] for row in run.completions] for run in (found, wanted)]
    assert goals[0] == goals[1]
    names = "frac_reward_zero_std", "reward", "completions/mean_length"
    assert [row[names[0]] for row in found.steps] == [row[names[0]] for row in wanted.steps]


@later
def test_a_server_that_was_started_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was drawing is drawn anew, by the weights as they are then."""
    monkeypatch.setenv("ASIDE_LOST", "3")
    run = place.run(beside(f"{ONE} --train_iters 5 --save_steps 1 --lr 3e-3"))
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4, 5]
    # The third by the weights after two steps, as is the fourth; then a generation behind again.
    for generation, step in ((3, 2), (4, 2), (5, 3)):
        assert of_generation(run, generation) == drawn(place, run.folder / f"checkpoint-{step}", generation)


@later
@pytest.mark.parametrize("processes", [None, 2])
def test_a_server_that_is_gone(processes: int | None, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known at the next step; a checkpoint that was being saved is whole."""
    monkeypatch.setenv("ASIDE_GONE", "2")
    name = f"gone-{processes}"
    flags = f"--save_steps 1 --steps_per_generation 2 --train_iters 8 {DP if processes else ''}"
    (place.folder / "events.jsonl").unlink(missing_ok=True)
    printed = place.megatron(place.line(beside(flags), name), processes, code=1)
    assert "The rollout server http://aside is gone: killed, during /generate." in printed
    assert '"released"' in (place.folder / "events.jsonl").read_text()  # for the next run
    steps = [row["step"] for row in Trained(place.folder / name, "").log if "loss" in row]
    assert steps in ([1], [1, 2])
    assert (place.folder / name / "checkpoint-1" / "manifest.json").exists()


@later
def test_a_reward_that_raises_meanwhile(place: Place) -> None:
    flags = f"{ONE} --reward_funcs raises --dataset late.jsonl --train_iters 6"
    rows = [row for row in prompts(9) if row["goal"] != 2]
    (place.folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, prompts(3)[2]]))
    printed = place.megatron(place.line(beside(flags), "late"), code=1)
    assert "error: --reward_funcs raises raised ZeroDivisionError: division by zero" in printed
    assert "Traceback" not in printed
