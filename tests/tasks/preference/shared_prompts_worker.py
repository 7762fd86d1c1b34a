"""tests.layouts.worker on pairs whose prompts are laid out once and twice.

"packing" of a job: the length of a pack; None: rows of `micro_batch` pairs. "fault": a planted one. A result has, of
both ways, the "log_probs" of each pair's answers, and of this rank the "tokens" of its documents, the FLOPs of its
"forward" pass, and the length of its rows, "computed"; "gradients", the largest difference of two gradients beside the
largest of all; and "saved", the FLOPs of the prompts that are computed once.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.families import family_of
from megaswift.bridge.layers import packed_seqs
from megaswift.bridge.model.model import Model
from megaswift.bridge.model.shared_prompts import unshared_reason
from megaswift.bridge.parallel import initialize
from megaswift.tasks.losses.preference import Dpo, Pairs, dpo_losses
from megaswift.tasks.observability.flops import Flops
from megaswift.tasks.reference import reference_model
from megaswift.tasks.reference.reference_model import document_log_probs, sum_by_document
from megaswift.tasks.run.planning import length_multiple
from megaswift.tasks.train.objective import forward_flops, grouping_of
from megaswift.tasks.train.step import run_schedule
from megaswift.templates.batching.collator import Batch, BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches
from megatron.core.pipeline_parallel.utils import is_pp_last_stage

from tests.layouts import worker
from tests.tasks.rl.shared_prompts_worker import plant
from tests.templates.batching.pairs import PairStore


def gradients(model: Model, chunks: list, batches: list[Batch]) -> list[torch.Tensor]:
    """Losses of DPO, and of the mean log-probabilities that other losses compare."""
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    settings = Dpo(beta=0.01)

    def loss(batch: Batch, log_probs: torch.Tensor):
        sums, grouping = sum_by_document(batch, log_probs), grouping_of(batch)
        references, tokens = torch.sin(2.0 * grouping.items[grouping.samples] + grouping.parts), grouping.tokens
        pairs = Pairs(sums[::2], sums[1::2], references[::2], references[1::2], tokens[::2], tokens[1::2])
        value = dpo_losses(pairs, settings).sum() + (sums / tokens)[::2].sum()
        return value, {"loss": value.detach()}

    run_schedule(model, chunks, batches, loss, forward_only=False)
    return [p.main_grad.clone() for chunk in chunks for p in chunk.parameters() if p.requires_grad]


def run(job: dict) -> dict:
    options = worker.options_of(job)
    initialize(options.build, seed=7)
    config = read_config(Path(job["model"]))
    assert not unshared_reason(family_of(config).describe(config), options.build)
    model = worker.open_model(job, options)
    chunks = worker.open_training(model, options, None).chunks
    groups, store, pack = model.groups, PairStore(), job.get("packing", 160)
    layout = BatchLayout(pack_length=pack, length_multiple=length_multiple(options.build), stage="preference")
    size, ranks = job.get("micro_batch", 1), groups.dp.size()
    count = len(store) if pack is None else 8
    division = StepDivision(size, count, groups.dp.rank(), ranks, equal_lengths=groups.pp.size() > 1)
    real, real_sum, results, grads = packed_seqs.make_segments, reference_model.sum_documents, {}, []
    try:
        for name, shares in (("repeated", False), ("shared", True)):
            layout = dataclasses.replace(layout, shares_prompts=shares)
            if shares and job.get("fault") == "no loss of the prompt":
                reference_model.sum_documents = lambda values, spans, segments, _: real_sum(values, spans, segments)
            elif shares:
                plant(job.get("fault"))
            [batches] = Batches(store, layout, division, shuffle=False).one_pass()
            values = torch.zeros(len(store), 2)
            for batch, sums in zip(batches, document_log_probs(model, chunks, batches), strict=False):
                grouping = grouping_of(batch)
                values[grouping.items[grouping.samples], grouping.parts] = sums
            if is_pp_last_stage(groups.pp):
                dist.all_reduce(values, group=groups.dp)
            dist.broadcast(values, dist.get_world_size() - 1)
            grads.append(gradients(model, chunks, batches))
            results[name] = {
                "log_probs": values.tolist(),
                "tokens": sum(sum(batch.lengths) for batch in batches),
                "forward": forward_flops(Flops.of_model(model), groups, batches),
                "computed": sum(batch.tokens.shape[1] for batch in batches if batch.lengths),
                "shares": sum(batch.prefixes is not None for batch in batches),
            }
    finally:
        packed_seqs.make_segments, reference_model.sum_documents = real, real_sum
    pairs = [((b - a).abs().max(), a.abs().max()) for a, b in zip(*grads, strict=True)]
    worst = torch.tensor(pairs).amax(0)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    difference, largest = worst.tolist()
    trained = sum(int(np.count_nonzero(store.row(n)[0][1][1:shared])) for n, shared in enumerate(store.shared))
    saved = Flops.of_model(model).forward(store.shared.tolist(), trained)
    return results | {"gradients": difference / largest, "saved": saved}


if __name__ == "__main__":
    worker.main(run)
