"""Multi-token prediction in the layouts of one number of processes: what test_prediction.py compares.

torchrun --nproc-per-node 2 -m tests.bridge.families.worker_prediction FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.tasks.options import SftOptions
from megaswift.tasks.train.step import run_schedule, sft_loss, sum_over_ranks

from tests.bridge.families import CP, EP, SP, TP, worker
from tests.layouts.worker import close

LAYOUTS = {"TP2 SP": {TP: 2, SP: True}, "CP2": {CP: 2}, "EP2": {EP: 2}}


def compute(folder: Path, options: SftOptions) -> dict[str, Any]:
    """Both losses, what a round trip changes, and the distance of the gradients to reference.pt."""
    expected = torch.load(folder / "reference.pt")
    model = worker.open_model(folder / "fp32", options, torch.float32)
    changed = worker.round_trip(model, folder / "fp32", torch.float32, max_shard_bytes=100_000)
    found = []
    for packed in (True, False):
        with torch.no_grad():
            batches = worker.batches(options, packed=packed)
            metrics = run_schedule(model, model.chunks, batches, sft_loss, forward_only=True)  # type: ignore[arg-type]
        names = ["loss", "mtp_loss"]
        found.append(dict(zip(names, sum_over_ranks(model.groups, metrics, names).wait(), strict=True)))
    gradients = worker.distances_of_gradients(model, options, folder, expected["gradients"])
    return {"packed": found[0], "padded": found[1], "changed": changed} | gradients


def main(folder: Path) -> None:
    results = {}
    for name, layout in LAYOUTS.items():
        options = worker.options_of(layout | json.loads((folder / "flags.json").read_text()))
        parallel.initialize(options, seed=1)
        results[name] = compute(folder, options)
        close()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
