"""Plugins' training callbacks: when their hooks are called, what they may ask for, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from megaswift.tasks.system.plugins import load_plugins
from megaswift.tasks.train.callback_registry import callbacks_map, check_callbacks, megatron_callbacks_map

from tests.tasks.rewards.conftest import own_registry  # noqa: F401  (a fixture)
from tests.tasks.supervised.test_sft import COMMON, log_of, losses, megatron, place, run_folder  # noqa: F401

PLUGIN = """
import json
import os
from pathlib import Path

from swift.callbacks import TrainerCallback, callbacks_map
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map

rank = os.environ.get("RANK", "0")


class Records(MegatronCallback):
    def write(self, hook, **values):
        with (Path(self.args.output_dir) / f"hooks-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"hook": hook, "step": self.state.iteration, **values}) + "\\n")

    def on_train_begin(self):
        self.write("train_begin", max_steps=self.state.max_steps, lr=self.args.lr)

    def on_train_end(self):
        self.write("train_end")

    def on_step_begin(self):
        self.write("step_begin")

    def on_step_end(self):
        self.write("step_end")

    def on_log(self, logs):
        self.write("log", logs=logs)

    def on_eval_begin(self):
        self.write("eval_begin")

    def on_eval_end(self):
        self.write("eval_end")

    def on_save(self, output_dir):
        exists = (Path(output_dir) / "config.json").is_file()
        self.write("save", name=Path(output_dir).name, exists=exists)


class Asks(TrainerCallback):  # of rank 1 alone, and rank 0 follows
    def on_step_end(self, args, state, control, **kwargs):
        assert kwargs["model"] is self.trainer.wrapped_models[0]
        if rank == "1":
            control.should_save = state.global_step == 2
        return control

    def on_save(self, args, state, control, **kwargs):
        assert state.last_model_checkpoint == kwargs["output_dir"]
        if state.global_step == 3:
            assert (state.best_metric, state.best_global_step) != (None, None)
            control.should_training_stop = True


class Fails(MegatronCallback):
    def on_log(self, logs):
        raise KeyError("x")


class Predicts(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        pass


megatron_callbacks_map["records"] = Records
megatron_callbacks_map["fails"] = Fails
callbacks_map.update(asks=Asks, predicts=Predicts)
"""
# Of transformers itself, whose import takes seconds.
PLAIN = """
from swift.callbacks import callbacks_map
from transformers import TrainerCallback


class Plain(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        assert metrics["eval_loss"] > 0


callbacks_map["plain"] = Plain
"""


@pytest.fixture
def own_callbacks() -> Iterator[None]:
    yield
    for registry in (callbacks_map, megatron_callbacks_map):
        registry.clear()


def test_names_and_hooks(tmp_path: Path, own_callbacks, own_registry) -> None:  # noqa: F811
    with pytest.raises(
        ValueError, match=r"--callbacks a: no such callback\. Register it in a file of --external_plugi"
    ):
        check_callbacks(["a"])
    (tmp_path / "plugin.py").write_text(PLUGIN)
    load_plugins([str(tmp_path / "plugin.py")])
    check_callbacks(["records", "asks", "print", "default_flow"])
    with pytest.raises(ValueError, match=r"--callbacks record: no such callback\. The nearest is records\."):
        check_callbacks(["record"])
    with pytest.raises(
        ValueError, match=r"--callbacks predicts: its on_optimizer_step\(\) would never be called, only"
    ):
        check_callbacks(["predicts"])


@pytest.mark.slow
def test_hooks_of_a_run(place: Path) -> None:  # noqa: F811
    """Rank 1 asks for a checkpoint, and both ranks stop after another one. The losses are those of a plain run."""
    (place / "plugin.py").write_text(PLUGIN)
    (place / "plain.py").write_text(PLAIN)
    flags = (
        f"sft --model qwen3 --dataset train.jsonl --val_dataset val.jsonl {COMMON} --train_iters 6 --save_steps 3 "
        "--eval_steps 3 --lr_decay_style constant"
    )
    printed = megatron(
        place,
        f"{flags} --external_plugins plugin.py plain.py --callbacks records asks plain --output_dir hooks",
        2,
    )
    assert "by a callback (--callbacks)" in printed
    folder = run_folder(place / "hooks")
    ranks = [
        [json.loads(line) for line in (folder / f"hooks-{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)
    ]
    steps = "step_begin step_end log"
    hooks = f"train_begin {steps} {steps} save step_begin step_end eval_begin log eval_end log save train_end".split()
    assert [[row["hook"] for row in rows] for rows in ranks] == [hooks] * 2
    rows = ranks[0]
    assert rows[0] == {"hook": "train_begin", "step": 0, "max_steps": 6, "lr": 1e-3}
    assert [(row["name"], row["exists"]) for row in rows if row["hook"] == "save"] == [
        ("checkpoint-2", True),
        ("checkpoint-3", True),
    ]
    logs = [row["logs"] for row in rows if row["hook"] == "log" and "loss" in row["logs"]]
    assert [(row["step"], row["loss"]) for row in logs] == list(enumerate(losses(folder), 1))
    assert log_of(folder)[-1]["stopped"] == "by a callback (--callbacks)"


@pytest.mark.slow
def test_one_that_raises(place: Path) -> None:  # noqa: F811
    (place / "plugin.py").write_text(PLUGIN)
    line = f"sft --model qwen3 --dataset train.jsonl {COMMON} --train_iters 2 --external_plugins plugin.py"
    printed = megatron(place, f"{line} --callbacks fails --output_dir fails", fails=True)
    assert "--callbacks fails: on_log raised KeyError: 'x' (plugin.py, line" in printed
