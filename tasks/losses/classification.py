"""Losses of scores: sequence classification, and rerankers.

scores are fp32, the model's outputs before any sigmoid or softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_hot(labels: Tensor, num_labels: int) -> Tensor:
    """Return the classes of each sample, [samples, k] with NaN where it has fewer -> [samples, num_labels] of 0 and 1.

    Raises ValueError for a number that is no class.
    """
    present = ~labels.isnan()
    numbers = _class_numbers(torch.where(present, labels, 0.0), num_labels)
    hot = torch.zeros(len(labels), num_labels + 1, device=labels.device)  # the last column takes what is missing
    return hot.scatter(1, torch.where(present, numbers, num_labels), 1.0)[:, :num_labels]


def class_numbers(labels: Tensor, num_labels: int) -> Tensor:
    """Convert classes [samples, 1] from floats to int64 [samples]. Raises ValueError for a number that is no class."""
    if labels.shape[1:] != (1,):
        raise ValueError(
            f"--problem_type single_label_classification: a row has {labels.shape[1]} labels, and needs one. "
            "For several at once: multi_label_classification."
        )
    return _class_numbers(labels, num_labels).squeeze(1)


def _class_numbers(labels: Tensor, num_labels: int) -> Tensor:
    """Floats as int64, all of them classes."""
    right = (labels >= 0) & (labels < num_labels) & (labels == labels.round())
    if not right.all():
        wrong = labels[~right][0].item()
        raise ValueError(
            f"--num_labels {num_labels}: classes are 0 to {num_labels - 1}, and a row's label is {wrong:g}. "
            "Raise --num_labels or correct the row."
        )
    return labels.long()


def classification_losses(scores: Tensor, labels: Tensor, problem_type: str) -> Tensor:
    """Return each sample's loss as transformers' ForSequenceClassificationLoss: [samples].

    scores [samples, outputs]; labels by `problem_type`: single_label_classification [samples] (`class_numbers`),
    multi_label_classification [samples, outputs] (`multi_hot`), regression [samples, outputs].
    Raises ValueError where labels have another shape, or the problem another name.
    """
    if problem_type == "single_label_classification":
        _same_shape(labels, scores.shape[:1], problem_type)
        return F.cross_entropy(scores, labels.long(), reduction="none")
    _same_shape(labels, scores.shape, problem_type)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)
    if problem_type == "regression":
        return F.mse_loss(scores, labels, reduction="none").mean(dim=1)
    raise ValueError(
        f"--problem_type {problem_type}: there are single_label_classification, multi_label_classification, regression."
    )


def _same_shape(labels: Tensor, shape: torch.Size, problem_type: str) -> None:
    if labels.shape != shape:
        raise ValueError(
            f"--problem_type {problem_type}: labels of shape {list(labels.shape)} where {list(shape)} is needed: "
            "--num_labels and the rows' labels do not go together."
        )


def accuracy(scores: Tensor, labels: Tensor, problem_type: str) -> Tensor:
    """1 where a sample's prediction is right (of several labels: all of them), else 0: [samples] fp32.

    Shapes as in `classification_losses`. A label among several is predicted where its probability is above a half.
    """
    if problem_type == "single_label_classification":
        return (scores.argmax(dim=1) == labels).float()
    if problem_type == "multi_label_classification":
        return ((scores > 0) == (labels > 0.5)).all(dim=1).float()
    raise ValueError(f"--problem_type {problem_type} has no accuracy: only classes are right or wrong.")


def pointwise_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each document's binary cross entropy of "it answers the query" (1) or not (0): [documents]."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def listwise_losses(scores: Tensor, samples: Tensor, temperature: float = 1.0) -> Tensor:
    """Return -log softmax of each sample's first document's score, the positive, among its documents: [samples].

    scores [documents]; samples [documents] int64: which sample each is of, those of one side by side. On the CPU, so
    that the device need not be waited for. ListNet's loss with one relevant document, https://doi.org/10.1145/1273496.1273513.
    """
    if not len(samples):
        return scores
    _, sizes = samples.unique_consecutive(return_counts=True)
    first = sizes.cumsum(0) - sizes
    group = torch.repeat_interleave(sizes)
    column = torch.arange(len(samples), device=samples.device) - first[group]
    table = scores.new_full((len(sizes), int(sizes.max())), -torch.inf)
    indices = (group.to(scores.device), column.to(scores.device))
    table = table.index_put(indices, scores / temperature)
    return table.logsumexp(dim=1) - table[:, 0]
