"""Advantages of a rollout batch."""

from collections.abc import Sequence

import numpy as np
import torch

from ..losses.policy import advantages
from ..options import GrpoOptions
from .episode import Episode


def compute_advantages(episodes: Sequence[Episode], options: GrpoOptions) -> None:
    """Set the group and the advantage of each episode. The advantage is 0 if no reward function scored the episode.

    Episodes are ordered by prompt, --num_generations of each. One completion per prompt is compared with the batch.
    """
    rewards = np.array([episode.reward - episode.kl_penalty for episode in episodes])
    groups = np.arange(len(episodes)) // options.sampling.num_generations
    # https://arxiv.org/abs/2501.03262: REINFORCE++ without groups has the batch's mean as baseline.
    compares_batch = options.sampling.num_generations == 1 and options.advantage_estimator == "reinforce_plus_plus"
    peers = np.zeros_like(groups) if compares_batch else groups
    is_scored, values = ~np.isnan(rewards), np.zeros(len(episodes))
    values[is_scored] = advantages(
        torch.from_numpy(rewards[is_scored]),
        torch.from_numpy(peers[is_scored]),
        estimator=options.advantage_estimator,
        scale=options.scale_rewards,
    ).numpy()
    for episode, advantage, group in zip(episodes, values.tolist(), groups.tolist(), strict=True):
        episode.advantage, episode.group = advantage, group
