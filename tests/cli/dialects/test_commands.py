"""`megatron convert` and `megatron run --dry_run true`, as whole commands on tiny models."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megaswift.cli.dialects.run_words import MODULES
from megaswift.cli.main import main

from tests.cli.conftest import DENSE, write_model, write_tokenizer
from tests.cli.dialects.known_configs import OWN, words_of

TINY = {path: name for path, name in OWN.items() if "-tiny." in path.name}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the tiny configs read, as the working folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_tokenizer(write_model(tmp_path / "model", DENSE))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "data_source": "openai/gsm8k",
            "reward_model": {"ground_truth": str(n + 1)}, "question": f"What is {n} + 1?", "answer": f"#### {n + 1}",
            "ground_truth": str(n + 1), "tag": "math_rule",
        }
        for n in range(64)
    ]  # fmt: skip
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("NPROC_PER_NODE", "NNODES"):  # `megatron run` sets them, so that they are to be restored
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main("megatron", list(words))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return a dry run's output without the sources of options and the command's own words."""
    text = output(capsys, *words, "--dry_run", "true")
    for name in ("NPROC_PER_NODE", "NNODES"):
        os.environ.pop(name, None)
    lines = [re.sub(r"   \(.*\)$", "", line) for line in text.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("  command "))


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.name)
def test_a_converted_config_is_the_config(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(path, TINY[path])
    (folder / "ours.yaml").write_text(output(capsys, "convert", *words))
    command = re.search(r"megatron (\w+) THIS_FILE", (folder / "ours.yaml").read_text())
    assert command
    converted, options = dry_run(capsys, command[1], "ours.yaml"), dry_run(capsys, "run", *words)
    assert converted == options
    assert "Dry run: nothing was trained." in converted


def test_flags_on_the_line_win(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(*next(item for item in TINY.items() if item[1] == "verl"))
    printed = output(
        capsys, "run", *words, "actor_rollout_ref.actor.optim.lr=2e-6", "--lr", "3e-6", "--dry_run", "true"
    )
    assert re.search(r"  lr +3e-06   \(command line\)", printed)


def test_convert_is_quick_and_imports_no_torch(folder: Path) -> None:
    (module,) = (module for module, name in MODULES.items() if name == "siirl")
    script = (
        "import sys, time; start = time.perf_counter()\n"
        "from megaswift.cli.main import main\n"
        "code = main('megatron', sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules, time.perf_counter() - start, file=sys.stderr)"
    )
    words = words_of(*next(item for item in TINY.items() if item[1] == "siirl"))
    assert words[0] == module
    start_time = time.perf_counter()
    process = subprocess.run([sys.executable, "-c", script, "convert", *words], capture_output=True, text=True)
    assert time.perf_counter() - start_time < 30
    code, has_torch, _ = process.stderr.split()
    assert (code, has_torch) == ("0", "False"), process.stderr
    assert process.stdout.startswith("# siiRL config command line, translated: megatron rlhf THIS_FILE\n")
