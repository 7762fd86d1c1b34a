"""Runs of GRPO as a user has them: what is replaced, evaluated, logged and saved; what goes wrong, and what is said."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from megaswift.tasks.rollout.weight_sync import checksum

from tests.tasks.preference.runs import assert_close
from tests.tasks.report.pages import Page
from tests.tasks.rl.runs import BASE, LENGTH, LORA, MOE, Place, Trained, assert_same_steps, prompts

pytestmark = pytest.mark.slow
later = pytest.mark.long
ONE = "--steps_per_generation 1"  # completions are generated for each step by themselves: of two prompts
# What a process does beside the run: at its end the engine's tensors by name, as it has them.
CHECKED = """
import json
import sys
from pathlib import Path
from safetensors import safe_open
from megaswift.cli.main import main
from megaswift.tasks.rollout.factory import ModelRollout

take = ModelRollout.update_weights


def taken(self, training):
    found = take(self, training)
    file = Path(self.run.options.model) / "model.safetensors"
    with safe_open(file, "pt") as names:
        sums = self.engine.checksums(list(names.keys()))
    row = {"compared": found.compared, "bytes": found.bytes, "sums": sums}
    Path("engine.jsonl").open("a").write(json.dumps(row) + "\\n")
    return found


ModelRollout.update_weights = taken
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""


def numbers(run: Trained) -> None:
    """Every number of a log is one."""
    assert all(math.isfinite(value) for row in run.log for value in row.values() if isinstance(value, float))


def asked(run: Trained, generation: int) -> list[int]:
    """The prompts of a generation, by their rows."""
    rows = {json.dumps(row["messages"]): row["goal"] for row in prompts(6)}
    of = [rows[json.dumps(row["messages"])] for row in run.completions if row["generation"] == generation]
    assert all(len(set(of[start : start + 4])) == 1 for start in range(0, len(of), 4))
    return of[::4]


def test_the_report_has_completions_and_times(place: Place) -> None:
    run = place.run(BASE)
    (content,) = Page(run.folder / "report.html").content["runs"]
    rows = [(row["completion"], row["reward"], row["generation"]) for row in content["completions"]["rows"]]
    assert rows == [(row["completion"], row["reward"], row["generation"]) for row in run.completions]
    assert content["curves"]["reward"]["values"] == pytest.approx(
        [row["reward"] for row in run.steps if "reward" in row]
    )
    assert {"generation", "scoring", "reference model", "training"} <= content["phases"]["totals"].keys()


@later
def test_a_group_over_two_ranks(place: Place) -> None:
    """Four completions of one prompt, two on each rank, are compared with each other."""
    flags = f"{ONE} --global_batch_size 4 --micro_batch_size 1"
    found, wanted = place.run(f"{flags} --use_distributed_optimizer true", 2), place.run(flags)
    assert_same_steps(found, wanted)
    for generation in (1, 2, 3):
        rewards = np.array([row["reward"] for row in found.completions if row["generation"] == generation])
        advantages = [row["advantage"] for row in found.completions if row["generation"] == generation]
        assert len(rewards) == 4
        assert np.allclose(advantages, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4), atol=1e-6)


def test_prompts_that_teach_nothing_are_replaced(place: Place) -> None:
    """Of odd prompts all completions have the same reward: the next prompts take their places."""
    run = place.run(f"{ONE} --reward_funcs odd --dynamic_sample true")
    assert [asked(run, generation) for generation in (1, 2, 3)] == [[0, 2], [4, 0], [2, 4]]
    # Of 0 1 | 2, of 3 4 | 5 | 0, of 1 2 | 3 | 4: what was generated in vain is in the log too.
    assert [row["frac_reward_zero_std"] for row in run.steps] == pytest.approx([1 / 3, 2 / 4, 2 / 4])
    assert all(row["advantage"] for row in run.completions)


@later
def test_replacing_ends(place: Place) -> None:
    """--max_resample_times: then prompts that teach nothing are taken as they are."""
    run = place.run(f"{ONE} --reward_funcs odd --dynamic_sample true --max_resample_times 1")
    assert [asked(run, generation) for generation in (1, 2, 3)] == [[0, 2], [4, 3], [0, 2]]
    none = place.run(f"{ONE} --reward_funcs constant --dynamic_sample true --max_resample_times 2")
    assert [asked(none, generation) for generation in (1, 2, 3)] == [[0, 1], [0, 1], [0, 1]]
    numbers(none)


@later
@pytest.mark.parametrize("processes", [None, 2])
def test_evaluation(processes: int | None, place: Place) -> None:
    """Means over every prompt of --val_dataset; the best checkpoint is that with the highest reward."""
    flags = "--val_dataset val.jsonl --eval_steps 1 --save_steps 1 --num_generations_eval 3 --reward_funcs witness"
    run = place.run(f"{flags} --lr 3e-2" + " --use_distributed_optimizer true" * bool(processes), processes)
    calls = [json.loads(line) for line in (run.folder / "witness.jsonl").read_text().splitlines()]
    assert len(calls[0]["goal"]) == 24  # the training's completions, and then those of the evaluations
    goals, given = ([each for call in calls[1:] for each in call[name]] for name in ("goal", "values"))
    assert goals == [goal for goal in range(6, 11) for _ in range(3)] * 3
    assert [row["step"] for row in run.evaluations] == [1, 2, 3]
    for row, values in zip(run.evaluations, np.array(given).reshape(3, 15), strict=True):
        wanted = {
            "eval_reward": values.mean(),
            "eval_rewards/witness/mean": values.mean(),
            "eval_reward_std": values.std(ddof=1),
        }
        assert_close(row, {name: float(value) for name, value in wanted.items()})
    best = max(run.evaluations, key=lambda row: row["eval_reward"])
    assert len({row["eval_reward"] for row in run.evaluations}) == 3
    assert (run.folder / "best").resolve().name == f"checkpoint-{best['step']}"


@later
def test_an_evaluation_does_not_touch_the_training(place: Place) -> None:
    with_it, without = place.run("--val_dataset val.jsonl --eval_steps 2"), place.run()
    assert_same_steps(with_it, without)
    # With the same weights, so that every evaluation is the same: the same random numbers.
    still = place.run("--val_dataset val.jsonl --eval_steps 1 --lr 0")
    first, *others = ({n: v for n, v in row.items() if n.startswith("eval_")} for row in still.evaluations)
    assert all(other == first for other in others)
    assert len(others) == 2


@later
def test_completions_are_written_down(place: Place) -> None:
    from transformers import AutoTokenizer

    run, tokenizer = place.run(BASE), AutoTokenizer.from_pretrained(place.folder / "qwen3")
    assert asked(run, 1) == [0, 1, 2, 3, 4, 5]
    for row, prompt in zip(run.completions, [row for row in prompts(6) for _ in range(4)], strict=True):
        assert row["messages"] == prompt["messages"]
        ids = row["completion_ids"]
        assert row["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert row["length"] == len(ids) <= LENGTH
        assert (row["finish_reason"] == "stop") == (ids[-1] == tokenizer.eos_token_id)
        assert row["rewards"]["waves"] == pytest.approx(math.sin(sum(ids) + prompt["goal"]))
        assert row["rewards"]["short"] == (None if prompt["goal"] == 3 else 1 - len(ids) / 12)
    assert {row["finish_reason"] for row in run.completions} == {"stop", "length"}


@later
def test_rewards_that_are_all_equal(place: Place) -> None:
    """No completion is better than another: nothing but the divergence from the reference is trained."""
    run = place.run("--reward_funcs constant")
    numbers(run)
    assert [(row["loss"], row["grad_norm"]) for row in run.steps] == [(0.0, 0.0)] * 3
    assert run.steps[0]["frac_reward_zero_std"] == 1
    start = place.start()
    assert all(tensor.equal(start[name]) for name, tensor in run.weights.items())
    apart = place.run("--reward_funcs constant --ref_model other")
    numbers(apart)
    for row in apart.steps:  # TRL's kl is a mean over tokens, the loss's one over completions: of about as much
        assert row["loss"] > 0
        assert row["grad_norm"] > 0
    by_tokens = place.run("--reward_funcs constant --ref_model other --loss_type dapo")
    for row in by_tokens.steps:
        assert row["loss"] == pytest.approx(0.04 * row["kl"], rel=1e-5)


@later
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "sapo"])
def test_completions_that_are_all_cut_off(loss_type: str, place: Place) -> None:
    """--overlong_filter: nothing is left to train on, and nothing is changed."""
    if not (place.folder / "endless").exists():
        place.model("endless", ends=False)
    flags = f"--model endless --overlong_filter true --ref_model other --loss_type {loss_type} --log_entropy true"
    if loss_type == "dapo":
        flags += " --top_entropy_quantile 0.3"
    run = place.run(flags)
    assert {(row["finish_reason"], row["length"]) for row in run.completions} == {("length", LENGTH)}
    assert run.steps[0]["completions/clipped_ratio"] == 1
    assert "completions/mean_terminated_length" not in run.steps[0]
    numbers(run)
    assert [(row["loss"], row["grad_norm"]) for row in run.steps] == [(0.0, 0.0)] * 3
    start = place.start("endless")
    assert all(tensor.equal(start[name]) for name, tensor in run.weights.items())


@later
@pytest.mark.parametrize("flags", ["", "--top_entropy_quantile 0.2"])
def test_completions_of_the_end_alone(flags: str, place: Place) -> None:
    """The model has nothing to say: a completion is one token, and its text is empty."""
    if not (place.folder / "silent").exists():
        place.model("silent", ends=True)
    run = place.run(f"--model silent --ref_model other --reward_funcs witness {flags}".strip())
    assert {(row["finish_reason"], row["length"], row["completion"]) for row in run.completions} == {("stop", 1, "")}
    numbers(run)
    assert all(abs(row["kl"]) > 1e-3 for row in run.steps)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(
            "--reward_funcs raises",
            "error: --reward_funcs raises raised ZeroDivisionError: division by zero (rewards.py, line {raises}) for "
            "row 3 of train.jsonl, completion ",
            id="raises",
        ),
        pytest.param(
            "--reward_funcs nan",
            "error: --reward_funcs nan returned nan for row 3 of train.jsonl, completion ",
            id="nan",
            marks=later,
        ),
        pytest.param(
            "--reward_funcs hangs --reward_timeout 0.5",
            "error: --reward_funcs hangs did not return within 0.5 s (it is at rewards.py, line {hangs}). It hangs "
            "for row 3 of train.jsonl, completion ",
            id="hangs",
            marks=later,
        ),
        pytest.param(
            "--max_sampling_logp_difference 1e-12",
            "--max_sampling_logp_difference 1e-12: the engine's log-probabilities differ from the trainer's by",
            id="gap",
            marks=later,
        ),
        pytest.param(
            "--reward_funcs accuracy",
            "error: --reward_funcs accuracy: it requires the column solution, and the dataset has goal. Add",
            id="column",
            marks=later,
        ),
        pytest.param(
            "--max_length 8",
            "error: no row of the dataset can be used",
            id="prompts too long",
            marks=later,
        ),
    ],
)
def test_what_ends_a_run(flags: str, said: str, place: Place) -> None:
    lines = (place.folder / "rewards.py").read_text().splitlines()
    places = {
        "raises": next(n for n, line in enumerate(lines, 1) if "1 / (number - 2)" in line),
        "hangs": next(n for n, line in enumerate(lines, 1) if "time.sleep" in line),
    }
    printed = place.megatron(place.line(flags, f"ended-{abs(hash(flags))}"), code=1)
    assert said.format(**places) in printed, printed[-3000:]
    assert "Traceback" not in printed


@later
def test_what_ends_a_run_of_two(place: Place) -> None:
    """Rewards are called on the first rank: it says what is wrong, once, and all end."""
    printed = place.megatron(place.line("--reward_funcs raises --use_distributed_optimizer true", "two-end"), 2, code=1)
    assert printed.count("error: --reward_funcs raises raised ZeroDivisionError") == 1
    assert "Traceback" not in printed


@later
@pytest.mark.parametrize(
    ("flags", "processes"),
    [(BASE, None), (f"{BASE} --tensor_model_parallel_size 2 --sequence_parallel true", 2), (MOE, None),
     (f"{MOE} --expert_model_parallel_size 2", 2), (LORA, None)],
)  # fmt: skip
def test_engine_and_trainer_agree(flags: str, processes: int | None, place: Place) -> None:
    """On the log-probabilities of what the engine has drawn."""
    if flags == LORA:
        place.adapter()
    for row in place.run(flags, processes).steps:
        assert 0 < row["sampling/sampling_logp_difference/mean"] <= row["sampling/sampling_logp_difference/max"] < 1e-4


@later
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        ("", None),
        ("--tensor_model_parallel_size 2 --sequence_parallel true", 2),
        ("--pipeline_model_parallel_size 2", 2),
        ("--use_distributed_optimizer true --overlap_grad_reduce true --overlap_param_gather true", 2),
        (f"{MOE} --expert_model_parallel_size 2", 2),
        (LORA.replace("merge_lora false", "merge_lora true"), None),
    ],
)
def test_engines_have_the_weights_of_the_trainer(flags: str, processes: int | None, place: Place) -> None:
    """Each time that they are given some, all are those of the checkpoint after the step before, bit for bit."""
    from safetensors.torch import load_file

    def sums_in(folder: Path) -> dict[str, str]:
        files = list(folder.glob("*.safetensors"))
        return {name: checksum(tensor) for file in files for name, tensor in load_file(file).items()}

    place.adapter()
    said = place.folder / "engine.jsonl"
    said.unlink(missing_ok=True)
    saves = f"{ONE} --save_steps 1 --val_dataset val.jsonl --eval_steps 3"
    run = place.run(f"{flags} {saves}".strip(), processes, script=CHECKED)
    syncs = [json.loads(line) for line in said.read_text().splitlines()]
    engines = processes or 1
    assert len(syncs) == 4 * engines  # before the completions of each of three steps, and before the evaluation
    assert all(sync["compared"] > 0 for sync in syncs)
    of_adapter = "--merge_lora" in flags
    for step in range(4):
        folder = run.folder / f"checkpoint-{step}{'-merged' * of_adapter}"
        if step == 0 and not of_adapter:
            folder = place.folder / ("qwen3_moe" if "qwen3_moe" in flags else "qwen3")
        if step > 0 or not of_adapter:
            wanted = sums_in(folder)
            assert wanted
            assert [sync["sums"] for sync in syncs[step * engines : (step + 1) * engines]] == [wanted] * engines
    saved = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    assert syncs[-1]["bytes"] == sum(tensor.nbytes for tensor in saved)
    assert syncs[0]["sums"] != syncs[-1]["sums"]


@later
@pytest.mark.parametrize(
    ("flags", "steps", "checkpoints"),
    [
        (f"{ONE} --num_train_epochs 1", 3, [3]),
        (f"{ONE} --num_train_epochs 2", 6, [3, 6]),
        ("--num_train_epochs 2", 6, [3, 6]),
        (f"{ONE} --num_train_epochs 1 --num_iterations 2", 6, [6]),
        (f"{ONE} --num_train_epochs 1 --global_batch_size 4", 6, [6]),
        (f"{ONE} --num_train_epochs 1 --num_generations 2", 2, [2]),
    ],
)
def test_steps_of_an_epoch(flags: str, steps: int, checkpoints: list[int], place: Place) -> None:
    """Prompts x --num_generations / --global_batch_size; a checkpoint at the end of each epoch."""
    run = place.run(f"{flags} --save_strategy epoch")
    assert [row["step"] for row in run.steps] == list(range(1, steps + 1))
    # Also where completions for several steps are generated at a time: an epoch ends with the last of its steps.
    saved = sorted(int(path.name.split("-")[1]) for path in run.folder.glob("checkpoint-*"))
    assert saved == checkpoints


@later
@pytest.mark.parametrize("flags", ["", f"{ONE} --num_iterations 2"])
def test_a_run_that_goes_on_has_as_many_steps(flags: str, place: Place) -> None:
    """From within what was generated at a time, of which some steps were still to be done."""
    epochs, more = (4, 4) if not flags else (2, 2)
    given = f"--num_train_epochs {{}} --save_steps {more} {flags} --no_save_optim false --no_save_rng false"
    whole, name = place.run(given.format(epochs)), f"goes-on-{bool(flags)}"
    assert len(whole.steps) == 12
    shutil.copytree(whole.folder, place.folder / name)
    for checkpoint in (place.folder / name).glob("checkpoint-*"):
        if checkpoint.name != f"checkpoint-{more}":
            shutil.rmtree(checkpoint)
    line = place.line(given.format(epochs), name)
    place.megatron(f"{line} --resume_from_checkpoint {name}/checkpoint-{more}")
    steps = [row["step"] for row in Trained(place.folder / name, "").steps]
    assert max(steps) == 12
