"""`megatron sft --task_type seq_cls|embedding|reranker|generative_reranker`: train what scores or places documents.

Losses are means over the samples of the global batch (of pointwise rerankers: over its documents), whatever the number
of ranks and micro batches. Other samples' documents count as negatives within a micro batch of all data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.build import Model
from ...templates.batching.collator import Batch, Grouping
from ...templates.batching.dataloader import Batches
from ...templates.plural import plural
from ..losses.classification import (
    accuracy,
    class_numbers,
    classification_losses,
    listwise_losses,
    multi_hot,
    pointwise_losses,
)
from ..losses.embedding import (
    contrastive_losses,
    cosine_similarity_losses,
    infonce_losses,
    matryoshka,
    online_contrastive_losses,
)
from ..options import EmbeddingOptions, GenerativeRerankerOptions, RerankerOptions, SeqClsOptions
from ..run.context import Run
from ..train.objective import Objective, copied, detached, grouping_of, samples, share
from ..train.setup import train
from ..train.step import Training


def run(options: SeqClsOptions | EmbeddingOptions | RerankerOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    make = {
        "seq_cls": make_seq_cls,
        "embedding": make_embedding,
        "reranker": make_reranker,
        "generative_reranker": make_reranker,
    }
    return train(options, sources, make[options.task_type])


def scores(model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None) -> Tensor:
    """What the head gives each document: fp32 [documents, labels]."""
    return model.scores(chunk, **_row(batch), ends=grouping_of(batch).ends)


def _row(batch: Batch) -> dict:
    names = "tokens", "position_ids", "cu_seqlens", "max_seqlen"
    return {name: getattr(batch, name) for name in names}


def make_seq_cls(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Classes, of which a document has one or any number, or numbers."""
    problem = run.hf_config["problem_type"]
    hits = "mse" if problem == "regression" else "accuracy"

    def loss(batch: Batch, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        labels = to_device(_labels(grouping_of(batch).labels, found.shape[1], problem), found.device)
        losses = classification_losses(found, labels, problem)
        right = losses if problem == "regression" else accuracy(found, labels, problem)
        shares = {name: share(values, batch) for name, values in {"loss": losses, hits: right}.items()}
        return shares["loss"], detached(shares)

    return Objective(loss, ["loss", hits], forward=scores, weight=samples, scores_tokens=False), [f"problem: {problem}"]


def _labels(labels: Tensor, outputs: int, problem: str) -> Tensor:
    """As `classification_losses` wants them, from labels [samples, k] on the CPU."""
    if problem == "single_label_classification":
        return class_numbers(labels, outputs)
    return multi_hot(labels, outputs) if problem == "multi_label_classification" else labels


def make_embedding(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Vectors: what belongs together is near."""
    options = run.options
    assert isinstance(options, EmbeddingOptions)
    contrasts = options.loss_type == "infonce"
    measure = partial(_infonce, options=options) if contrasts else partial(_pairs, options=options)
    names = ["loss", "accuracy"] if contrasts else ["loss"]

    def forward(model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None) -> Tensor:
        grouping = grouping_of(batch)
        return model.embeddings(
            chunk,
            **_row(batch),
            ends=grouping.ends,
            spans=grouping.spans,
            segments=grouping.segments,
            lengths=batch.lengths,
            pooling=options.pooling,
        )

    def loss(batch: Batch, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        dims = options.mrl_dims or [found.shape[1]]
        weights = options.mrl_weights or [1.0] * len(dims)
        of_each = [measure(short, grouping_of(batch)) for short in matryoshka(found, dims)]
        losses = torch.stack([weight * values["loss"] for weight, values in zip(weights, of_each, strict=True)]).sum(0)
        longest = of_each[dims.index(max(dims))]
        shares = {name: share(values, batch) for name, values in (longest | {"loss": losses}).items()}
        return shares["loss"], detached(shares)

    return Objective(loss, names, forward=forward, weight=samples, scores_tokens=False), []


def _infonce(vectors: Tensor, grouping: Grouping, *, options: EmbeddingOptions) -> dict[str, Tensor]:
    """Of each anchor, among its own documents or those of all samples on all data-parallel ranks."""
    anchors = (grouping.parts == 0).nonzero().squeeze(1)
    others = grouping.parts != 0
    if options.infonce_use_batch:
        candidates, usable, first = _of_all_ranks(vectors, others, grouping.documents_per_rank)
        mask = to_device(usable, vectors.device).expand(len(anchors), -1)
    else:
        candidates, first = vectors, 0
        mask = to_device((grouping.samples == grouping.samples[anchors, None]) & others, vectors.device)
    target = to_device(first + anchors + 1, vectors.device)
    own = vectors.index_select(0, to_device(anchors, vectors.device))
    losses = infonce_losses(own, candidates, target, options.infonce_temperature, mask)
    cosines = (own.detach() @ candidates.detach().t()).masked_fill(~mask, -torch.inf)
    nearest = F.pad(cosines, (0, 1), value=-torch.inf).argmax(1)  # of a micro batch of fillers there are none
    return {"loss": losses, "accuracy": (nearest == target).float()}


def _of_all_ranks(own: Tensor, others: Tensor, peers: list[int]) -> tuple[Tensor, Tensor, int]:
    """The vectors of the documents of all data-parallel ranks, [ranks x most, dimensions], with gradients for all;
    which of them are to be looked for; and where this rank's begin."""
    group: Any = parallel_state.get_data_parallel_group()
    if dist.get_world_size(group) == 1:
        return own, others, 0
    most, rank = max(peers), dist.get_rank(group)
    # What a document is goes along, in a column of its own.
    marked = torch.cat([own, to_device(others, own.device).to(own)[:, None]], dim=1)
    whole = torch.cat(differentiable.all_gather(F.pad(marked, (0, 0, 0, most - len(own))), group))
    return whole[:, :-1], whole[:, -1] > 0, rank * most


def _pairs(vectors: Tensor, grouping: Grouping, *, options: EmbeddingOptions) -> dict[str, Tensor]:
    first, second = vectors[::2], vectors[1::2]
    labels = to_device(grouping.labels[:, 0], vectors.device)
    match options.loss_type:
        case "cosine_similarity":
            return {"loss": cosine_similarity_losses(first, second, labels)}
        case "contrastive":
            return {"loss": contrastive_losses(first, second, labels, options.contrastive_margin)}
        case _:
            return {"loss": online_contrastive_losses(first, second, labels, options.contrastive_margin)}


def make_reranker(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """How well documents answer a query, by a head or by the odds of one answer over another."""
    options = run.options
    assert isinstance(options, RerankerOptions)
    forward, notes = scores, []
    if isinstance(options, GenerativeRerankerOptions):
        yes, no = (_token(run, flag) for flag in ("positive_token", "negative_token"))
        forward = partial(_odds, choices=[yes, no])
        notes = [f"a document's score: log odds of token {yes} over {no}"]
    pointwise = options.loss_type == "pointwise_reranker"

    def prepare(training: Training, batches: list[Batch], evaluates: bool) -> list[Batch]:
        documents = _documents(batches)
        return [replace(batch, known={"documents": documents}) for batch in batches]

    def loss(batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grouping, values = grouping_of(batch), output[:, 0]
        labels = to_device(grouping.labels[grouping.samples, grouping.parts], values.device)
        if pointwise:
            losses = pointwise_losses(values, labels)
            right = ((values > 0) == (labels > 0.5)).float()
            found = {"loss": losses, "accuracy": right, "documents": torch.ones_like(losses)}
            total = copied(losses.sum()) / batch.known["documents"]
            return total, detached({name: share(each, batch) for name, each in found.items()})
        losses = listwise_losses(values, grouping.samples, options.listwise_temperature)
        shares = {"loss": share(losses, batch), "mrr": share(_reciprocal_ranks(values.detach(), grouping), batch)}
        return shares["loss"], detached(shares)

    objective = Objective(loss, ["loss", "mrr"], forward=forward, weight=samples, scores_tokens=False)
    if pointwise:
        names = ["loss", "accuracy", "documents"]
        objective = replace(objective, names=names, prepare=prepare, means=_over_documents)
    return objective, notes


def _over_documents(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Means over documents, of which samples have more or fewer."""
    return {name: sums[name] / max(sums["documents"], 1e-12) for name in ("loss", "accuracy")}


def _odds(
    model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None, *, choices: Sequence[int]
) -> Tensor:
    """log p of the first of two tokens, less that of the second: [documents, 1]."""
    found = model.choices(chunk, **_row(batch), ends=grouping_of(batch).ends, choices=choices)
    return found[:, :1] - found[:, 1:] if found.shape[1:] == (2,) else found  # hidden states: for the next stage


def _token(run: Run, flag: str) -> int:
    word = getattr(run.options, flag)
    tokens = run.tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(tokens) != 1:
        raise ValueError(f"--{flag} {word} is {plural(len(tokens), 'token')} of this tokenizer. Set a word that is one")
    return tokens[0]


def _documents(batches: list[Batch]) -> Tensor:
    """Of the whole global batch."""
    count = torch.tensor(float(sum(len(grouping_of(batch).samples) for batch in batches)), device=runtime.device())
    dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
    return count.clamp(min=1)


def _reciprocal_ranks(values: Tensor, grouping: Grouping) -> Tensor:
    """Of each sample's first document among its documents, by scores [documents]: [samples]."""
    first = (grouping.parts == 0).nonzero().squeeze(1)
    positive = values.index_select(0, to_device(first, values.device))
    own = to_device(grouping.samples, values.device)
    above = torch.zeros_like(positive).index_add(0, own, (values > positive.index_select(0, own)).float())
    return 1 / (1 + above)
