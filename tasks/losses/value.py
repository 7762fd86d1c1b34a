"""Critic's side of PPO (https://arxiv.org/abs/1707.06347): advantages and returns of tokens, and the value loss.

Advantages are computed on the host in fp64, an episode at a time: there is one number per token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def token_rewards(score: float, kl: np.ndarray | None, is_drawn: np.ndarray, beta: float) -> np.ndarray:
    """Return the reward of each token of an episode: fp64 [length], 0 on tokens that the model did not draw.

    The last drawn token has the score. kl [length]: KL divergence from the reference by token; each drawn token has a
    reward of -beta x its own. None: no such rewards.
    """
    rewards = np.zeros(len(is_drawn)) if kl is None else -beta * kl.astype(np.float64) * is_drawn
    if is_drawn.any():
        rewards[np.flatnonzero(is_drawn)[-1]] += score
    return rewards


def gae(
    rewards: np.ndarray, values: np.ndarray, is_drawn: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return generalized advantage estimates and returns of an episode's tokens: fp64 [length] each.

    values [length]: expected return before a token is drawn. is_drawn [length]: tokens that the model drew. The others,
    such as another turn's prompt, are skipped: they have 0, and the next drawn token follows the one before them.
    The value after the last token is 0. Source: https://arxiv.org/abs/1506.02438.
    """
    drawn = np.flatnonzero(is_drawn)
    advantages, returns = np.zeros(len(is_drawn)), np.zeros(len(is_drawn))
    next_value = next_advantage = 0.0
    for token in drawn[::-1]:
        value = float(values[token])
        delta = float(rewards[token]) + gamma * next_value - value
        next_value, next_advantage = value, delta + gamma * lam * next_advantage
        advantages[token], returns[token] = next_advantage, next_advantage + value
    return advantages, returns


def whiten(advantages: Sequence[np.ndarray], is_drawn: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return advantages with mean 0 and standard deviation 1 over the drawn tokens of all episodes, 0 elsewhere.

    advantages, is_drawn: [length] of each episode. The variance is unbiased, and 1e-8 is added to it, as in TRL.
    """
    values = np.concatenate([of_episode[drawn] for of_episode, drawn in zip(advantages, is_drawn, strict=True)])
    if not len(values):
        return [np.zeros(len(of_episode)) for of_episode in advantages]
    mean, variance = values.mean(), values.var(ddof=1) if len(values) > 1 else 0.0
    scale = 1 / np.sqrt(variance + 1e-8)
    return [
        np.where(drawn, (of_episode - mean) * scale, 0.0)
        for of_episode, drawn in zip(advantages, is_drawn, strict=True)
    ]


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Return the clipped squared error of each value, and where clipping raised it: fp32 [tokens] each.

    old_values [tokens]: values before the steps on this rollout batch, from which a value may move by `cliprange`.
    """
    clipped = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    losses, clipped_losses = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(losses, clipped_losses), (clipped_losses > losses).float()


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Return the share of the variance of `returns` [tokens] that `values` [tokens] explain; 1: all, 0: none."""
    variance = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
