"""tests.layouts.worker on episodes with prompts in common, laid out once and repeated.

"packing" of a job: the length of a pack; None: rows of `micro_batch` documents. "fault": a planted one. A result has,
of both ways, the "log_probs" of each document, and of this rank the "tokens" of its documents, those that were
"reused", and the length of its rows, "computed"; and "gradients", the largest difference of a parameter's gradients
relative to their norm.
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
from megaswift.tasks.distributed.redistribute import gather_by_document
from megaswift.tasks.reference.reference_model import token_log_probs
from megaswift.tasks.run.planning import length_multiple
from megaswift.tasks.train.step import run_schedule
from megaswift.templates.batching.collator import Batch, BatchLayout
from megaswift.templates.batching.episode_batches import BatchPlan, Sequences

from tests.bridge.families import VOCAB
from tests.layouts import worker


def episodes() -> Sequences:
    """Three prompts of 21, 30 and 1 tokens with 4, 2 and 2 completions, and a document without loss."""
    random = np.random.default_rng(3)
    tokens, weights = [], []
    for prompt_length, completions in ((21, 4), (30, 2), (1, 2)):
        prompt = random.integers(3, VOCAB, prompt_length)
        for _ in range(completions):
            completion = random.integers(3, VOCAB, int(random.integers(1, 24)))
            mask = (random.random(len(completion)) < 0.8).astype(np.float32)
            mask[0] = 1.0
            tokens.append(np.concatenate([prompt, completion]).astype(np.int32))
            weights.append(np.concatenate([np.zeros(prompt_length, np.float32), mask]))
    weights[1] *= 0
    return Sequences(tokens, weights, [float(n) for n in range(len(tokens))])


def plant(fault: str | None) -> None:
    """Let completions see each other, or not see their prompt."""
    make = packed_seqs.make_segments

    def make_faulty(bounds, cp_rank, cp_size, device, span=packed_seqs.FULL_SPAN, prefixes=(), blocks=()):
        if fault == "no prompt":
            prefixes = [-1] * len(prefixes)
        if fault == "each other" and any(number >= 0 for number in prefixes):  # all of a prompt's as one document
            starts = [bounds[n] for n, prefix in enumerate(prefixes) if prefix < 0]
            bounds, prefixes = [*starts, bounds[-1]], ()
        return make(bounds, cp_rank, cp_size, device, span, prefixes, blocks)

    packed_seqs.make_segments = make_faulty


def gradients(model: Model, chunks: list, batches: list[Batch]) -> list[torch.Tensor]:
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()

    def loss(batch: Batch, log_probs: torch.Tensor):
        assert batch.grouping is not None
        labels = batch.grouping.labels[batch.grouping.samples, 0] + 1
        per_segment = torch.zeros(len(batch.grouping.spans))
        per_segment[batch.grouping.segments] = labels
        factors = per_segment.repeat_interleave(batch.grouping.spans)
        value = (factors * batch.loss_weights[0] * log_probs[0]).sum()
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
    groups, pack = model.groups, job.get("packing", 96)
    layout = BatchLayout(length_multiple=length_multiple(options.build), stage="prompts")
    plan = BatchPlan(
        layout,
        job.get("micro_batch", 1),
        groups.dp.rank(),
        groups.dp.size(),
        pack_length=pack,
        equal_lengths=groups.pp.size() > 1,
    )
    real, results, grads, sequences = packed_seqs.make_segments, {}, [], episodes()
    try:
        for name, shares in (("repeated", False), ("shared", True)):
            plan = dataclasses.replace(plan, shares_prompts=shares)
            if shares:
                plant(job.get("fault"))
            batches = plan.batches(sequences)
            values = token_log_probs(model, chunks, batches, 1.0)
            log_probs = gather_by_document(plan, groups, batches, values)
            masked = [x * w for x, w in zip(log_probs, sequences.weights, strict=True)]
            grads.append(gradients(model, chunks, batches))
            results[name] = {
                "log_probs": [x.tolist() for x in masked],
                "tokens": sum(sum(batch.lengths) for batch in batches),
                "reused": sum(sum(batch.reused_lengths) for batch in batches),
                "computed": sum(int((batch.position_ids >= 0).sum()) for batch in batches),
                "rows": len(batches),
                "shares": sum(batch.prefixes is not None for batch in batches),
            }
    finally:
        packed_seqs.make_segments = real
    differences = [float((b - a).norm() / (a.norm() + 1e-9)) for a, b in zip(*grads, strict=True)]
    worst = torch.tensor(max(differences))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return results | {"gradients": float(worst)}


if __name__ == "__main__":
    worker.main(run)
