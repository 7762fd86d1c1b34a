"""Tiny models, pairs of answers, and `megatron rlhf` run on them as a user does."""

import json
import math
import os
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import prepared, tiny

# Without a newline behind the end of a turn: what TRL takes for an answer's tokens ends there, as with us.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A rate at which three steps change the weights by more than the bounds, and the optimizer that TRL is given too:
# no decay, since TRL would decay other weights.
RATE, BETAS, EPSILON, CLIP = 1e-3, (0.9, 0.95), 1e-6, 1.0
OPTIMIZER = (
    f"--lr {RATE} --lr_decay_style constant --weight_decay 0 --adam_beta1 {BETAS[0]} --adam_beta2 {BETAS[1]} "
    f"--adam_eps {EPSILON} --clip_grad {CLIP}"
)
IN_ORDER = "--dataset_shuffle false --train_dataloader_shuffle false --dataloader_num_workers 0"
COMMON = f"{OPTIMIZER} {IN_ORDER} --global_batch_size 4 --train_iters 3 --logging_steps 1 --no_save_optim true"

# The same twelve samples in every step, whether they are in two packs or none.
WHOLE = "--global_batch_size 12"
PACKED = "--packing true --max_length {} --global_batch_size 2 --micro_batch_size 1"
OF_A_PACK = {"dpo": 800, "kto": 500, "rm": 800, "orpo": 800, "simpo": 800, "cpo": 800}  # tokens
# At its end a run is evaluated on five pairs: a whole batch, and one that is not.
EVALUATED = {
    "dpo": "--val_dataset val.jsonl --eval_steps 3",
    "kto": "--val_dataset kto-val.jsonl --eval_steps 3 --desirable_weight 1.3 --undesirable_weight 0.6",
    "rm": "--val_dataset val.jsonl --eval_steps 3 --center_rewards_coefficient 0.05",
    **dict.fromkeys(("orpo", "simpo", "cpo"), "--val_dataset val.jsonl --eval_steps 3"),
}

# The command line, in a process that a fault is planted into.
PLANTED = """
import sys
from functools import partial
from types import SimpleNamespace
from megaswift.cli.main import main
from megaswift.tasks.preference import preference
from megaswift.tasks.reference import reference_model
from megaswift.tasks.train import objective
{fault}
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""

Tensors = dict[str, torch.Tensor]


def pairs(first: int, count: int) -> list[dict[str, Any]]:
    """Rows of TRL's: a prompt of one turn or several, two answers, whose lengths differ, and by how much one wins."""
    words = ["red", "green", "blue", "seven", "eleven", "stone", "river", "of", "the", "and", "not", "42", "again"]
    rows = []
    for number in range(first, first + count):
        text = [words[(number * 5 + place * place) % len(words)] for place in range(40)]
        prompt = [{"role": "user", "content": " ".join(text[: 1 + number % 5])}]
        if number % 4 == 1:
            earlier = {"role": "user", "content": text[7]}, {"role": "assistant", "content": " ".join(text[8:11])}
            prompt = [*earlier, *prompt]
        if number % 6 == 2:
            prompt = [{"role": "system", "content": "Be brief."}, *prompt]
        chosen, rejected = " ".join(text[12 : 14 + number % 4]), " ".join(text[20 : 21 + number * 3 % 7])
        rows.append(
            {
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
                "margin": number % 3 / 2,
            }
        )
    return rows


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL's rows for KTO: one answer of each pair, of both kinds."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen"] if good else row["rejected"], "label": good}
        for row, good in zip(rows, [True, False, True, True, False, False] * len(rows), strict=False)
    ]


def messages(row: dict[str, Any]) -> dict[str, Any]:
    """A row of TRL's as `messages` and what belongs to them."""
    answer = row["chosen"] if "chosen" in row else row["completion"]
    made: dict[str, Any] = {"messages": row["prompt"] + answer}
    if "rejected" in row:
        made["rejected_response"] = row["rejected"][0]["content"]
    return made | {name: row[name] for name in ("margin", "label") if name in row}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Trained:
    """What a run has left behind."""

    def __init__(self, folder: Path, printed: str):
        self.folder, self.printed = folder, printed
        self.log = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, float]]:
        return [row for row in self.log if "loss" in row]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return [row for row in self.log if "eval_loss" in row]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint-3"

    @cached_property
    def weights(self) -> Tensors:
        return {
            name: tensor for file in self.checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()
        }

    @cached_property
    def adapter(self) -> Tensors:
        return load_file(self.checkpoint / "adapter_model.safetensors")


class Place:
    """A folder with models, data and caches. What has been run once is remembered."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._runs: dict[tuple, Trained] = {}
        self.train, self.val = pairs(0, 12), pairs(12, 5)
        write(folder / "trl.jsonl", self.train)
        write(folder / "pairs.jsonl", [messages(row) for row in self.train])
        write(folder / "val.jsonl", [messages(row) for row in self.val])
        write(folder / "kto.jsonl", [messages(row) for row in judged(self.train)])
        write(folder / "kto-val.jsonl", [messages(row) for row in judged(self.val)])
        for name, family, seed in (("qwen3", "qwen3", 0), ("other", "qwen3", 1), ("qwen3_moe", "qwen3_moe", 0)):
            self.tokenized(tiny.save(folder / name, family, seed))
        self.tokenized(save_reward_model(folder / "reward"))

    @staticmethod
    def tokenized(folder: Path) -> Path:
        from transformers import AutoTokenizer

        tiny.save_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        return folder

    def megatron(self, line: str, processes: int | None = None, *, fails: bool = False) -> str:
        """Run `megatron rlhf {line}`; what it printed."""
        return self._start(["-m", "megaswift.cli.main", "megatron", "rlhf", *shlex.split(line)], processes, fails)

    def _planted(self, fault: str, line: str, processes: int | None) -> str:
        script = self.folder / f"planted-{len(self._runs)}.py"
        script.write_text(PLANTED.format(fault=fault))
        return self._start([str(script), "rlhf", *shlex.split(line)], processes)

    def swift(self, line: str) -> str:
        return self._start(["-m", "megaswift.cli.main", "swift", *shlex.split(line)])

    def _start(self, words: list[str], processes: int | None = None, fails: bool = False) -> str:
        environment = os.environ | {"HF_HOME": str(self.folder / "cache"), "COLUMNS": "200"}
        done = prepared.run(words, processes=processes, cwd=self.folder, environment=environment)
        printed = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, printed[-6000:]
        return printed

    def run(self, kind: str, flags: str = "", processes: int | None = None, *, fault: str = "") -> Trained:
        """Three steps of four samples, on `kind`, a value of --rlhf_type, with these flags beside its own.

        `fault`: what Python does before, to see that a test finds it.
        """
        flags = flags.format(OF_A_PACK[kind])
        key = kind, flags, processes, fault
        if key not in self._runs:
            output = self.folder / f"run-{len(self._runs)}"
            given = flags.split()
            model = "" if "--model" in given else f"--model {'reward' if kind == 'rm' else 'qwen3'}"
            data = "" if "--dataset" in given else f"--dataset {'kto' if kind == 'kto' else 'pairs'}.jsonl"
            micro = "" if "--micro_batch_size" in given else "--micro_batch_size 2"
            line = f"--rlhf_type {kind} {model} {data} {micro} {COMMON} {EVALUATED[kind]} {flags} --add_version false"
            line = f"{line} --output_dir {output}"
            printed = self._planted(fault, line, processes) if fault else self.megatron(line, processes)
            self._runs[key] = Trained(output, printed)
        return self._runs[key]


def save_reward_model(folder: Path) -> Path:
    """A tiny model with a head of one label, all of it random."""
    from transformers import AutoModelForSequenceClassification

    config = tiny.config("qwen3", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    language_model = tiny.model("qwen3", seed=2).state_dict()
    head = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(3)) * 0.2
    model.load_state_dict({**language_model, "score.weight": head}, strict=False)
    model.save_pretrained(folder)
    return folder


def assert_close(found: dict[str, float], wanted: dict[str, float]) -> None:
    """Numbers of a log: the same up to what sums in another order do.

    Rewards are differences of log-probabilities of about 100, which fp32 rounds by up to 1e-5.
    """
    apart = {
        name: (found.get(name), value)
        for name, value in wanted.items()
        if not abs(found.get(name, math.inf) - value) <= 3e-5 * max(1.0, abs(value))
    }
    assert not apart, apart


def assert_same_steps(found: Trained, wanted: Trained) -> None:
    """What two layouts log of the same training."""
    assert len(found.steps) == len(wanted.steps) == 3
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert_close(one, {name: other[name] for name in other if _of_training(name)})
    for one, other in zip(found.evaluations, wanted.evaluations, strict=True):
        assert_close(one, {name: value for name, value in other.items() if name.startswith("eval_")})


def _of_training(name: str) -> bool:
    return "/" in name or name in ("loss", "nll_loss", "kl", "grad_norm", "learning_rate", "tokens")


def assert_same_weights(found: Tensors, wanted: Tensors, start: Tensors) -> None:
    """After training, within 1e-4; and within 2e-3 of what training has changed."""
    assert found.keys() == wanted.keys()
    apart = {name: float((found[name] - tensor).abs().max()) for name, tensor in wanted.items()}
    assert max(apart.values()) < 1e-4, apart
    share = {
        name: float((found[name] - tensor).norm() / (tensor - start[name]).norm()) for name, tensor in wanted.items()
    }
    assert max(share.values()) < 2e-3, share
