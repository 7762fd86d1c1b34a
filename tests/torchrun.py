"""A module of the tests in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(
    module: str, *arguments: object, processes: int, timeout: int = 600, gpu: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `module` under torchrun, on the CPU or (`gpu`) where it likes, in seconds `timeout` at most."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", module, *map(str, arguments)]
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | hidden
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
