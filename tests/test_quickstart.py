"""The first command that a newcomer runs."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "quickstart"


def test_data_is_what_its_script_makes_and_holds_the_test_questions_out(tmp_path):
    script = (FOLDER / "make_data.py").read_text()
    (tmp_path / "make_data.py").write_text(script)
    runpy.run_path(str(tmp_path / "make_data.py"), run_name="__main__")
    sums = {}
    for name in ("train", "test"):
        text = (FOLDER / f"{name}.jsonl").read_text()
        assert (tmp_path / f"{name}.jsonl").read_text() == text
        rows = [json.loads(line) for line in text.splitlines()]
        pairs = [tuple(map(int, re.findall(r"\d+", row["query"]))) for row in rows]
        assert [row["response"] for row in rows] == [str(a + b) for a, b in pairs]
        sums[name] = {frozenset(pair) for pair in pairs}
    assert len(sums["test"]) == 200
    assert not sums["train"] & sums["test"]


@pytest.mark.proof
def test_quickstart_trains_a_model_that_answers(tmp_path):
    """From another folder, as any user may; the script itself fails unless 90% of the answers are right."""
    done = subprocess.run(
        [ROOT / "scripts" / "quickstart.sh"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    picture = re.search(r"The loss curve: +(\S+)", done.stdout)
    assert picture
    assert (ROOT / picture[1]).read_bytes().startswith(b"\x89PNG")
