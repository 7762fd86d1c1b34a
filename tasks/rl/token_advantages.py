"""Advantages and returns of a rollout batch's tokens, from a critic's values."""

from collections.abc import Sequence

import numpy as np

from ..losses.value import explained_variance, gae, token_rewards
from ..options import PpoOptions
from .advantages import AdvantageEstimator, set_token_advantages
from .episode import Episode


class CriticAdvantageEstimator(AdvantageEstimator):
    """Estimator of advantages and returns of tokens from episodes that have a critic's values."""

    def __init__(self, options: PpoOptions):
        super().__init__(options)
        self.critic_options = options.critic

    def _estimate(
        self, episodes: Sequence[Episode], rewards: np.ndarray, divergences: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Set the advantages and returns of each episode's tokens. Return metrics of the batch.

        Both are 0 if no reward function scored the episode.
        """
        critic, masks = self.critic_options, list[np.ndarray]()
        for number, episode in enumerate(episodes):
            assert episode.values is not None
            is_scored = not np.isnan(rewards[number])
            is_drawn = (episode.loss_mask > 0) & is_scored
            divergence = None if divergences is None else divergences[number]
            score = float(rewards[number]) if is_scored else 0.0
            by_token = token_rewards(score, divergence, is_drawn, self.penalty_coefficient)
            advantages, returns = gae(by_token, episode.values, is_drawn, gamma=critic.gamma, lam=critic.lam)
            episode.returns, episode.advantages = returns.astype(np.float32), np.zeros(len(is_drawn), np.float32)
            set_token_advantages(episode, advantages, is_drawn)
            masks.append(is_drawn)
        values, returns = (_select_drawn([getattr(e, name) for e in episodes], masks) for name in ("values", "returns"))
        if not len(values):
            return {}
        return {
            "values/mean": float(values.mean()),
            "returns/mean": float(returns.mean()),
            "critic/explained_variance": explained_variance(values, returns),
        }


def _select_drawn(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all drawn tokens, in fp64."""
    return np.concatenate([array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True)])
