"""scripts/check_megatron_env.py: installed packages, missing packages, and fixes."""

import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_megatron_env.py"


@pytest.mark.slow
def test_this_environment_is_good() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"ok torch               {importlib.metadata.version('torch')}" in done.stdout
    assert "All required parts are installed." in done.stdout


def test_doctor_reports_the_same(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaswift.cli import doctor
    from megaswift.cli.main import main

    monkeypatch.setattr(doctor, "_gpus", lambda: None)  # which imports torch
    for program in ("megatron", "swift"):
        assert main(program, ["doctor"]) == 0
        assert f"ok torch               {importlib.metadata.version('torch')}" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "REQUIRED", ["no-such-package"])
    assert main("megatron", ["doctor"]) == 1


def test_what_is_missing_is_said_with_its_cure(tmp_path: Path) -> None:
    """A Python with nothing installed, and another path to look for packages in: one package that is too old."""
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0\n")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys, runpy; sys.path.append({str(tmp_path)!r});"
         f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "  -- torch               1.0 (needs >=2.11)" in lines
    assert "  -- megatron-core       not installed (needs >=0.19,<0.20)" in lines
    assert "     for: --report_to wandb" in lines
    flash_linear = lines.index("  -- flash-linear-attention not installed (needs >=0.6)")
    assert "gated delta nets" in lines[flash_linear + 1]
    assert lines[flash_linear + 2].endswith(" flash-linear-attention")
    engine = lines[lines.index("  -- transformer-engine  not installed (needs >=2.20)") + 2]
    for part in ("CUDNN_PATH=", "/nvidia/nccl/include", "--no-build-isolation 'transformer-engine[core_cu13,pytorch]'"):
        assert part in engine
    assert lines[-1] == "14 required parts are missing."


@pytest.mark.parametrize(
    ("version", "bounds", "good"),
    [
        ("2.11.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.20", ">=0.19,<0.20", False),
        ("0.20.0", ">=0.19,<0.20", False),
        ("0.19.2", ">=0.19,<0.20", True),
        ("3.13.0rc1", ">=3.12,<3.13", False),
        ("1", "", True),
    ],
)
def test_bounds(version: str, bounds: str, good: bool) -> None:
    assert runpy.run_path(str(SCRIPT))["fits"](version, bounds) is good
