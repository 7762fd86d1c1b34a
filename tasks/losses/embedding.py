"""Losses of embeddings [samples, dimensions], fp32. They depend on cosines only, not on lengths."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def matryoshka(embeddings: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Return each embedding truncated to each of `dims` and normalized: [samples, dim] each.

    A loss over all of them trains embeddings that can be truncated (https://arxiv.org/abs/2205.13147). Raises
    ValueError for a dim beyond the embeddings' width.
    """
    width = embeddings.shape[-1]
    for dim in dims:
        if not 1 <= dim <= width:
            raise ValueError(f"--mrl_dims {dim}: the model's embeddings have {width} entries. Set 1 to {width}.")
    return [F.normalize(embeddings[..., :dim], dim=-1) for dim in dims]


def infonce_losses(
    anchors: Tensor, candidates: Tensor, target: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """Return each anchor's InfoNCE loss, -log softmax of cosine / temperature at its positive: [anchors].

    anchors [anchors, dimensions]
    candidates [candidates, dimensions]: may include other anchors' documents, as in sentence-transformers'
        MultipleNegativesRankingLoss
    target [anchors] int64: index of each anchor's positive among the candidates
    mask [anchors, candidates] bool: candidates of each anchor besides its positive; None: all
    Source: https://arxiv.org/abs/1807.03748
    """
    cosines = F.normalize(anchors, dim=-1) @ F.normalize(candidates, dim=-1).t()
    if mask is not None:
        cosines = cosines.masked_fill(~mask.scatter(1, target[:, None], True), -torch.inf)
    return F.cross_entropy(cosines / temperature, target, reduction="none")


def contrastive_losses(first: Tensor, second: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Return the contrastive loss of cosine distances: [pairs]. https://doi.org/10.1109/CVPR.2006.100

    Pairs with label 1 are pulled together, those with label 0 pushed apart up to `margin`, as in
    sentence-transformers' ContrastiveLoss. first, second [pairs, dimensions]; labels [pairs].
    """
    distances = _distances(first, second)
    return 0.5 * (labels * distances**2 + (1 - labels) * torch.relu(margin - distances) ** 2)


def online_contrastive_losses(first: Tensor, second: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Return the contrastive loss (without the factor 0.5) of hard pairs, 0 for other pairs: [pairs].

    As in sentence-transformers' OnlineContrastiveLoss. Hard positives (label 1) are farther apart than the closest
    negative pair, hard negatives (label 0) closer than the farthest positive pair. Without pairs of one label, the
    other label's mean distance replaces that extreme.
    """
    distances = _distances(first, second)
    if not len(labels):
        return distances
    positive, negative = labels == 1, labels == 0
    farthest = distances.masked_fill(~positive, -torch.inf).max()
    closest = distances.masked_fill(~negative, torch.inf).min()
    farthest = torch.where(positive.any(), farthest, _mean(distances, negative))
    closest = torch.where(negative.any(), closest, _mean(distances, positive))
    pulled = torch.where(positive & (distances > closest), distances**2, 0.0)
    pushed = torch.where(negative & (distances < farthest), torch.relu(margin - distances) ** 2, 0.0)
    return pulled + pushed


def cosine_similarity_losses(first: Tensor, second: Tensor, scores: Tensor) -> Tensor:
    """Return the squared difference of each pair's cosine and its score: [pairs].

    As in sentence-transformers' CosineSimilarityLoss (https://arxiv.org/abs/1908.10084, section 3, regression
    objective).
    """
    return (F.cosine_similarity(first, second) - scores) ** 2


def _distances(first: Tensor, second: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(first, second)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask; NaN if it is empty."""
    return (values * mask).sum() / mask.sum()
