"""Losses of sequence classifiers and rerankers.

scores are fp32, the model's outputs before any sigmoid or softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_hot(labels: Tensor, num_labels: int) -> Tensor:
    """Convert class indices [samples, k], padded with NaN, to multi-hot vectors [samples, num_labels].

    Raises ValueError for an invalid class index.
    """
    present = ~labels.isnan()
    indices = _class_indices(torch.where(present, labels, 0.0), num_labels)
    hot = torch.zeros(len(labels), num_labels + 1, device=labels.device)  # the last column is for the padding
    return hot.scatter(1, torch.where(present, indices, num_labels), 1.0)[:, :num_labels]


def class_indices(labels: Tensor, num_labels: int) -> Tensor:
    """Convert class indices [samples, 1] from floats to int64 [samples]. Raises ValueError for an invalid one."""
    if labels.shape[1:] != (1,):
        raise ValueError(
            f"--problem_type single_label_classification: a row has {labels.shape[1]} labels, and needs one. "
            "For several at once: multi_label_classification."
        )
    return _class_indices(labels, num_labels).squeeze(1)


def _class_indices(labels: Tensor, num_labels: int) -> Tensor:
    """Convert floats to int64. Raises ValueError for an invalid class index."""
    is_valid = (labels >= 0) & (labels < num_labels) & (labels == labels.round())
    if not is_valid.all():
        invalid = labels[~is_valid][0].item()
        raise ValueError(
            f"--num_labels {num_labels}: classes are 0 to {num_labels - 1}, and a row's label is {invalid:g}. "
            "Raise --num_labels or correct the row."
        )
    return labels.long()


def classification_losses(scores: Tensor, labels: Tensor, problem_type: str) -> Tensor:
    """Return each sample's loss, as in transformers' ForSequenceClassificationLoss: [samples].

    scores [samples, outputs]; labels by `problem_type`: single_label_classification [samples] (`class_indices`),
    multi_label_classification [samples, outputs] (`multi_hot`), regression [samples, outputs].
    Raises ValueError for labels of another shape and for an unknown `problem_type`.
    """
    if problem_type == "single_label_classification":
        _check_shape(labels, scores.shape[:1], problem_type)
        return F.cross_entropy(scores, labels.long(), reduction="none")
    _check_shape(labels, scores.shape, problem_type)
    if problem_type == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)
    if problem_type == "regression":
        return F.mse_loss(scores, labels, reduction="none").mean(dim=1)
    raise ValueError(
        f"--problem_type {problem_type}: there are single_label_classification, multi_label_classification, regression."
    )


def _check_shape(labels: Tensor, shape: torch.Size, problem_type: str) -> None:
    if labels.shape != shape:
        raise ValueError(
            f"--problem_type {problem_type}: labels of shape {list(labels.shape)} where {list(shape)} is needed: "
            "--num_labels and the rows' labels do not go together."
        )


def accuracy(scores: Tensor, labels: Tensor, problem_type: str) -> Tensor:
    """Return 1 where a sample's prediction (of all its labels) is correct, else 0: fp32 [samples].

    Shapes as in `classification_losses`. With several labels, a label is predicted if its probability exceeds 0.5.
    """
    if problem_type == "single_label_classification":
        return (scores.argmax(dim=1) == labels).float()
    if problem_type == "multi_label_classification":
        return ((scores > 0) == (labels > 0.5)).all(dim=1).float()
    raise ValueError(f"--problem_type {problem_type} has no accuracy: only classes are right or wrong.")


def pointwise_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each document's binary cross entropy. Label 1: it answers the query. Shapes: [documents]."""
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def listwise_losses(scores: Tensor, samples: Tensor, temperature: float = 1.0) -> Tensor:
    """Return -log softmax of the score of each sample's positive, its first document, among its documents: [samples].

    scores [documents]; samples [documents] int64: sample index of each document, in contiguous runs, on the CPU to
    avoid a device synchronization. ListNet's loss with one relevant document,
    https://doi.org/10.1145/1273496.1273513.
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
