"""The commands of ms-swift's examples and docs: what each does here, as golden lines beside this file.

`UPDATE_GOLDEN=1` rewrites the lines. The test prints the number of each outcome.
"""

import importlib.util
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

import pytest
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.cli import main
from megaswift.cli.checks.common import check_training
from megaswift.cli.checks.export import check_export, check_export_layout
from megaswift.cli.checks.vision import has_tower
from megaswift.cli.flags import OptionValue, UsageError, flags_of
from megaswift.tasks import options as option_sets
from megaswift.tasks.run.planning import ProcessLayout, build_options

from tests.cli import ms_swift_stand_ins as stand_ins

HERE = Path(__file__).parent
GOLDEN = HERE / "ms_swift_commands.golden"
ROWS = [json.loads(line) for line in (HERE / "ms_swift_commands.jsonl").read_text().splitlines()]
PRETENDED = ("vllm", "wandb", "swanlab", "modelscope")  # packages
IMAGES = ("LaTeX_OCR", "MAmmoTH-VL", "clevr_cogen", "RLAIF-V", "speech_asr", "TextCaps", "VideoChatGPT", "garbage265")
UNREAD = ("TextCaps", "garbage265", "MAmmoTH-VL")  # columns of these datasets are not known
ARCHIVED = "VideoChatGPT"  # its rows name videos that are in an archive
FEWEST_EXPECTED = 120  # of 146
LACKING = re.compile(r"multimodal|vision tower|does not support\. It supports|Ray|images|videos")
# Flags of a command that the docs abbreviate.
REST = {
    "--model": "Qwen/Qwen3-8B",
    "--dataset": "AI-ModelScope/alpaca-gpt4-data-zh",
    "--train_iters": "10",
}
REST_OF_GRPO = {
    "--rlhf_type": "grpo",
    "--reward_funcs": "accuracy",
    "--tuner_type": "lora",
    "--dataset": "open-r1/DAPO-Math-17k-Processed",
}


class Outcome(NamedTuple):
    """What a command does: runs, runs with notes, or is refused."""

    kind: str
    reason: str

    @property
    def is_expected(self) -> bool:
        """Return whether the command runs, or is refused only for images, Ray or a missing family."""
        return self.kind != "refused" or bool(LACKING.search(self.reason))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that packages are installed. Return an empty current folder."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: ModuleSpec(name, None) if name in PRETENDED else find(name, *more),
    )
    monkeypatch.setattr(main, "build_app", values_without_typer)  # typer takes half of the time
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values_without_typer(program: str, name: str, selected: main.Command) -> Callable[..., dict[str, OptionValue]]:
    """Return a stand-in for a command's typer app: from --flag=value words to raw values."""
    flags = flags_of(getattr(option_sets, selected.options))

    def values(words: list[str], **settings: object) -> dict[str, OptionValue]:
        table: dict[str, OptionValue] = {}
        for word in words[1:]:
            flag, _, value = word.removeprefix("--").partition("=")
            table[flag] = [*table.get(flag, []), value] if flags[flag].is_list else value  # type: ignore[misc]
        return table

    return values


def local_words(row: dict, root: Path, models: Path) -> list[str]:
    """Return the words of a command, with stand-ins for its models in `models` and other files in `root`."""
    words = shlex.split(row["command"])
    if row.get("elided"):
        rest = REST | (REST_OF_GRPO if words[1] == "rlhf" else {})
        words += [word for flag, value in rest.items() if flag not in words for word in (flag, value)]
    for place, (flag, name) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if flag in stand_ins.MODEL_FLAGS:
            words[place + 1] = str(stand_ins.write_model_of(models, name))
        elif flag in ("--mcore_model", "--adapters", "--mcore_adapter"):
            stand_ins.write_checkpoint(root, flag, name)
        elif flag.endswith("sft.yaml"):
            model = "Qwen/Qwen2.5-7B-Instruct"
            file = root / flag
            file.write_text(file.read_text().replace(model, str(stand_ins.write_model_of(models, model))))
    return ["8" if word == "x" else word for word in words]


def outcome(row: dict, root: Path, models: Path) -> Outcome:
    words = local_words(row, root, models)
    dataset = next((word for word in words if any(name in word for name in IMAGES)), "")
    try:
        notes = check(words, row["processes"], row.get("nodes", 1))
    except UsageError as error:
        return Outcome("refused", clean(str(error), root))
    if dataset and not sees(words):
        return Outcome("refused", f"--dataset {dataset}: images")
    if archived := next((word for word in words if ARCHIVED in word), ""):
        return Outcome("refused", f"--dataset {archived}: videos in an archive")
    flags = {name for note in notes for name in re.findall(r"^--\w+", note)}
    return Outcome("runs with notes", " ".join(sorted(flags))) if notes else Outcome("runs", "")


def sees(words: list[str]) -> bool:
    """Return whether a command trains on images: of data whose rows are read, with a vision tower that has a family."""
    config = Path(words[words.index("--model") + 1]) / "config.json"
    generates = any(kind in words for kind in ("grpo", "gkd", "ppo"))
    is_read = not any(name in word for word in words for name in UNREAD)
    return is_read and not generates and has_tower(read_config(config.parent))


def check(words: list[str], per_node: int, nodes: int) -> list[str]:
    """Parse and check a command line as on a machine with GPUs. Return the notes. Raises UsageError."""
    program, command, *_ = words
    options, sources, notes = main.read_options(program, words[1:])
    world = per_node * nodes
    if command == "export":
        config, more = check_export(options)
        if program == "megatron":
            layout = ProcessLayout.of(build_options(options), world)
            check_export_layout(options, layout, config, per_node, per_node)
        return notes + more
    layout = ProcessLayout.of(options.build, world)
    return notes + check_training(options, layout, per_node, per_node, sources)


def clean(message: str, root: Path) -> str:
    """Return the first sentences of a message, without paths of this machine."""
    return message.replace(f"{root.parent}/", "").split("It supports")[0][:160].strip()


def lines_of(outcomes: list[Outcome]) -> list[str]:
    return [
        f"{number:3} {row['file']} | {result.kind}" + f": {result.reason}" * bool(result.reason)
        for number, (row, result) in enumerate(zip(ROWS, outcomes, strict=True), 1)
    ]


def test_commands_of_ms_swift(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outcome of each command is its golden line, and enough of them run."""
    outcomes = []
    for number, row in enumerate(ROWS):
        root = machine / str(number)
        root.mkdir()
        os.chdir(root)
        stand_ins.write_files(root)
        outcomes.append(outcome(row, root, machine))
    lines = lines_of(outcomes)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines) + "\n")
    counts = Counter(result.kind for result in outcomes)
    expected = sum(result.is_expected for result in outcomes)
    with capsys.disabled():
        print(f"\n{expected} of {len(ROWS)} run or are refused for images, Ray or a family; {dict(counts)}")
    assert not [line for line in lines if "no such flag" in line]
    assert expected >= FEWEST_EXPECTED
    assert lines == GOLDEN.read_text().splitlines(), "run this test with UPDATE_GOLDEN=1, and read what changes"
