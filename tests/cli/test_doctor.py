"""`megatron doctor`: packages and fixes, the host and its disks, GPUs. Also as scripts/check_megatron_env.py."""

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megaswift.cli import doctor
from megaswift.cli.main import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_megatron_env.py"


@pytest.mark.slow
def test_this_environment_is_good() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"ok torch               {importlib.metadata.version('torch')}" in done.stdout
    assert "All required parts are installed." in done.stdout


def test_doctor_reports_the_same(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: None)
    monkeypatch.setattr(doctor, "BLOCKS", 4)
    for program in ("megatron", "swift"):
        assert main(program, ["doctor"]) == 0
        assert f"ok torch               {importlib.metadata.version('torch')}" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "REQUIRED", ["no-such-package"])
    assert main("megatron", ["doctor"]) == 1


def test_words_after_doctor(capsys) -> None:
    assert main("megatron", ["doctor", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Report of a machine: packages")
    assert main("megatron", ["doctor", "--fix"]) == 2
    assert "doctor takes no flags" in capsys.readouterr().out


@pytest.mark.parametrize("extension", [None, "wheel_lib", ".."])
def test_transformer_engine_and_its_extension(extension, capsys, monkeypatch, tmp_path: Path) -> None:
    """pip's wheel has it in a folder of the package, a build from source beside it."""
    package = tmp_path / "transformer_engine"
    (package / "wheel_lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libcublas.so.13')")
    if extension:
        (package / extension / f"transformer_engine_torch{EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("transformer_engine", "transformer_engine_torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.20.2")
    assert doctor._report_package("transformer-engine", "", "pip install it") == (extension is None)
    assert ("without its PyTorch extension" in capsys.readouterr().out) == (extension is None)


def test_the_host(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "BLOCKS", 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "not" / "yet"))
    doctor._host()
    printed = capsys.readouterr().out
    assert f"ok {len(os.sched_getaffinity(0))} cores, " in printed
    disks = re.findall(r"ok disk of (\w+) \((.*)\): \d+ GiB free, writes ([\d.]+) GB/s, reads ([\d.]+) GB/s", printed)
    assert [disk[:2] for disk in disks] == [("runs", str(tmp_path)), ("cache", str(tmp_path))]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor, "MIN_SHARED_MEMORY", 2**60)
    doctor._host()
    assert "-- /dev/shm: " in capsys.readouterr().out


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert doctor._disk("runs", tmp_path).endswith("0.00 GiB free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    assert "cannot be written (" in doctor._disk("runs", Path("/proc"))


def test_a_disk_is_measured_by_all_that_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, *[0.0] * 8, 2.0, 2.0, 3.0])  # 2 seconds of writing, 1 of reading
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(doctor, "BLOCKS", 8)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        writes, reads = doctor._speeds(file.fileno())
    assert (tmp_path / "file").stat().st_size == 8 * 2**20
    assert (writes, reads) == (8 * 2**20 / 2e9, 8 * 2**20 / 1e9)


def test_links_between_gpus(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs and NCCL's all-reduce, both of which are stand-ins on the CPU."""

    def all_reduce(tensors) -> None:
        assert [tensor.device.type for tensor in tensors] == ["cpu", "cpu"]
        total = sum(tensors)
        for tensor in tensors:
            tensor.copy_(total)

    def fail(tensors) -> None:
        raise RuntimeError("unhandled system error")

    cuda = SimpleNamespace(
        device_count=lambda: 2, synchronize=lambda gpu: None, nccl=SimpleNamespace(all_reduce=all_reduce)
    )
    stand_in = SimpleNamespace(cuda=cuda, ones=lambda count, device: torch.ones(count // 2**10))
    doctor._report_bandwidth(stand_in)
    assert re.fullmatch(r"  ok NCCL between 2 GPUs: \d+ GB/s\n", capsys.readouterr().out)
    cuda.nccl.all_reduce = fail
    doctor._report_bandwidth(stand_in)
    assert capsys.readouterr().out == "  -- NCCL between 2 GPUs: unhandled system error\n"


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
