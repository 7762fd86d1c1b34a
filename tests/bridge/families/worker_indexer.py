"""The loss of lightning indexers in the layouts of one number of processes: what test_indexer_loss.py compares.

torchrun --nproc-per-node 2 -m tests.bridge.families.worker_indexer jobs.json

jobs.json: {folder: [layout, ...]}
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.layers.indexer_loss import METRIC
from megaswift.bridge.options import BuildOptions
from megaswift.tasks.train.step import run_schedule, sft_loss
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from tests.bridge.families import CP, EP, LAYOUTS, PP, RECOMPUTE_LAYERS, reference, worker
from tests.layouts.worker import close

RECOMPUTED = RECOMPUTE_LAYERS | {CP: 2}
LATENTS = {PP: 2, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]}
WITH_EXPERTS = LAYOUTS[2] | {"EP2": {EP: 2}, "CP2 recompute": RECOMPUTED, "PP2 recompute latents": LATENTS}


def compute(folder: Path, options: BuildOptions) -> dict[str, Any]:
    """The loss of padded and of packed rows, its gradients beside reference.pt's, and the others that it changes."""
    expected, losses = torch.load(folder / "reference.pt"), []
    model = worker.open_model(folder / "fp32", options, torch.float32)
    for run in (
        lambda: run_schedule(model, model.chunks, worker.batches(options, packed=False), sft_loss, forward_only=False),
        lambda: worker.distances_of_gradients(model, options, folder, expected["gradients"]),
    ):
        get_moe_metrics_tracker().clear()
        result = run()
        loss = get_moe_metrics_tracker().metrics[METRIC].values.sum()
        dist.all_reduce(loss)
        for chunk in model.chunks:
            chunk.zero_grad()
        losses.append(loss.item() / len(reference.PACKS))  # a pack, or the rows of one, is a micro batch
    with_loss = worker.tensors_of(folder / "gradients")
    changes = {"dsa_indexer_loss_coeff": 0.0, "dsa_indexer_use_sparse_loss": False}
    frozen = worker.open_model(folder / "fp32", BuildOptions(**vars(options) | changes), torch.float32)
    worker.distances_of_gradients(frozen, options, folder, expected["gradients"])
    without = worker.tensors_of(folder / "gradients")
    assert with_loss.keys() == without.keys()
    changed = [n for n in without if ".indexer." not in n and not torch.equal(with_loss[n], without[n])]
    return result | {"losses": losses, "changed": changed}


def options_of(folder: Path, layout: dict[str, Any]) -> BuildOptions:
    return worker.options_of(layout | json.loads((folder / "flags.json").read_text()))


def main(jobs: dict[str, list[str]]) -> None:
    for folder, layouts in ((Path(name), layouts) for name, layouts in jobs.items()):
        results = {}
        for name in layouts:
            options = options_of(folder, WITH_EXPERTS[name])
            parallel.initialize(options, seed=1)
            results[name] = compute(folder, options)
            close()
        if dist.get_rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
