"""Jobs that compute batches with shared prompts and without, in one process and in two."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests import tiny
from tests.torchrun import torchrun

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


NONE: dict[str, Any] = {}


class Job(NamedTuple):
    """Job of a worker. changes: of the family's config. settings: further ones, of the worker."""

    processes: int
    family: str
    changes: dict[str, Any] = NONE
    flags: dict[str, Any] = NONE
    settings: dict[str, Any] = NONE


def run_jobs(jobs: dict[str, Job], worker: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each job by its name. worker: module that gets the jobs' file and writes the results'"""
    results = {}
    for processes in (1, 2):
        described = []
        for name, job in jobs.items():
            if job.processes == processes:
                model = folder / f"{job.family} {job.changes}"
                if not model.exists():
                    tiny.save(model, job.family, **job.changes)
                described.append({"name": name, "model": str(model), "options": job.flags, **job.settings})
        (folder / "jobs.json").write_text(json.dumps(described))
        output = folder / f"results-{processes}.json"
        done = torchrun(worker, folder / "jobs.json", output, processes=processes)
        assert output.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results |= json.loads(output.read_text())
    return results
