"""docs/first-run.md: what a newcomer's terminal shows, without a line of a library's."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from megaswift.cli.main import read_options

ROOT = Path(__file__).parents[1]
RECORD = runpy.run_path(str(ROOT / "scripts" / "record.py"))
PAGE = (ROOT / "docs" / "first-run.md").read_text(encoding="utf-8")
NOISE = re.compile(
    r"warn|deprecat|^\[|^[WIE]\d{4} |\bINFO\b|\.py:\d|site-packages|Traceback|/tmp/", re.IGNORECASE | re.MULTILINE
)


def commands(page: str) -> list[list[str]]:
    blocks = RECORD["BLOCK"].findall(page)
    return [shlex.split(command.replace("\\\n", " ")) for block in blocks for command, _ in RECORD["_commands"](block)]


def test_the_page_has_commands_that_are_taken_and_no_noise() -> None:
    found = commands(PAGE)
    assert [words[0] for words in found] == ["python", "head", "megatron", "megatron", "ls", "swift", "swift"]
    for program, *words in (found[3], *found[5:]):
        read_options(program, words)
    for block in RECORD["BLOCK"].findall(PAGE):
        assert not NOISE.search(block)
    assert "error: --datasets: no such flag. The nearest is --dataset." in PAGE


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        ("a\r\nb\r\n", "a\nb\n"),
        ("loading  10%\rloading 100%\r\ndone\r\n", "loading 100%\ndone\n"),
        ("a long line\rshort\r\n", "shortg line\n"),
        ("bar ###\r       \r\x1b[32mSaved\x1b[0m it\r\n\r\n", "Saved it\n"),
    ],
)
def test_overwritten_text_is_left_out(shown: str, left: str) -> None:
    assert RECORD["rendered"](shown) == left


@pytest.mark.slow
@pytest.mark.long
def test_a_terminal_shows_no_noise(tmp_path: Path) -> None:
    """The page's commands, with fewer steps."""
    page = PAGE.replace("--train_iters 600", "--train_iters 2").replace("checkpoint-600", "checkpoint-2")
    recorded = RECORD["record"](page)
    assert commands(recorded) == commands(page)
    sessions = RECORD["BLOCK"].findall(recorded)
    assert not [line for block in sessions for line in block.splitlines() if NOISE.search(line)]
    assert "\nSaved checkpoint-2 " in recorded
    assert "of 200 (" in recorded
    assert len(re.findall(r"^<<< What is [^\n]*\n[^<]*\n<<<", recorded, re.MULTILINE)) == 2
