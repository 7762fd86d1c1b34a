"""Advantages and returns of a rollout batch's tokens, from a critic's values."""

from collections.abc import Sequence

import numpy as np

from ..losses.value import explained_variance, gae, token_rewards, whiten
from ..options import PpoOptions
from .episode import Episode


def compute_token_advantages(episodes: Sequence[Episode], options: PpoOptions) -> dict[str, float]:
    """Set the advantages and returns of each episode's tokens, and its mean advantage. Return metrics of the batch.

    Both are 0 if no reward function scored the episode. Episodes have values; with --kl_in_reward also the
    log-probabilities of the policy and the reference.
    """
    critic, advantages, masks = options.critic, list[np.ndarray](), list[np.ndarray]()
    for episode in episodes:
        assert episode.values is not None
        is_scored = not np.isnan(episode.reward)
        is_drawn = (episode.loss_mask > 0) & is_scored
        kl = None
        if options.beta and options.kl_in_reward and is_scored:
            assert episode.old_log_probs is not None
            assert episode.ref_log_probs is not None
            kl = episode.old_log_probs - episode.ref_log_probs  # k1, as in TRL's PPO
        rewards = token_rewards(episode.reward if is_scored else 0.0, kl, is_drawn, options.beta)
        of_episode, returns = gae(rewards, episode.values, is_drawn, gamma=critic.gamma, lam=critic.lam)
        episode.returns = returns.astype(np.float32)
        advantages.append(of_episode)
        masks.append(is_drawn)
    if critic.whiten_advantages:
        advantages = whiten(advantages, masks)
    for episode, of_episode, is_drawn in zip(episodes, advantages, masks, strict=True):
        episode.advantages = of_episode.astype(np.float32)
        episode.advantage = float(of_episode[is_drawn].mean()) if is_drawn.any() else 0.0
    values, returns = (_drawn([getattr(e, name) for e in episodes], masks) for name in ("values", "returns"))
    if not len(values):
        return {}
    return {
        "values/mean": float(values.mean()),
        "returns/mean": float(returns.mean()),
        "critic/explained_variance": explained_variance(values, returns),
    }


def _drawn(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all drawn tokens, in fp64."""
    return np.concatenate([array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True)])
