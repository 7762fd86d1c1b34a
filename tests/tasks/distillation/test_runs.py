"""The guide's example, what is logged, and what a user reads of rows, teachers and flags that do not fit."""

import json
import shlex
from typing import Any

import pytest

from tests import tiny
from tests.tasks.distillation.runs import TEACHER, Distilled
from tests.tasks.preference.runs import COMMON, write

pytestmark = pytest.mark.slow
GUIDE = """
    --use_hf --save_safetensors true --beta 0.5 --lmbda 0.5 --temperature 0.9 --max_completion_length 512
    --tensor_model_parallel_size 2 --sequence_parallel true --micro_batch_size 4 --global_batch_size 16 --finetune true
    --cross_entropy_loss_fusion true --lr 1e-5 --num_train_epochs 1 --no_save_optim true --no_save_rng true
"""


def line(flags: str, **changes: str) -> str:
    """A command line of one step."""
    given = {"model": "qwen3", "teacher_model": "teacher", "dataset": "train.jsonl", "use_vllm": "false"} | changes
    words = " ".join(f"--{name} {value}" for name, value in given.items() if value)
    return f"--rlhf_type gkd {words} {COMMON} --train_iters 1 --micro_batch_size 2 --output_dir bad {flags}"


def refused(place: Distilled, flags: str = "", **changes: str) -> str:
    """What `megatron rlhf` prints where it does not begin."""
    printed = place.megatron(line(flags, **changes), fails=True)
    assert "Traceback" not in printed
    return printed


@pytest.mark.long
def test_the_guide_s_example(place: Distilled) -> None:
    """But for the models' sizes; half of the completions go on until their greatest length."""
    words = f"--rlhf_type gkd --model qwen3 --teacher_model teacher --dataset train.jsonl {GUIDE}".split()
    place.megatron(shlex.join([*words, "--output_dir", "guide", "--add_version", "false"]), 2)
    rows = [json.loads(row) for row in (place.folder / "guide" / "logging.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 0
    assert (place.folder / "guide" / "checkpoint-1" / "model.safetensors").is_file()


def test_options_that_cannot_be() -> None:
    from megaswift.cli.checks.generation import check_generation
    from megaswift.cli.flags import UsageError
    from megaswift.cli.main import read_options

    required = ["rlhf", "--rlhf_type", "gkd", "--model", "m", "--teacher_model", "t", "--dataset", "d"]
    for words, said in (
        ("--lmbda 1.2", "--lmbda 1.2: must be at least 0 and at most 1"),
        ("--beta -0.1", "--beta -0.1: must be at least 0 and at most 1"),
        ("--temperature 0", "--temperature 0.0: must be at least 0.001"),
        ("--sft_alpha -1", "--sft_alpha -1.0: must be at least 0"),
        ("--gkd_logits_topk 1", "--gkd_logits_topk 1: must be at least 2"),
        ("--lmbda 1 --seq_kd true", "--seq_kd true cannot be used with --lmbda 1"),
        ("--lmbda 1 --sft_alpha 0.5", "--sft_alpha 0.5 cannot be used with --lmbda 1"),
        ("--streaming true", "--streaming true cannot be used with --rlhf_type gkd"),
    ):
        with pytest.raises(UsageError, match=said.replace(".", r"\.")):
            check_generation(read_options("megatron", [*required, *words.split()])[0], {})


def test_without_a_teacher_that_fits(place: Distilled) -> None:
    assert "--teacher_model: missing" in refused(place, teacher_model="")


@pytest.mark.long
def test_teachers_that_do_not_fit(place: Distilled) -> None:
    from transformers import AutoTokenizer

    folder = place.tokenized(tiny.save(place.folder / "foreign", "qwen3", **TEACHER))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["stone"])
    tokenizer.save_pretrained(folder)
    said = "--teacher_model foreign has another vocabulary than the trained model: 'stone' is token"
    assert said in refused(place, teacher_model="foreign")
    assert "--teacher_model nowhere" in refused(place, teacher_model="nowhere")
    printed = refused(place, "--teacher_model teacher --mcore_teacher_model teacher", teacher_model="")
    assert "--teacher_model teacher and --mcore_teacher_model teacher: set one of them" in printed
    assert "--gkd_logits_topk 1000: the vocabulary has 2" in refused(place, "--gkd_logits_topk 1000")
    assert "--mcore_teacher_model teacher" in refused(place, "--mcore_teacher_model teacher", teacher_model="")


@pytest.mark.long
def test_rows_without_answers(place: Distilled) -> None:
    rows: list[dict[str, Any]] = [{"messages": row["messages"][:-1]} for row in place.train[:4]]
    write(place.folder / "silent.jsonl", rows)
    write(place.folder / "some.jsonl", [*rows, *place.train[4:8], {"query": "red", "response": " "}])
    printed = refused(place, dataset="silent.jsonl")
    assert "no row of the dataset can be used" in printed
    assert "4 rows: it has no answer: add one, or use --lmbda 1 or --seq_kd true" in printed
    assert "5 rows: it has no answer" in place.megatron(line("", dataset="some.jsonl"))
    own = "--lmbda 1 --max_completion_length 4"
    printed = refused(place, f"{own} --val_dataset silent.jsonl", dataset="silent.jsonl")
    assert "--val_dataset: no row has an answer" in printed
    printed = place.megatron(line(f"{own} --val_dataset some.jsonl", dataset="silent.jsonl"))
    assert "eval_loss" in printed
    assert "no answer" not in printed
