"""REAL's loss of a prompt's completions, which are labelled by their rewards: https://arxiv.org/abs/2602.05630."""

from typing import NamedTuple

import torch
from torch import Tensor

from .policy import LARGEST_EXPONENT


class ScoredGroups(NamedTuple):
    """Shares of the loss of whole groups by sample [samples], so that micro batches need not hold groups."""

    losses: Tensor  # share of its group's loss
    slopes: Tensor  # derivative of the loss by the sample's score


@torch.no_grad()
def score_groups(
    scores: Tensor, advantages: Tensor, groups: Tensor, is_member: Tensor, temperature: float
) -> ScoredGroups:
    """Return losses and slopes whose means over all samples are those of the mean loss over groups.

    A group's loss is log(1 + sum of exp(score / temperature) over its negatives) + log(1 + sum of
    exp(-score / temperature) over its positives), those with an advantage above 0; 0 without any of one of them.
    scores [samples] fp64: mean log ratios of the policy to the one that has sampled; groups [samples] int64: of any
    numbers; is_member [samples] bool: whether a sample counts. Takes all samples of a step.
    """
    numbers, places = groups.unique(return_inverse=True)

    def group_sums(values: Tensor) -> Tensor:
        return values.new_zeros(len(numbers)).index_add(0, places, values)

    signs = torch.where(advantages > 0, -1.0, 1.0).to(scores)
    terms = (signs * scores / temperature).clamp(max=LARGEST_EXPONENT).exp() * is_member
    is_positive = signs < 0
    sides, counts = [], []
    for side in (is_positive, ~is_positive):
        sides.append(group_sums(terms * side))
        counts.append(group_sums((side & is_member).to(scores)))
    is_mixed = (counts[0] > 0) & (counts[1] > 0)
    losses = (sides[0].log1p() + sides[1].log1p()) / (counts[0] + counts[1]).clamp(min=1) * is_mixed
    slopes = signs / temperature * terms / (1 + torch.where(is_positive, sides[0][places], sides[1][places]))
    samples_per_group = len(scores) / max(len(numbers), 1)
    counted = is_member & is_mixed[places]
    return ScoredGroups(losses[places] * counted * samples_per_group, slopes * counted * samples_per_group)
