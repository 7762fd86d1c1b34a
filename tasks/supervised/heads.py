"""`megatron sft --task_type seq_cls|embedding|reranker|generative_reranker`: train classifiers, embeddings, rerankers.

Losses are means over the samples of the global batch (of pointwise rerankers: over its documents). They do not depend
on the number of ranks and micro batches. In-batch negatives are those of a micro batch of all data-parallel ranks.
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
    class_indices,
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
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
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
    """Return the objective of classifiers: single-label, multi-label, or regression."""
    problem = run.hf_config["problem_type"]
    metric_name = "mse" if problem == "regression" else "accuracy"

    def loss(batch: Batch, outputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        labels = to_device(_labels(grouping_of(batch).labels, outputs.shape[1], problem), outputs.device)
        losses = classification_losses(outputs, labels, problem)
        metric = losses if problem == "regression" else accuracy(outputs, labels, problem)
        shares = {
            name: mean_share(values, batch, model.groups)
            for name, values in {"loss": losses, metric_name: metric}.items()
        }
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, ["loss", metric_name], output=scores, weight=samples, scores_tokens=False), [
        f"problem: {problem}"
    ]


def _labels(labels: Tensor, outputs: int, problem: str) -> Tensor:
    """Convert labels [samples, k], on the CPU, to the form of `classification_losses`."""
    if problem == "single_label_classification":
        return class_indices(labels, outputs)
    return multi_hot(labels, outputs) if problem == "multi_label_classification" else labels


def make_embedding(run: Run, model: Model, train: Batches, val: Batches | None) -> tuple[Objective, list[str]]:
    """Return the objective of embedding models."""
    options = run.options
    assert isinstance(options, EmbeddingOptions)
    is_infonce = options.loss_type == "infonce"
    loss_fn = (
        partial(_infonce, options=options, groups=model.groups) if is_infonce else partial(_pairs, options=options)
    )
    names = ["loss", "accuracy"] if is_infonce else ["loss"]

    def output(batch: Batch) -> Embeddings:
        grouping = grouping_of(batch)
        return Embeddings(options.pooling, grouping.ends, grouping.spans, grouping.segments, batch.lengths)

    def loss(batch: Batch, vectors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        dims = options.mrl_dims or [vectors.shape[1]]
        weights = options.mrl_weights or [1.0] * len(dims)
        losses_by_dim = [loss_fn(embeddings, grouping_of(batch)) for embeddings in matryoshka(vectors, dims)]
        losses = torch.stack(
            [weight * values["loss"] for weight, values in zip(weights, losses_by_dim, strict=True)]
        ).sum(0)
        full_width = losses_by_dim[dims.index(max(dims))]
        shares = {
            name: mean_share(values, batch, model.groups) for name, values in (full_width | {"loss": losses}).items()
        }
        return shares["loss"], detach_metrics(shares)

    return Objective(loss, names, output=output, weight=samples, scores_tokens=False), []


def _infonce(
    vectors: Tensor, grouping: Grouping, *, options: EmbeddingOptions, groups: ProcessGroupCollection
) -> dict[str, Tensor]:
    """Return each anchor's InfoNCE loss and accuracy.

    Candidates are its own documents, or with --infonce_use_batch those of all data-parallel ranks.
    """
    anchors = (grouping.parts == 0).nonzero().squeeze(1)
    is_negative = grouping.parts != 0
    if options.infonce_use_batch:
        candidates, negatives, offset = _gather_documents(vectors, is_negative, grouping.documents_per_rank, groups.dp)
        mask = to_device(negatives, vectors.device).expand(len(anchors), -1)
    else:
        candidates, offset = vectors, 0
        mask = to_device((grouping.samples == grouping.samples[anchors, None]) & is_negative, vectors.device)
    target = to_device(offset + anchors + 1, vectors.device)
    anchor_vectors = vectors.index_select(0, to_device(anchors, vectors.device))
    losses = infonce_losses(anchor_vectors, candidates, target, options.infonce_temperature, mask)
    cosines = (anchor_vectors.detach() @ candidates.detach().t()).masked_fill(~mask, -torch.inf)
    nearest = F.pad(cosines, (0, 1), value=-torch.inf).argmax(1)  # the pad: a padding micro batch has no candidates
    return {"loss": losses, "accuracy": (nearest == target).float()}


def _gather_documents(
    vectors: Tensor, is_negative: Tensor, document_counts: list[int], group: Any
) -> tuple[Tensor, Tensor, int]:
    """Gather document vectors over data-parallel ranks.

    Returns the vectors [ranks x max_documents, dimensions] with gradients, the mask of negatives among them, and the
    offset of this rank's documents.
    """
    if dist.get_world_size(group) == 1:
        return vectors, is_negative, 0
    max_documents, rank = max(document_counts), dist.get_rank(group)
    # An extra column carries `is_negative`.
    flagged_vectors = torch.cat([vectors, to_device(is_negative, vectors.device).to(vectors)[:, None]], dim=1)
    gathered = torch.cat(
        differentiable.all_gather(F.pad(flagged_vectors, (0, 0, 0, max_documents - len(vectors))), group)
    )
    return gathered[:, :-1], gathered[:, -1] > 0, rank * max_documents


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
    """Return the objective of rerankers: scores by a head, or (generative) by the log odds of two tokens."""
    options = run.options
    assert isinstance(options, RerankerOptions)
    output, notes = scores, []
    if isinstance(options, GenerativeRerankerOptions):
        yes, no = (_token(run, flag) for flag in ("positive_token", "negative_token"))
        output = partial(_odds, tokens=[yes, no])
        notes = [f"a document's score: log odds of token {yes} over {no}"]
    pointwise = options.loss_type == "pointwise_reranker"

    def prepare(training: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        extras = RerankerExtras(_document_count(batches, model.groups))
        return [replace(batch, extras=extras) for batch in batches]

    def loss(batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grouping, values = grouping_of(batch), output[:, 0]
        labels = to_device(grouping.labels[grouping.samples, grouping.parts], values.device)
        if pointwise:
            losses = pointwise_losses(values, labels)
            correct = ((values > 0) == (labels > 0.5)).float()
            values_by_name = {"loss": losses, "accuracy": correct, "documents": torch.ones_like(losses)}
            total = context_parallel_share(losses.sum(), model.groups) / extras_of(batch, RerankerExtras).documents
            return total, detach_metrics(
                {name: mean_share(metric, batch, model.groups) for name, metric in values_by_name.items()}
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
    """Return means over documents, whose number varies between samples."""
    return {name: sums[name] / max(sums["documents"], 1e-12) for name in ("loss", "accuracy")}


def _odds(batch: Batch, *, tokens: Sequence[int]) -> OutputProcessor:
    """Return the output processor of log odds, log p(tokens[0]) - log p(tokens[1]): [documents, 1]."""
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


def _document_count(batches: list[Batch], groups: ProcessGroupCollection) -> Tensor:
    """Return the number of documents of the global batch."""
    count = torch.tensor(float(sum(len(grouping_of(batch).samples) for batch in batches)), device=runtime.device())
    dist.all_reduce(count, group=groups.dp)
    return count.clamp(min=1)


def _reciprocal_ranks(values: Tensor, grouping: Grouping) -> Tensor:
    """Return the reciprocal rank of each sample's first document: [samples]. values [documents]: scores."""
    first_documents = (grouping.parts == 0).nonzero().squeeze(1)
    positive = values.index_select(0, to_device(first_documents, values.device))
    sample = to_device(grouping.samples, values.device)
    above = torch.zeros_like(positive).index_add(0, sample, (values > positive.index_select(0, sample)).float())
    return 1 / (1 + above)
