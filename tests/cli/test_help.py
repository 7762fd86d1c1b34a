"""--help: quick, in groups, each flag with its type and default."""

import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from megaswift.cli.flags import flags_of
from megaswift.cli.main import main
from megaswift.tasks.options import SftOptions

MEGATRON = str(Path(sys.executable).with_name("megatron"))


def seconds(*command: str) -> float:
    """Return the CPU time of the fastest of five runs, which excludes other load on the machine."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_is_quick() -> None:
    """Half a second where the asyncio of Python itself takes a tenth to import; torch alone would take 2."""
    assert seconds(MEGATRON, "--help") < 5 * max(0.1, seconds(sys.executable, "-c", "import asyncio"))


@pytest.mark.parametrize("words", [["--help"], ["sft", "--help"]])
def test_help_needs_neither_torch_nor_transformers(words: list[str]) -> None:
    program = (
        "import sys; from megaswift.cli.main import main; main('megatron', sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


def test_help_lists_commands(capsys) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main("megatron", words) == 0
        printed = capsys.readouterr().out
        assert [line.split()[0] for line in printed.partition("Commands:\n")[2].splitlines()] == [
            "pt",
            "sft",
            "rlhf",
            "export",
            "plan",
            "tune",
            "report",
            "run",
            "convert",
        ]


def test_help_shows_each_flag_with_type_and_default_in_its_group(capsys) -> None:
    assert main("megatron", ["sft", "--help"]) == 0
    printed = capsys.readouterr().out
    for flag in flags_of(SftOptions).values():
        assert printed.count(f"\n  --{flag.name} {flag.metavar}") == 1
        assert f"\n{flag.group}:\n" in printed
    lines = " ".join(printed.split())
    assert "--lr number Peak learning rate. Default: 1e-5; 1e-4 with LoRA." in lines
    assert "--min_lr number Learning rate at the end of the decay. [0.0]" in lines
    assert "--optimizer adam|sgd|muon|dist_muon Optimizer; adam is AdamW; muon: Muon on" in lines
    assert lines.index("Parallelism:") < lines.index("--context_parallel_size int") < lines.index("Activations: rec")


@pytest.mark.parametrize("command", ["sft", "rlhf", "pt"])
def test_help_begins_with_what_most_runs_set(command: str, capsys) -> None:
    assert main("megatron", [command, "--help"]) == 0
    options = capsys.readouterr().out.partition("Set by most runs:\n")[2]
    first = [line.split()[0] for line in options.partition("\n\n")[0].splitlines() if line.startswith("  --")]
    assert {"--model", "--dataset", "--output_dir", "--max_length", "--lr", "--dry_run"} <= set(first)
    assert 14 <= len(first) <= 18


@pytest.mark.parametrize("program", ["megatron", "swift"])
def test_version(program: str, capsys) -> None:
    assert main(program, ["--version"]) == 0
    said = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"{program} (megaswift {said})\n"


def test_a_line_is_checked_without_torch(dense: Path) -> None:
    program = (
        "import sys; from megaswift.cli.main import main; code = main('megatron', sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules); sys.exit(code)"
    )
    words = ["sft", "--model", str(dense), "--dataset", "d", "--train_iters", "1", "--expert_model_parallel_size", "2"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the model has no experts" in done.stderr
