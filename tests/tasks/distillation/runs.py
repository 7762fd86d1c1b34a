"""Tiny students and teachers, and `megatron rlhf --rlhf_type gkd` run on them as a user does."""

import shlex
from pathlib import Path

from tests import tiny
from tests.tasks.preference.runs import COMMON, Place, Trained, assert_close, messages, pairs, write

# Teachers of other sizes than the student; "wide" has more rows of the output matrix too, which TRL does not take.
TEACHER = {"hidden_size": 40, "num_hidden_layers": 8}
SAME = (
    "loss",
    "jsd",
    "nll_loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "gkd/on_policy_fraction",
    "completions/mean_length",
)
OFF_POLICY = "--lmbda 0"
ON_POLICY = "--lmbda 1 --max_completion_length 8"
PACKED = "--packing true --packing_length 256 --micro_batch_size 1"


class Distilled(Place):
    """A folder with students, teachers and data. What has been run once is remembered."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._runs: dict[tuple, Trained] = {}
        self.train = [{"messages": messages(row)["messages"]} for row in pairs(0, 12)]
        write(folder / "train.jsonl", self.train)
        write(folder / "val.jsonl", [{"messages": messages(row)["messages"]} for row in pairs(12, 5)])
        self.tokenized(tiny.save(folder / "qwen3", "qwen3"))
        self.tokenized(tiny.save(folder / "qwen3_moe", "qwen3_moe"))
        self.tokenized(tiny.save(folder / "teacher", "qwen3", 1, **TEACHER))
        self.tokenized(tiny.save(folder / "wide", "qwen3", 2, **TEACHER, vocab_size=tiny.VOCAB + 21))
        self.tokenized(tiny.save(folder / "teacher_moe", "qwen3_moe", 1))

    def run(self, flags: str = "", processes: int | None = None) -> Trained:  # type: ignore[override]
        """Three steps of four samples, evaluated at the end."""
        key = flags, processes
        if key not in self._runs:
            output = self.folder / f"run-{len(self._runs)}"
            self._runs[key] = Trained(output, self.megatron(self.line(flags, output), processes))
        return self._runs[key]

    def line(self, flags: str, output: Path) -> str:
        """What such a run is told."""
        defaults = {
            "--model": "qwen3", "--teacher_model": "wide", "--dataset": "train.jsonl", "--micro_batch_size": "2",
            "--use_vllm": "false", "--val_dataset": "val.jsonl", "--eval_steps": "3",
        }  # fmt: skip
        given = shlex.split(flags)
        more = " ".join(f"{name} {value}" for name, value in defaults.items() if name not in given)
        return f"--rlhf_type gkd {more} {COMMON} {flags} --add_version false --output_dir {output}"


def assert_same_run(found: Trained, wanted: Trained) -> None:
    """What two layouts log of the same training."""
    assert len(found.steps) == len(wanted.steps) == 3
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert_close(one, {name: other[name] for name in SAME if name in other})
        assert "jsd" in one
    for one, other in zip(found.evaluations, wanted.evaluations, strict=True):
        assert_close(one, {name: value for name, value in other.items() if name.startswith("eval_")})
