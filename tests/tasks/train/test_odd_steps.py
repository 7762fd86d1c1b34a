"""Steps that are not as the others, in runs of the command line: spikes, steps to pass over, faults, slow ranks."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import prepared, tiny
from tests.tasks.supervised.test_sft import log_of

pytestmark = pytest.mark.slow
COMMON = (
    "sft --model model --dataset train.jsonl --dataset_shuffle false --train_dataloader_shuffle false --max_length 64 "
    "--micro_batch_size 4 --global_batch_size 4 --logging_steps 1 --dataloader_num_workers 0 --report_to none "
    "--add_version false --no_save_optim true"
)
POISONED = 90  # step
# What a script changes before it does what the command line says.
ONCE_NOT_FINITE = """
from megaswift.tasks.train import optimizer
real, calls = optimizer._gradient_norm, []
def norm(each):
    calls.append(1)
    found, own = real(each)
    return (found * float("nan"), own) if len(calls) == 3 else (found, own)
optimizer._gradient_norm = norm
"""
SLOW = """
import os, time
from megaswift.tasks.train import step
real = step.run_schedule
def slow(*arguments, **settings):
    time.sleep(0.5 * (os.environ["RANK"] == "1"))
    return real(*arguments, **settings)
step.run_schedule = slow
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and data of which the batch of one step is what no other has."""
    folder = tmp_path_factory.mktemp("odd")
    tiny.save_tokenizer(tiny.save(folder / "model", "qwen2"))
    dice = random.Random(0)
    rows = [{"query": f"What is {a} + {a}?", "response": str(a + a)} for a in dice.choices(range(10), k=4 * 100)]
    for row in rows[4 * (POISONED - 1) : 4 * POISONED]:
        row["response"] = "".join(dice.choices("zqxjkvw", k=12))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def megatron(place: Path, flags: str, script: str = "", *, processes: int | None = None, code: int = 0) -> str:
    """What `megatron {COMMON} {flags}` prints."""
    program = ["-m", "megaswift.cli.main"]
    if script:
        (place / "script.py").write_text(f"{script}\nfrom megaswift.cli.main import main\nimport sys\n"
                                         "sys.exit(main(sys.argv[1], sys.argv[2:]))\n")  # fmt: skip
        program = ["script.py"]
    environment = os.environ | {"HF_HOME": str(place / "cache"), "COLUMNS": "200"} | prepared.ON_CPU
    words = [*program, "megatron", *COMMON.split(), *flags.split()]
    done = prepared.run(words, processes=processes, cwd=place, environment=environment)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def rows_of(folder: Path) -> list[dict]:
    return [row for row in log_of(folder) if "loss" in row]


def test_a_spike_is_skipped(place: Path) -> None:
    """Its loss is logged, and the weights stay; a run that is resumed right before it skips the same."""
    plain = "--lr 3e-3 --lr_decay_style constant --no_save_optim false"
    with_filter = f"{plain} --loss_spike_sigma 6"
    printed = megatron(place, f"{with_filter} --train_iters 100 --output_dir spike")
    assert printed.count(f"step {POISONED}: update skipped, loss or gradient norm is a spike") == 1
    assert printed.count("update skipped") == 1
    rows = rows_of(place / "spike")
    assert [row["step"] for row in rows if "skipped_steps" in row] == list(range(POISONED, 101))
    assert rows[-1]["skipped_steps"] == 1
    before, spike, after = (rows[step - 1]["loss"] for step in (POISONED - 1, POISONED, POISONED + 1))
    assert spike > 5 * before
    assert after < 1.5 * before

    megatron(place, f"{with_filter} --train_iters {POISONED - 1} --output_dir parts")
    megatron(place, f"{with_filter} --train_iters 100 --output_dir parts --resume_from_checkpoint auto")
    assert [row["loss"] for row in rows_of(place / "parts")] == [row["loss"] for row in rows]
    assert rows_of(place / "parts")[-1]["skipped_steps"] == 1

    megatron(place, f"{plain} --train_iters 100 --output_dir plain")
    unfiltered = [row["loss"] for row in rows_of(place / "plain")]
    assert unfiltered[:POISONED] == [row["loss"] for row in rows[:POISONED]]
    assert unfiltered[POISONED] != after


def test_steps_to_skip_change_no_weight(place: Path) -> None:
    printed = megatron(place, "--train_iters 4 --save_steps 1 --lr 1e-2 --iterations_to_skip 2 4 --output_dir passed")
    assert [line for line in printed.splitlines() if "no update" in line] == [
        f"step {step}: no update (--iterations_to_skip)" for step in (2, 4)
    ]
    steps = [load_file(place / "passed" / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2, 3, 4)]
    same = [all(torch.equal(one[name], other[name]) for name in one) for one, other in itertools.pairwise(steps)]
    assert same == [True, False, True]
    assert len(rows_of(place / "passed")) == 4


def test_a_fault_that_does_not_come_again_is_told_from_one_that_does(place: Path) -> None:
    printed = megatron(place, "--train_iters 6 --output_dir once", ONCE_NOT_FINITE, code=1)
    assert "step 3: the gradient norm nan" in printed
    assert "Computed once more, it is finite: a GPU or its memory may be faulty" in printed
    printed = megatron(place, "--train_iters 6 --lr 1e30 --output_dir again", code=1)
    assert "Computed once more, it is not finite either: the data or the weights are the cause" in printed


def test_a_slow_rank_is_named(place: Path) -> None:
    """Without overlap: gloo's reductions are waited for in the midst of a step."""
    printed = megatron(
        place,
        "--train_iters 5 --micro_batch_size 2 --preflight true --overlap_grad_reduce false --output_dir slow",
        SLOW,
        processes=2,
    )
    slow = [line for line in printed.splitlines() if ": slow: " in line]
    assert len(slow) >= 3
    assert all(": slow: rank 1 takes " in line and "rank 0 takes" not in line for line in slow)
    head = next(line for line in printed.splitlines() if line.startswith("node "))
    assert "TFLOP/s" in head
    assert "GB/s within" in head
