"""Advantages of a rollout batch: scaled rewards, KL penalties, an estimator, whitening and clipping."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..losses.kl import adapted_kl_coefficient, kl_estimates
from ..losses.policy import advantages
from ..losses.reward_scaling import RunningMoments, clip, is_within_difficulty
from ..losses.value import gae, token_rewards, whiten
from ..options import GrpoOptions
from .episode import Episode


class AdvantageEstimator:
    """Estimator of advantages, with its state between rollout batches. Every rank has an instance and the same state.

    The state is the coefficient of the KL penalty (--target_kl) and the moments of all rewards (--normalize_rewards).
    """

    def __init__(self, options: GrpoOptions):
        self.options = options
        self.kl_coefficient = self.penalty_coefficient = options.beta  # for the next rollout batch, and for this one
        self.moments = RunningMoments()

    def __call__(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Set the groups and the advantages of a rollout batch, and return its metrics.

        Episodes are ordered by prompt, --num_generations of each. One that no reward function scores has an advantage
        of 0.
        """
        options, metrics = self.options, dict[str, float]()
        for number, episode in enumerate(episodes):
            episode.group = number // options.sampling.num_generations
        if options.advantages.difficulty_range:
            metrics |= exclude_by_difficulty(episodes, *options.advantages.difficulty_range)
        rewards, scaling_metrics = self.scaled_rewards(episodes)
        metrics |= scaling_metrics
        divergences = None
        if options.kl_in_reward and options.beta:
            divergences = [kl_of_tokens(episode, options.policy.kl_estimator or "k1") for episode in episodes]
            metrics |= self.penalize(episodes, divergences)
        metrics |= self._estimate(episodes, rewards, divergences)
        if options.advantages.whiten_advantages:
            self._whiten(episodes)
        if options.advantages.advantage_clip is not None:
            metrics["advantages/clip_ratio"] = self._clip(episodes, options.advantages.advantage_clip)
        return metrics

    def scaled_rewards(self, episodes: Sequence[Episode]) -> tuple[np.ndarray, dict[str, float]]:
        """Return the normalized and clipped rewards, fp64 [episodes], NaN for unscored ones, and metrics.

        The moments include this batch.
        """
        options, metrics = self.options.advantages, dict[str, float]()
        rewards = np.array([episode.reward for episode in episodes], np.float64)
        is_scored = ~np.isnan(rewards)
        if options.normalize_rewards:
            self.moments.update(rewards[is_scored])
            rewards = self.moments.normalize(rewards)
        if options.reward_clip is not None:
            rewards, is_clipped = clip(rewards, options.reward_clip)
            metrics["rewards/clip_ratio"] = float(is_clipped[is_scored].mean()) if is_scored.any() else 0.0
        return rewards, metrics

    def penalize(self, episodes: Sequence[Episode], divergences: Sequence[np.ndarray]) -> dict[str, float]:
        """Set the episodes' KL penalties, adapt the coefficient for the next batch, and return metrics.

        divergences [length] of each episode, 0 on tokens that the model did not draw.
        """
        coefficient, options = self.kl_coefficient, self.options.advantages
        self.penalty_coefficient = coefficient
        for episode, divergence in zip(episodes, divergences, strict=True):
            episode.kl_penalty = coefficient * float(divergence.sum())
        means = [
            divergence.sum() / max(episode.length, 1)
            for episode, divergence in zip(episodes, divergences, strict=True)
        ]  # fmt: skip
        kl = float(np.mean(means))
        if options.target_kl is not None:
            self.kl_coefficient = adapted_kl_coefficient(
                coefficient, kl, target=options.target_kl, horizon=options.kl_horizon, completions=len(episodes)
            )
        return {"reward_kl": kl, "kl_coef": coefficient}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"kl_coefficient": self.kl_coefficient, "moments": vars(self.moments)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.moments = RunningMoments(**state["moments"])
        if self.options.advantages.target_kl is not None:  # else --beta, which a resumed run may change
            self.kl_coefficient = state["kl_coefficient"]

    def _estimate(
        self, episodes: Sequence[Episode], rewards: np.ndarray, divergences: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Set the advantages from the rewards [episodes] and the divergences of tokens. Return metrics."""
        if self.options.advantage_estimator == "reinforce" and divergences is not None:
            self._set_returns(episodes, rewards, divergences)
        else:
            set_advantages(episodes, rewards, self.options)
        return {}

    def _set_returns(self, episodes: Sequence[Episode], rewards: np.ndarray, divergences: Sequence[np.ndarray]) -> None:
        """Set the advantages of tokens: the sum of the rewards of each token and of those after it (REINFORCE)."""
        for episode, reward, divergence in zip(episodes, rewards.tolist(), divergences, strict=True):
            is_drawn = episode.loss_mask > 0
            score = 0.0 if np.isnan(reward) else reward
            by_token = token_rewards(score, divergence, is_drawn, self.penalty_coefficient)
            returns = gae(by_token, np.zeros(len(is_drawn)), is_drawn, gamma=1.0, lam=1.0)[1]
            episode.advantages = np.zeros(len(is_drawn), np.float32)
            set_token_advantages(episode, returns * (not np.isnan(reward)), self._is_trained(episode))

    def _whiten(self, episodes: Sequence[Episode]) -> None:
        """Whiten the advantages over the trained tokens of all scored episodes."""
        masks = [self._is_trained(episode) & (not np.isnan(episode.reward)) for episode in episodes]
        whitened = whiten([advantages_of(episode) for episode in episodes], masks)
        for episode, values, mask in zip(episodes, whitened, masks, strict=True):
            set_token_advantages(episode, values, mask)

    def _clip(self, episodes: Sequence[Episode], bound: float) -> float:
        """Clip the advantages, and return the share of trained tokens that were outside."""
        clipped_tokens = tokens = 0
        for episode in episodes:
            is_trained = self._is_trained(episode)
            values, is_clipped = clip(advantages_of(episode), bound)
            set_token_advantages(episode, values, is_trained)
            clipped_tokens, tokens = clipped_tokens + int(is_clipped[is_trained].sum()), tokens + int(is_trained.sum())
        return clipped_tokens / max(tokens, 1)

    def _is_trained(self, episode: Episode) -> np.ndarray:
        return episode.trained_tokens(drop_truncated=self.options.overlong_filter) > 0


def set_advantages(episodes: Sequence[Episode], rewards: np.ndarray, options: GrpoOptions) -> None:
    """Set the advantage of each episode from the rewards [episodes] less the KL penalties; 0 for a reward of NaN.

    One completion per prompt is compared with the batch by reinforce_plus_plus.
    """
    rewards = rewards - np.array([episode.kl_penalty for episode in episodes])
    groups = np.array([episode.group for episode in episodes])
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
    for episode, advantage in zip(episodes, values.tolist(), strict=True):
        episode.advantage = advantage


def exclude_by_difficulty(episodes: Sequence[Episode], low: float, high: float) -> dict[str, float]:
    """Exclude the episodes of prompts outside of --difficulty_range from the loss, and return their share."""
    rewards, groups = (np.array([getattr(episode, name) for episode in episodes]) for name in ("reward", "group"))
    is_within = is_within_difficulty(rewards, groups, low, high)
    for episode, is_kept in zip(episodes, is_within.tolist(), strict=True):
        episode.is_excluded = not is_kept
    return {"completions/excluded_ratio": float((~is_within).mean())}


def kl_of_tokens(episode: Episode, estimator: str) -> np.ndarray:
    """Return the KL divergence of the policy before the steps from the reference: fp64 [length], 0 on other tokens."""
    assert episode.old_log_probs is not None
    assert episode.ref_log_probs is not None
    old, ref = (torch.from_numpy(values).double() for values in (episode.old_log_probs, episode.ref_log_probs))
    return kl_estimates(old, ref, estimator).numpy() * (episode.loss_mask > 0)


def advantages_of(episode: Episode) -> np.ndarray:
    """Return the advantage of each token: fp64 [length]."""
    if episode.advantages is not None:
        return episode.advantages.astype(np.float64)
    return np.full(len(episode.tokens), episode.advantage)


def set_token_advantages(episode: Episode, values: np.ndarray, is_trained: np.ndarray) -> None:
    """Set the advantages of tokens [length] and their mean, or the one that all trained tokens of the episode share."""
    trained_values = values[is_trained] if is_trained.any() else np.zeros(1)
    if episode.advantages is None:
        episode.advantage = float(trained_values[0])
    else:
        episode.advantages, episode.advantage = values.astype(np.float32), float(trained_values.mean())
