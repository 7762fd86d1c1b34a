"""The examples of docs/many-nodes.md: scripts that bash reads, files that YAML reads, and flags that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from megaswift.cli.main import read_options

from tests.cli.checks.checking import install

GUIDE = (Path(__file__).parents[2] / "docs" / "many-nodes.md").read_text()
SCRIPTS = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
FILES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]
(KUBERNETES,), (SKYPILOT,) = [[file for file in FILES if key in file] for key in ("kind", "run")]
(CONTAINER,) = KUBERNETES["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
PROGRAMS = [*SCRIPTS, SKYPILOT["run"], *CONTAINER["args"]]


@pytest.mark.parametrize("script", PROGRAMS)
def test_bash_reads_each_script(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def commands() -> list[list[str]]:
    """Return the lines of `megatron` and `swift` in the scripts, without their variables."""
    joined = "\n".join(PROGRAMS).replace("\\\n", " ")
    command_texts = re.findall(r"\b((?:megatron|swift) (?:sft|rlhf|rollout) [^'\n]*)", joined)
    return [shlex.split(line, comments=True) for line in command_texts]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_line_has_flags_that_exist(words: list[str], tmp_path: Path, monkeypatch) -> None:
    install(monkeypatch, vllm=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("model: m\ndataset: [d]\n")
    program, *rest = [word.replace("/shared/config.yaml", "config.yaml") for word in words]
    options, _, _ = read_options(program, rest)
    assert options.model


def test_the_pods_of_kubernetes_find_each_other() -> None:
    """Its names are JOBSET-REPLICATEDJOB-0-INDEX.JOBSET, and its numbers agree."""
    name, job = KUBERNETES["metadata"]["name"], KUBERNETES["spec"]["replicatedJobs"][0]
    variables = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
    assert variables["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    spec = job["template"]["spec"]
    assert int(variables["NNODES"]) == spec["completions"] == spec["parallelism"]
    assert int(variables["NPROC_PER_NODE"]) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
