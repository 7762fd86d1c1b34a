"""Losses of embeddings [samples, dimensions], fp32, of any length: what counts is the angle between two."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def matryoshka(embeddings: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Return the first entries of each embedding, for each of `dims`, at length 1: [samples, dim] each.

    A loss over all of them (https://arxiv.org/abs/2205.13147) trains embeddings that may be cut short afterwards.
    Raises ValueError for a dim that the embeddings do not have.
    """
    width = embeddings.shape[-1]
    for dim in dims:
        if not 1 <= dim <= width:
            raise ValueError(f"--mrl_dims {dim}: the model's embeddings have {width} entries. Set 1 to {width}.")
    return [F.normalize(embeddings[..., :dim], dim=-1) for dim in dims]


def infonce_losses(
    anchors: Tensor, candidates: Tensor, target: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """InfoNCE, https://arxiv.org/abs/1807.03748: -log softmax of the target's cosine / temperature among candidates.

    anchors [anchors, dimensions]; candidates [candidates, dimensions], from anywhere: other anchors' too, as
    sentence-transformers' MultipleNegativesRankingLoss has them; target [anchors] int64: the row of each anchor's
    positive; mask [anchors, candidates] bool: which take part (None: all; the target always does). -> [anchors]
    """
    cosines = F.normalize(anchors, dim=-1) @ F.normalize(candidates, dim=-1).t()
    if mask is not None:
        cosines = cosines.masked_fill(~mask.scatter(1, target[:, None], True), -torch.inf)
    return F.cross_entropy(cosines / temperature, target, reduction="none")


def contrastive_losses(first: Tensor, second: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Contrastive loss over cosine distances, https://doi.org/10.1109/CVPR.2006.100: [pairs].

    Pairs with label 1 are pulled together, those with 0 pushed apart as far as `margin`; as sentence-transformers'
    ContrastiveLoss. first, second [pairs, dimensions]; labels [pairs].
    """
    distances = _distances(first, second)
    return 0.5 * (labels * distances**2 + (1 - labels) * torch.relu(margin - distances) ** 2)


def online_contrastive_losses(first: Tensor, second: Tensor, labels: Tensor, margin: float = 0.5) -> Tensor:
    """Contrastive loss of the hard pairs alone (and without the half), 0 for the others: [pairs].

    As sentence-transformers' OnlineContrastiveLoss. Hard are pairs with label 1 that are farther apart than the
    closest of those with 0, and pairs with 0 that are closer than the farthest of those with 1; where one kind is
    missing, the mean of the other stands for it. All are looked for among these pairs.
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
    """Squared difference of each pair's cosine and its score: [pairs]; as sentence-transformers' CosineSimilarityLoss
    (https://arxiv.org/abs/1908.10084, section 3, regression objective)."""
    return (F.cosine_similarity(first, second) - scores) ** 2


def _distances(first: Tensor, second: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(first, second)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Over the chosen ones; not a number where there is none."""
    return (values * chosen).sum() / chosen.sum()
