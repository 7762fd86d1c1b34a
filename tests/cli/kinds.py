"""Options and checks of a command line for one task type."""

from pathlib import Path

import pytest
from megaswift.cli.checks.common import check_training
from megaswift.cli.commands import PREFERENCES, TASKS
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.options import SftOptions
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.conftest import DENSE

HEADED = DENSE | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
CHOICE = {**dict.fromkeys(PREFERENCES, "rlhf_type"), **dict.fromkeys(TASKS, "task_type")}
LORA = "--tuner_type lora"


def line(kind: str, words: str = "") -> list[str]:
    """Return a command line for a task type, or for `pt`."""
    if kind == "pt":
        return ["pt", *words.split()]
    return [{"rlhf_type": "rlhf", "task_type": "sft"}[CHOICE[kind]], f"--{CHOICE[kind]}", kind, *words.split()]


def check(kind: str, model: Path, words: str = "", *, world: int = 1) -> tuple[SftOptions, list[str]]:
    if kind == "seq_cls" and "--num_labels" not in words:
        words += " --num_labels 3"
    options, sources, _ = read_options(
        "megatron", [*line(kind, words), "--model", str(model), "--dataset", "d", "--train_iters", "1"]
    )
    layout = ProcessLayout.of(options.build, world)
    return options, check_training(options, layout, gpus=0, processes=world, sources=sources)


def refusal(kind: str, model: Path, words: str = "", *, world: int = 1) -> str:
    with pytest.raises(UsageError) as error:
        check(kind, model, words, world=world)
    return str(error.value)
