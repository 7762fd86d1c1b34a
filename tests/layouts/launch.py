"""Start tests.layouts.worker under torchrun, once for a list of jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(world: int, jobs: list[dict], folder: Path, *, timeout: int = 600, gpu: bool = False) -> dict[str, dict]:
    """Run `jobs` in `world` processes; what each gave, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs, results = folder / "jobs.json", folder / "results.json"
    inputs.write_text(json.dumps(jobs))
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, "-m", "tests.layouts.worker", str(inputs), str(results)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert results.exists(), f"the launch gave nothing:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(results.read_text())
