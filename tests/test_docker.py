"""Dockerfiles without a container tool: their steps are read, and those of the CPU image run in a fresh folder."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "docker" / name for name in ("Dockerfile", "Dockerfile.cpu")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(file: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each step of a Dockerfile."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    text = re.sub(r"\\\n", "", "\n".join(lines))
    return [(instruction, rest) for instruction, _, rest in (line.partition(" ") for line in text.splitlines())]


def arguments(file: Path, instruction: str) -> list[str]:
    return [rest for name, rest in steps(file) if name == instruction]


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def file(request) -> Path:
    return request.param


def test_instructions_are_known(file: Path) -> None:
    assert {name for name, _ in steps(file)} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ARG", "CMD"}
    assert arguments(file, "CMD") == ['["megatron", "doctor"]']


def test_commands_are_those_of_a_shell(file: Path) -> None:
    for command in arguments(file, "RUN"):
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_what_is_copied_is_in_the_build_context(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for words in arguments(file, "COPY"):
        for source in words.split()[:-1]:
            assert source == "." or list(ROOT.glob(source)), source
            assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source
    assert ".venv" in ignored


def test_packages_have_the_versions_of_constraints(file: Path) -> None:
    installs = [
        word for command in arguments(file, "RUN") for word in re.split(r"&&|\|\||;", command) if "pip inst" in word
    ]
    assert len(installs) >= 3
    for install in installs:
        assert (
            re.search(r"-c (constraints\.txt|\$CONSTRAINTS) ", install)
            or "--no-deps -e ." in install
            or install.endswith("no-cache-dir uv")
        ), install


def test_the_default_versions_of_the_gpu_image_are_those_of_the_tests() -> None:
    assert "CONSTRAINTS=constraints.txt" in arguments(FILES[0], "ARG")


def test_python_and_cuda_are_those_of_the_project(file: Path) -> None:
    (image,) = arguments(file, "FROM")
    assert PROJECT["requires-python"] == ">=3.12,<3.13"
    assert "python3.12 -m venv /opt/venv" in file.read_text()
    assert "." not in image.partition("/")[0].partition(":")[0]  # no registry's host
    if image.startswith("nvidia/cuda"):
        pinned = re.search(r"^torch==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        if torch.version.cuda and pinned and torch.__version__.startswith(pinned[1]):
            assert image.startswith(f"nvidia/cuda:{torch.version.cuda.partition('.')[0]}.")
        assert f"core_cu{image.partition(':')[2].partition('.')[0]}," in file.read_text()


def test_the_gpu_image_has_what_the_extra_has() -> None:
    commands = " ".join(arguments(FILES[0], "RUN"))
    for requirement in PROJECT["optional-dependencies"]["gpu"]:
        assert re.split(r"[\[>=]", requirement)[0] in commands


@pytest.mark.long
@pytest.mark.nosample
def test_the_steps_of_the_cpu_image_run(tmp_path: Path) -> None:
    """/opt and /workspace are in another folder, and the packages come from the machine's index."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{sys.base_prefix}/bin:{environment['PATH']}"  # the base image's Python
    folder = tmp_path

    def placed(text: str) -> str:
        return re.sub(r"/(opt|workspace)", rf"{tmp_path}/\1", text)

    for name, rest in steps(FILES[1]):
        if name == "WORKDIR":
            folder = Path(placed(rest))
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            for variable, value in (word.split("=", 1) for word in rest.split()):
                environment[variable] = placed(value).replace("$PATH", environment["PATH"])
        elif name == "COPY":
            *sources, target = rest.split()
            files = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True, check=True)
            for source in files.stdout.splitlines():
                destination = folder / target / source
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes((ROOT / source).read_bytes())
        elif name == "RUN":
            subprocess.run(["sh", "-ec", placed(rest)], cwd=folder, env=environment, check=True)
    done = subprocess.run(["megatron", "doctor"], cwd=folder, env=environment, capture_output=True, text=True)
    assert "All required parts are installed." in done.stdout, done.stdout
    shown = subprocess.run(["megatron", "sft", "--help"], env=environment, capture_output=True, text=True, check=True)
    assert "--tensor_model_parallel_size" in shown.stdout
    shutil.rmtree(tmp_path / "opt")  # a gigabyte
