"""`megatron sft --task_type seq_cls|embedding|reranker|generative_reranker`: train what scores or places documents.

Losses are means over the samples of the global batch (of pointwise rerankers: over its documents), whatever the number
of ranks and micro batches. Other samples' documents count as negatives within a micro batch of all data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.packed_seqs import to_device
from ...bridge.model.model import LastStage, Model, OutputProcessor
from ...bridge.model.outputs import Choices, DocumentScores, Embeddings
from ...bridge.option_groups import flag_value
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
from ..train.objective import (
    Objective,
    context_parallel_share,
    detach_metrics,
    extras_of,
    grouping_of,
    mean_share,
    samples,
)
from ..train.setup import train
from ..train.step import TrainState


def run(options: SeqClsOptions | EmbeddingOptions | RerankerOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    make = {
        "seq_cls": make_seq_cls,
        "embedding": make_embedding,
        "reranker": make_reranker,
        "generative_reranker": make_reranker,
    }
    return train(options, sources, make[options.task_type])


def scores(batch: Batch) -> DocumentScores:
    """Return the output of a head: fp32 [documents, labels]."""
    return DocumentScores(grouping_of(batch).ends)


def make_seq_cls(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of classifiers: one class, several classes, or regression."""
    problem = run.hf_config["problem_type"]
    hits = "mse" if problem == "regression" else "accuracy"

    def loss(batch: Batch, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        labels = to_device(_labels(grouping_of(batch).labels, outputs.shape[1], problem), outputs.device)
        losses = classification_losses(outputs, labels, problem)
        right = losses if problem == "regression" else accuracy(outputs, labels, problem)
        shares = {
            name: mean_share(values, batch, model.groups) for name, values in {"loss": losses, hits: right}.items()
        }
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, ["loss", hits], output=scores, weight=samples, scores_tokens=False), [f"problem: {problem}"]


def _labels(labels: Tensor, outputs: int, problem: str) -> Tensor:
    """Return labels [samples, k] on the CPU in the form that `classification_losses` takes."""
    if problem == "single_label_classification":
        return class_numbers(labels, outputs)
    return multi_hot(labels, outputs) if problem == "multi_label_classification" else labels


def make_embedding(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of embeddings."""
    options = run.options
    assert isinstance(options, EmbeddingOptions)
    contrasts = options.loss_type == "infonce"
    measure = partial(_infonce, options=options, groups=model.groups) if contrasts else partial(_pairs, options=options)
    names = ["loss", "accuracy"] if contrasts else ["loss"]

    def output(batch: Batch) -> Embeddings:
        grouping = grouping_of(batch)
        return Embeddings(options.pooling, grouping.ends, grouping.spans, grouping.segments, batch.lengths)

    def loss(batch: Batch, vectors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        dims = options.mrl_dims or [vectors.shape[1]]
        weights = options.mrl_weights or [1.0] * len(dims)
        of_each = [measure(short, grouping_of(batch)) for short in matryoshka(vectors, dims)]
        losses = torch.stack([weight * values["loss"] for weight, values in zip(weights, of_each, strict=True)]).sum(0)
        longest = of_each[dims.index(max(dims))]
        shares = {
            name: mean_share(values, batch, model.groups) for name, values in (longest | {"loss": losses}).items()
        }
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, names, output=output, weight=samples, scores_tokens=False), []


def _infonce(
    vectors: Tensor, grouping: Grouping, *, options: EmbeddingOptions, groups: ProcessGroupCollection
) -> dict[str, Tensor]:
    """Return each anchor's InfoNCE loss, among its own documents or those of all data-parallel ranks."""
    anchors = (grouping.parts == 0).nonzero().squeeze(1)
    others = grouping.parts != 0
    if options.infonce_use_batch:
        candidates, usable, first = _gather_documents(vectors, others, grouping.documents_per_rank, groups.dp)
        mask = to_device(usable, vectors.device).expand(len(anchors), -1)
    else:
        candidates, first = vectors, 0
        mask = to_device((grouping.samples == grouping.samples[anchors, None]) & others, vectors.device)
    target = to_device(first + anchors + 1, vectors.device)
    anchor_vectors = vectors.index_select(0, to_device(anchors, vectors.device))
    losses = infonce_losses(anchor_vectors, candidates, target, options.infonce_temperature, mask)
    cosines = (anchor_vectors.detach() @ candidates.detach().t()).masked_fill(~mask, -torch.inf)
    nearest = F.pad(cosines, (0, 1), value=-torch.inf).argmax(1)  # of a micro batch of fillers there are none
    return {"loss": losses, "accuracy": (nearest == target).float()}


def _gather_documents(vectors: Tensor, others: Tensor, peers: list[int], group: Any) -> tuple[Tensor, Tensor, int]:
    """Gather document vectors over data-parallel ranks.

    Returns them, [ranks x most, dimensions] with gradients; which of them are negatives; and where this rank's begin.
    """
    if dist.get_world_size(group) == 1:
        return vectors, others, 0
    most, rank = max(peers), dist.get_rank(group)
    # What a document is goes along, in a column of its own.
    marked = torch.cat([vectors, to_device(others, vectors.device).to(vectors)[:, None]], dim=1)
    gathered = torch.cat(differentiable.all_gather(F.pad(marked, (0, 0, 0, most - len(vectors))), group))
    return gathered[:, :-1], gathered[:, -1] > 0, rank * most


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


@dataclass(frozen=True)
class RerankerExtras:
    documents: Tensor  # fp32 []: documents of the global batch


def make_reranker(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of rerankers: scores by a head, or by the odds of one answer over another."""
    options = run.options
    assert isinstance(options, RerankerOptions)
    output, notes = scores, []
    if isinstance(options, GenerativeRerankerOptions):
        yes, no = (_token(run, flag) for flag in ("positive_token", "negative_token"))
        output = partial(_odds, tokens=[yes, no])
        notes = [f"a document's score: log odds of token {yes} over {no}"]
    pointwise = options.loss_type == "pointwise_reranker"

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        extras = RerankerExtras(_documents(batches, model.groups))
        return [replace(batch, extras=extras) for batch in batches]

    def loss(batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grouping, values = grouping_of(batch), output[:, 0]
        labels = to_device(grouping.labels[grouping.samples, grouping.parts], values.device)
        if pointwise:
            losses = pointwise_losses(values, labels)
            right = ((values > 0) == (labels > 0.5)).float()
            values_by_name = {"loss": losses, "accuracy": right, "documents": torch.ones_like(losses)}
            total = context_parallel_share(losses.sum(), model.groups) / extras_of(batch, RerankerExtras).documents
            return total, detach_metrics(
                {name: mean_share(each, batch, model.groups) for name, each in values_by_name.items()}
            )
        losses = listwise_losses(values, grouping.samples, options.listwise_temperature)
        shares = {
            "loss": mean_share(losses, batch, model.groups),
            "mrr": mean_share(_reciprocal_ranks(values.detach(), grouping), batch, model.groups),
        }
        return shares["loss"], detach_metrics(shares)

    objective = Objective(loss, ["loss", "mrr"], output=output, weight=samples, scores_tokens=False)
    if pointwise:
        names = ["loss", "accuracy", "documents"]
        objective = replace(objective, names=names, prepare=prepare, means=_over_documents)
    return objective, notes


def _over_documents(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Means over documents, of which samples have more or fewer."""
    return {name: sums[name] / max(sums["documents"], 1e-12) for name in ("loss", "accuracy")}


def _odds(batch: Batch, *, tokens: Sequence[int]) -> OutputProcessor:
    """Return the output log p of the first of two tokens, less that of the second: [documents, 1]."""
    choices = Choices(grouping_of(batch).ends, tokens)

    def odds(stage: LastStage) -> Tensor:
        values = choices(stage)
        return values[:, :1] - values[:, 1:]

    return odds


def _token(run: Run, flag: str) -> int:
    word = flag_value(run.options, flag)
    tokens = run.tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(tokens) != 1:
        raise ValueError(f"--{flag} {word} is {plural(len(tokens), 'token')} of this tokenizer. Set a word that is one")
    return tokens[0]


def _documents(batches: list[Batch], groups: ProcessGroupCollection) -> Tensor:
    """Return the number of documents of the global batch."""
    count = torch.tensor(float(sum(len(grouping_of(batch).samples) for batch in batches)), device=runtime.device())
    dist.all_reduce(count, group=groups.dp)
    return count.clamp(min=1)


def _reciprocal_ranks(values: Tensor, grouping: Grouping) -> Tensor:
    """Return the reciprocal rank of each sample's first document, by scores [documents]: [samples]."""
    first = (grouping.parts == 0).nonzero().squeeze(1)
    positive = values.index_select(0, to_device(first, values.device))
    sample = to_device(grouping.samples, values.device)
    above = torch.zeros_like(positive).index_add(0, sample, (values > positive.index_select(0, sample)).float())
    return 1 / (1 + above)
