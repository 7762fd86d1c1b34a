"""Labels: whether the data has those that a task wants, and the head of a model that scores documents."""

from typing import Any

import numpy as np

from ...bridge.model.score_head import add_score_head, count_labels
from ...templates.dataset.store import TokenStore
from ...templates.prepare import Prepared
from ..options import (
    EmbeddingOptions,
    GenerativeRerankerOptions,
    KtoOptions,
    RerankerOptions,
    RmOptions,
    SeqClsOptions,
    SftOptions,
)


def headed(options: SftOptions, hf_config: dict[str, Any], data: Prepared, pad_token_id: int | None) -> dict[str, Any]:
    """`hf_config`, with the head that the task wants where it wants one.

    Raises ValueError where the labels of the data are not what the task, the options or the head that there is want.
    """
    stores = [store for store in (data.train, data.val) if isinstance(store, TokenStore)]
    if isinstance(options, SeqClsOptions):
        labels = options.num_labels or count_labels(hf_config)
        if labels is None:
            raise ValueError("--num_labels is missing: how many classes there are, or numbers of a regression")
        problem = options.problem_type or hf_config.get("problem_type") or _problem(labels, stores)
        for store in stores:
            _check(store.labels, labels, problem)
        return add_score_head(hf_config, labels, problem, pad_token_id=pad_token_id)
    scores = isinstance(options, RmOptions | RerankerOptions) and not isinstance(options, GenerativeRerankerOptions)
    labels = count_labels(hf_config)
    if isinstance(options, KtoOptions):
        _check_kinds(stores[0].labels)
    if isinstance(options, RerankerOptions) and options.loss_type == "listwise_reranker":
        for store in stores:
            _check_lists(store.document_counts)
    if scores:
        if labels not in (None, 1):
            raise ValueError(
                f"--model has a head with {labels} labels, and this task trains one with 1: give the model that it was "
                "made of"
            )
        return add_score_head(hf_config, 1, pad_token_id=pad_token_id)
    if isinstance(options, EmbeddingOptions):
        for store in stores:
            _check_pairs(store.labels, options.loss_type)
    if labels is not None:
        raise ValueError(
            f"--model has a head that scores documents ({labels} labels) and no output layer: this task needs the "
            "language model that it was made of"
        )
    return hf_config


def _problem(labels: int, stores: list[TokenStore]) -> str:
    """As transformers takes it from the labels' shape and type."""
    if labels == 1:
        return "regression"
    if not stores:
        raise ValueError("--problem_type is missing: of a stream it is not known what its labels are")
    widest = max(store.labels.shape[1] for store in stores)
    whole = all(np.array_equal(known, np.rint(known)) for known in (_known(store.labels) for store in stores))
    if widest > 1:
        return "multi_label_classification" if whole else "regression"
    return "single_label_classification" if whole else "regression"


def _check(given: np.ndarray, labels: int, problem: str) -> None:
    """Raise ValueError where labels [samples, k] are no classes of so many, or not as many numbers."""
    known = _known(given)
    if problem == "regression":
        if given.shape[1] != labels or len(known) < given.size:
            raise ValueError(
                f"--num_labels {labels}: a row of the data has {given.shape[1]} numbers to be predicted. Give as many"
            )
        return
    if problem == "single_label_classification" and given.shape[1] > 1:
        raise ValueError(
            "--problem_type single_label_classification: a row of the data has several labels. Give "
            "--problem_type multi_label_classification, or one label a row"
        )
    wrong = known[(known < 0) | (known >= labels) | (known != np.rint(known))]
    if len(wrong):
        raise ValueError(
            f"--num_labels {labels}: classes are counted from 0 to {labels - 1}, and a row of the data has the label "
            f"{wrong[0]:g}. Raise --num_labels, or correct the data"
        )


def _check_pairs(given: np.ndarray, loss_type: str) -> None:
    """Raise ValueError where labels [samples, k] of pairs of texts are not what the loss wants."""
    known = _known(given)
    if loss_type == "infonce":
        if (known != 1).any():
            raise ValueError(
                f"--loss_type infonce takes each positive for one, and a row of the data has the label "
                f"{known[known != 1][0]:g}. Give --loss_type contrastive or cosine_similarity, or leave labels out"
            )
    elif not given.size or len(known) < given.size:
        raise ValueError(
            f"--loss_type {loss_type} compares each pair with its label, and a row of the data has none. Give a column "
            "label (or score), or --loss_type infonce"
        )
    elif loss_type != "cosine_similarity" and not np.isin(known, (0, 1)).all():
        raise ValueError(f"--loss_type {loss_type} wants labels 0 and 1, and a row of the data has another one")


def _check_kinds(given: np.ndarray) -> None:
    """Raise ValueError where all answers are of one kind, labels [samples, 1]: nothing would tell them apart."""
    if (given == given[0]).all():
        raise ValueError(
            f"--dataset: the label of every row is {'true' if given[0, 0] else 'false'}, and KTO learns from answers "
            "of both kinds. Add rows of the other kind, or train on good answers alone with megatron sft"
        )


def _check_lists(documents: np.ndarray) -> None:
    """Raise ValueError where a sample has one document, of counts [samples]: it is the first of its list anyway."""
    if (documents < 2).any():
        raise ValueError(
            "--loss_type listwise_reranker looks for the positive among its negatives, and a row of the data has one "
            "document with a label. Give --loss_type pointwise_reranker, or rows with negative_messages"
        )


def _known(labels: np.ndarray) -> np.ndarray:
    """Those that are given: rows have as many as the longest."""
    return labels[~np.isnan(labels)]
