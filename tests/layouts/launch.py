"""Start tests.layouts.worker under torchrun, once for a list of jobs."""

import json
from pathlib import Path

from tests.torchrun import torchrun


def launch(world: int, jobs: list[dict], folder: Path, *, timeout: int = 600, gpu: bool = False) -> dict[str, dict]:
    """Run `jobs` in `world` processes; what each gave, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs, results = folder / "jobs.json", folder / "results.json"
    inputs.write_text(json.dumps(jobs))
    results.unlink(missing_ok=True)
    done = torchrun("tests.layouts.worker", inputs, results, processes=world, timeout=timeout, gpu=gpu)
    assert results.exists(), f"the launch gave nothing:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(results.read_text())
