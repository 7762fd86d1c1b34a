"""A module of the tests in several processes."""

import os
import subprocess
import sys

from tests import prepared


def torchrun(
    module: str, *arguments: object, processes: int, timeout: int = 600, gpu: bool = False, imports: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `module` as the ranks of a job, on the CPU or (`gpu`) where it likes, in seconds `timeout` at most.

    On the CPU they are forked with their imports done, unless it is about these (`imports`).
    """
    words = ["-m", module, *map(str, arguments)]
    if not gpu and not imports:
        return prepared.run(words, processes=processes, timeout=timeout)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *words]
    environment = os.environ | ({} if gpu else prepared.ON_CPU)
    return subprocess.run(command, cwd=prepared.ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
