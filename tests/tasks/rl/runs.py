"""Tiny models that end their completions now and then, prompts, rewards, and `megatron rlhf --rlhf_type grpo` run on
them as a user does."""

import json
import os
import re
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import prepared, tiny
from tests.tasks.preference import runs
from tests.tasks.preference.runs import BETAS, CLIP, EPSILON, Tensors

END = 2  # the tokenizer's end token, as the models' configs have it
LENGTH = 12  # tokens of a completion at most
# At which three steps go far enough for ratios to be clipped, and not so far that rounding is seen in what they log.
RATE = 3e-4
REWARDS = """
import json
import math
import time
from pathlib import Path

from megaswift.tasks.rewards import orms, reward


@reward("waves")
def waves(completion_ids, goal, **columns):
    return [math.sin(sum(ids) + number) for ids, number in zip(completion_ids, goal)]


@reward("short")
def short(completion_ids, goal, **columns):  # which has nothing to say of one prompt
    return [None if number == 3 else 1 - len(ids) / 12 for ids, number in zip(completion_ids, goal)]


@reward("constant")
def constant(completion_ids, **columns):
    return [0.5 for _ in completion_ids]


@reward("odd")
def odd(completion_ids, goal, **columns):  # every other prompt's completions are all alike
    return [0.25 if number % 2 else place / 10 for place, number in enumerate(goal)]


@reward("raises")
def raises(goal, **columns):
    return [1 / (number - 2) for number in goal]


@reward("hangs")
def hangs(goal, **columns):
    if 2 in goal:
        time.sleep(1000)
    return [0.0 for _ in goal]


@reward("nan")
def nan(goal, **columns):
    return [math.nan if number == 2 else 1.0 for number in goal]


class Witness:  # writes down what it is asked
    def __init__(self, args):
        self.file = Path(args.output_dir) / "witness.jsonl"

    def __call__(self, completions, completion_ids, goal, messages, **columns):
        values = [len(text) + number / 8 for text, number in zip(completions, goal)]
        with self.file.open("a") as file:
            file.write(json.dumps({"goal": goal, "texts": completions, "messages": messages, "values": values}) + "\\n")
        return values


orms["witness"] = Witness
"""
# What a step needs: three of them on what was generated once, by six prompts' four completions.
COMMON = (
    f"--lr {RATE} --lr_decay_style constant --weight_decay 0 --adam_beta1 {BETAS[0]} --adam_beta2 {BETAS[1]} "
    f"--adam_eps {EPSILON} --clip_grad {CLIP} --dataset_shuffle false --train_dataloader_shuffle false "
    "--dataset train.jsonl --external_plugins rewards.py --use_vllm false --num_generations 4 --global_batch_size 8 "
    f"--steps_per_generation 3 --max_completion_length {LENGTH} --logging_steps 1 --train_iters 3 --no_save_optim true "
    "--no_save_rng true --log_completions true"
)

BASE = "--ref_model other --log_entropy true"  # what many tests look at
MOE, MOE_RATE = "--model qwen3_moe --lr 5e-5", 5e-5
LORA = "--adapters adapter --tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 --merge_lora false"


def prompts(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of one turn or several; `goal`: the row's number, which rewards read."""
    rows = [{"messages": row["prompt"], "goal": number} for number, row in enumerate(runs.pairs(0, first + count))]
    return rows[first:]


class Trained(runs.Trained):
    @property
    def steps(self) -> list[dict[str, float]]:
        return [row for row in self.log if "loss" in row and "eval_reward" not in row]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return [row for row in self.log if "eval_reward" in row]

    @cached_property
    def completions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "completions.jsonl").open(encoding="utf-8")]

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.steps[-1]['step']}"


class Place:
    """A folder with models, data and caches. What has been run once is remembered."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._runs: dict[tuple, Trained] = {}
        (folder / "rewards.py").write_text(REWARDS)
        runs.write(folder / "train.jsonl", prompts(6))
        runs.write(folder / "val.jsonl", prompts(5, first=6))
        for name, family, seed in (("qwen3", "qwen3", 0), ("other", "qwen3", 1), ("qwen3_moe", "qwen3_moe", 0)):
            self.model(name, family, seed)

    def model(
        self, name: str, family: str = "qwen3", seed: int = 0, *, ends: bool | None = None, **changes: Any
    ) -> Path:
        """A tiny model that draws its end token now and then; `ends`: at once, or never."""
        folder = runs.Place.tokenized(tiny.save(self.folder / name, family, seed, **changes))
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"][END] *= 4
        if ends is not None:  # every hidden state has much of one number, which the end token's logit is made of
            weights["model.embed_tokens.weight"][:, 0] = 40.0
            weights["model.norm.weight"][0] = 1.0
            weights["lm_head.weight"][END, 0] = 9.0 if ends else -9.0
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def adapter(self) -> Path:
        """One that changes the model qwen3: its B is not zero."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        folder = self.folder / "adapter"
        if folder.exists():
            return folder
        base = AutoModelForCausalLM.from_pretrained(self.folder / "qwen3", dtype=torch.float32)
        config = LoraConfig(r=5, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
        model, generator = get_peft_model(base, config), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        model.save_pretrained(str(folder))
        return folder

    def start(self, name: str = "qwen3") -> Tensors:
        return load_file(self.folder / name / "model.safetensors")

    def megatron(self, flags: str, processes: int | None = None, *, code: int = 0, script: str = "") -> str:
        """What `megatron rlhf --rlhf_type grpo` printed; it ends with `code`. `script`: what is run in its place."""
        program = ["-m", "megaswift.cli.main", "megatron"]
        if script:
            file = self.folder / f"script-{len(self._runs)}.py"
            file.write_text(script)
            program = [str(file)]
        kind = [] if "--rlhf_type" in flags else ["--rlhf_type", "grpo"]
        words = [*program, "rlhf", *kind, *shlex.split(flags)]
        environment = os.environ | {"HF_HOME": str(self.folder / "cache"), "COLUMNS": "200"}
        done = prepared.run(words, processes=processes, cwd=self.folder, environment=environment)
        printed = done.stdout + done.stderr
        assert done.returncode == code, printed[-6000:]
        return printed

    def line(self, flags: str, output: str) -> str:
        """The command line of three steps with these flags, which come last."""
        given = flags.split()
        common = COMMON.replace("--train_iters 3", "") if "--num_train_epochs" in given else COMMON
        for name in ("dataset", "external_plugins"):  # lists, which are given once
            common = re.sub(rf"--{name} \S+", "", common) if f"--{name}" in given else common
        more = "" if "--model" in given else "--model qwen3"
        more += "" if "--micro_batch_size" in given else " --micro_batch_size 2"
        more += "" if "--reward_funcs" in given else " --reward_funcs waves short --reward_weights 1 0.5"
        return f"{common} {more} {flags} --output_dir {output} --add_version false"

    def run(self, flags: str = "", processes: int | None = None, *, script: str = "") -> Trained:
        """Three steps of eight completions."""
        key = flags, processes, script
        if key not in self._runs:
            output = f"run-{len(self._runs)}"
            printed = self.megatron(self.line(flags, output), processes, script=script)
            self._runs[key] = Trained(self.folder / output, printed)
        return self._runs[key]


DIFFERENCE = "sampling/sampling_logp_difference"  # of log-probabilities, between engine and trainer
LOSS_NAMES = (
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "cispo_clip_ratio",
    "reward",
    "reward_std",
    "learning_rate",
    "tokens",
)


def of_training(row: dict[str, float]) -> dict[str, float]:
    """What a step has computed, not what it took, nor how far engine and trainer are apart."""
    return {
        name: value
        for name, value in row.items()
        if name in LOSS_NAMES or ("/" in name and not name.startswith(("timing_s/", "weight_sync/", f"{DIFFERENCE}/")))
    }


def assert_same_steps(found: Trained, wanted: Trained) -> None:
    """What two layouts log of the same training, and what they have generated."""
    same = "completion_ids", "rewards", "finish_reason", "messages"
    for one, other in zip(found.completions, wanted.completions, strict=True):
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert abs(one["advantage"] - other["advantage"]) < 1e-5
    assert len(found.steps) == len(wanted.steps)
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert len(of_training(other)) > 3
        runs.assert_close(of_training(one), of_training(other))


def assert_moved(found: Tensors, start: Tensors) -> None:
    """Else equal weights would say nothing."""
    assert all(torch.norm(found[name] - tensor) > 0 for name, tensor in start.items())
