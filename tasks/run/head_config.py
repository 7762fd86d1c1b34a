"""Score head in a model's config, and checks of the data's labels for a task."""

import numpy as np

from ...bridge.model.score_head import add_score_head, count_labels
from ...templates.dataset.store import TokenStore
from ...templates.json_types import JsonObject
from ...templates.prepare import Prepared
from ..options import (
    EmbeddingOptions,
    KtoOptions,
    RerankerOptions,
    SeqClsOptions,
    SftOptions,
)


def configure_head(options: SftOptions, hf_config: JsonObject, data: Prepared, pad_token_id: int | None) -> JsonObject:
    """Return `hf_config` with the head that the task requires, if any.

    Raises ValueError if labels of the data do not suit the task, the options or an existing head.
    """
    stores = [store for store in (data.train, data.val) if isinstance(store, TokenStore)]
    if isinstance(options, SeqClsOptions):
        labels = options.num_labels or count_labels(hf_config)
        if labels is None:
            raise ValueError("--num_labels: missing. Set the number of classes, or of a regression's outputs")
        problem = options.problem_type or hf_config.get("problem_type") or _infer_problem(labels, stores)
        for store in stores:
            _check_labels(store.labels, labels, problem)
        return add_score_head(hf_config, labels, problem, pad_token_id=pad_token_id)
    match options:
        case KtoOptions():
            _check_kinds(stores[0].labels)
        case RerankerOptions(loss_type="listwise_reranker"):
            for store in stores:
                _check_lists(store.document_counts)
        case EmbeddingOptions():
            for store in stores:
                _check_pairs(store.labels, options.loss_type)
    labels = count_labels(hf_config)
    if options.scores_documents:
        if labels not in (None, 1):
            raise ValueError(
                f"--model has a head with {labels} labels, and this task trains one with 1. Use its base model"
            )
        return add_score_head(hf_config, 1, pad_token_id=pad_token_id)
    if labels is not None:
        raise ValueError(
            f"--model has a scoring head ({labels} labels) and no output layer. Use the language model that it is "
            "based on"
        )
    return hf_config


def _infer_problem(labels: int, stores: list[TokenStore]) -> str:
    """Infer the problem type from the labels' shape and type, as transformers does."""
    if labels == 1:
        return "regression"
    if not stores:
        raise ValueError("--problem_type: missing. Set it for a stream, whose labels are not known in advance")
    max_labels = max(store.labels.shape[1] for store in stores)
    are_integers = all(
        np.array_equal(values, np.rint(values)) for values in (_without_padding(store.labels) for store in stores)
    )
    if max_labels > 1:
        return "multi_label_classification" if are_integers else "regression"
    return "single_label_classification" if are_integers else "regression"


def _check_labels(row_labels: np.ndarray, labels: int, problem: str) -> None:
    """Raise ValueError if labels [samples, k] are not classes below `labels`, or not `labels` regression targets."""
    values = _without_padding(row_labels)
    if problem == "regression":
        if row_labels.shape[1] != labels or len(values) < row_labels.size:
            raise ValueError(
                f"--num_labels {labels}: a row of the data has {row_labels.shape[1]} target numbers. Set as many"
            )
        return
    if problem == "single_label_classification" and row_labels.shape[1] > 1:
        raise ValueError(
            "--problem_type single_label_classification: a row of the data has several labels. Set "
            "--problem_type multi_label_classification, or use one label per row"
        )
    invalid = values[(values < 0) | (values >= labels) | (values != np.rint(values))]
    if len(invalid):
        raise ValueError(
            f"--num_labels {labels}: classes are counted from 0 to {labels - 1}, and a row of the data has the label "
            f"{invalid[0]:g}. Raise --num_labels, or fix the data"
        )


def _check_pairs(labels: np.ndarray, loss_type: str) -> None:
    """Raise ValueError if labels [samples, k] of text pairs do not suit the loss."""
    values = _without_padding(labels)
    if loss_type == "infonce":
        if (values != 1).any():
            raise ValueError(
                f"--loss_type infonce: a row of the data has the label {values[values != 1][0]:g}, and each positive "
                "counts as 1. Set --loss_type contrastive or cosine_similarity, or remove the labels"
            )
    elif not labels.size or len(values) < labels.size:
        raise ValueError(
            f"--loss_type {loss_type}: a row of the data has no label to compare its pair with. Use a column label "
            "(or score), or set --loss_type infonce"
        )
    elif loss_type != "cosine_similarity" and not np.isin(values, (0, 1)).all():
        raise ValueError(f"--loss_type {loss_type}: a row of the data has another label than 0 and 1. Fix the data")


def _check_kinds(labels: np.ndarray) -> None:
    """Raise ValueError if all labels [samples, 1] are equal, so that KTO has nothing to distinguish."""
    if (labels == labels[0]).all():
        raise ValueError(
            f"--dataset: the label of every row is {'true' if labels[0, 0] else 'false'}, and KTO learns from "
            "responses of both kinds. Add rows of the other kind, or train on good responses with megatron sft"
        )


def _check_lists(documents: np.ndarray) -> None:
    """Raise ValueError if a sample has a single document (counts [samples]), which is always ranked first."""
    if (documents < 2).any():
        raise ValueError(
            "--loss_type listwise_reranker: a row of the data has one labelled document, and no negatives to rank it "
            "with. Set --loss_type pointwise_reranker, or use rows with negative_messages"
        )


def _without_padding(labels: np.ndarray) -> np.ndarray:
    """Return the labels without the padding (NaN) of shorter rows."""
    return labels[~np.isnan(labels)]
