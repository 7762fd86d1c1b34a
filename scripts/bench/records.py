"""Results of a call: what they say of the machine, and the results.json to which they are appended."""

# pyright: reportMissingImports=false

import compileall
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from megaswift.cli.launch import visible_gpus
from systems import versions

HERE = Path(__file__).parent
Run = dict[str, Any]


@cache
def device() -> str:
    """Return the name of the first GPU, or the machine type without one."""
    if not visible_gpus():
        return platform.machine()
    for query in (
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"],
    ):
        if shutil.which(query[0]):
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            if not answer.returncode:
                return answer.stdout.splitlines()[0].strip()
    return "a GPU of unknown name"


def now() -> str:
    """Return the name of a call: its time."""
    return datetime.now().strftime("%Y-%m-%d %H:%M")


def heading(call: str, system: str = "ours", site: Path | None = None) -> Run:
    """Return what each result has: time, command, device and versions. site: packages of the peer"""
    called = shlex.join(["python", *sys.argv])
    return {"call": call, "called": called, "device": device(), "versions": versions(system, site)}


def read(out: Path) -> list[Run]:
    """Return the results in `out`, the oldest first."""
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else []


def append(out: Path, run: Run) -> list[Run]:
    """Append a result to `out`/results.json, and return all of them."""
    runs = [*read(out), run]
    (out / "results.json").write_text(json.dumps(runs, indent=1) + "\n")
    return runs


def prepare(name: str, work: Path, timeout: float) -> None:
    """Make a row's checkpoint and text in a separate process, which frees the GPU's memory."""
    subprocess.run([sys.executable, str(HERE / "make.py"), name, str(work)], check=True, timeout=timeout)


def compile_packages(*folders: Path | str | None) -> None:
    """Compile packages that were unpacked, as pip does when it installs them."""
    for folder in filter(None, folders):
        for entry in str(folder).split(os.pathsep):
            compileall.compile_dir(entry, quiet=2, workers=0)
