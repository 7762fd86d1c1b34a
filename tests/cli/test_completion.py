"""Completion of command lines by a shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "from megaswift.cli.main import {0}; import sys; {0}(); assert False"


def answer(line: str, program: str = "megatron", **variables: str) -> list[str]:
    """Return what bash is offered at the end of a line."""
    words = line.split(" ")
    variables |= {
        f"_{program.upper()}_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM.format(program)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megatron re", ["report"]),
        ("megatron do", ["doctor"]),
        ("megatron sft --tensor_model", ["--tensor_model_parallel_size"]),
        ("megatron sft --tuner_type lora_", ["lora_llm"]),
        ("megatron sft --packing ", ["true", "false"]),
        ("megatron sft --model M --critic_l", []),
        ("megatron rlhf --rlhf_type ppo --critic_l", ["--critic_lr"]),  # a flag of this type only
        ("megatron rlhf --rlhf_type gr", ["grpo"]),  # the type is not complete
        ("megatron run config.yaml", []),
    ],
)
def test_words_that_are_offered(line, words) -> None:
    assert answer(line) == words


def test_the_other_program() -> None:
    assert answer("swift ", "swift") == ["infer", "export", "rollout", "prepare", "doctor"]


def test_bash_asks_the_program(tmp_path: Path) -> None:
    """The script for bash, run by bash, completes a line with the program's answer."""
    program = tmp_path / "megatron"
    program.write_text(f"#!{sys.executable}\n{PROGRAM.format('megatron')}")
    program.chmod(0o755)
    # A shell as the parent, which typer looks for.
    show = subprocess.run(["bash", "-c", f"{program} --show-completion; :"], capture_output=True, text=True)
    assert "complete -o default -F _megatron_completion megatron" in show.stdout
    ask = f"COMP_WORDS=(megatron sft --lora_r); COMP_CWORD=2; _megatron_completion {program}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{show.stdout}\n{ask}"], capture_output=True, text=True)
    assert done.stdout.split() == ["--lora_rank"], done.stderr
