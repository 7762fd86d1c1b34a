"""Advantages of tokens and the value loss beside their definitions, by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from megaswift.tasks.losses.value import explained_variance, gae, token_rewards, value_losses, whiten

floats = st.floats(-3, 3, width=32)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values, and which tokens the model drew."""
    length = draw(st.integers(1, 12))
    rewards, values = (draw(arrays.arrays(np.float64, length, elements=floats)) for _ in range(2))
    return rewards, values, draw(arrays.arrays(np.bool_, length))


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Sums of (gamma lam)^l delta_(t+l), each by itself."""
    after = [*values, 0.0][1:]
    deltas = [reward + gamma * later - value for reward, value, later in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** (later - first) * deltas[later] for later in range(first, len(deltas)))
        for first in range(len(deltas))
    ]


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_advantages_are_the_sums_of_the_definition(episode, gamma, lam):
    rewards, values, drawn = episode
    advantages, returns = gae(rewards, values, drawn, gamma=gamma, lam=lam)
    expected = by_definition(rewards[drawn].tolist(), values[drawn].tolist(), gamma, lam)
    np.testing.assert_allclose(advantages[drawn], expected, atol=1e-12)
    np.testing.assert_allclose(returns[drawn], np.array(expected) + values[drawn], atol=1e-12)
    assert not advantages[~drawn].any()
    assert not returns[~drawn].any()


@given(episodes(), st.floats(0, 1))
@settings(deadline=None)
def test_lambda_1_is_the_return_less_the_value_and_0_is_one_step(episode, gamma):
    rewards, values, drawn = episode
    count = int(drawn.sum())
    of_drawn, before = rewards[drawn], values[drawn]
    discounted = [sum(gamma ** (k - t) * of_drawn[k] for k in range(t, count)) for t in range(count)]
    np.testing.assert_allclose(gae(rewards, values, drawn, gamma=gamma, lam=1)[1][drawn], discounted, atol=1e-12)
    step = of_drawn + gamma * np.append(before[1:], 0)[:count] - before
    np.testing.assert_allclose(gae(rewards, values, drawn, gamma=gamma, lam=0)[0][drawn], step, atol=1e-12)


def test_numbers_by_hand():
    """From the last token: 1 - 0.3; 0.2 + 0.9 x 0.3 + 0.2 + 0.72 x 0.7; and so on."""
    rewards, values = np.array([0.0, -0.1, 0.2, 1.0]), np.array([0.5, 0.4, -0.2, 0.3])
    advantages, returns = gae(rewards, values, np.ones(4, bool), gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, [-0.0209984, 0.16528, 1.174, 0.7], atol=1e-12)
    np.testing.assert_allclose(returns, [0.4790016, 0.56528, 0.974, 1.0], atol=1e-12)


def test_tokens_that_were_not_drawn_are_skipped():
    """An environment's answer between two turns changes nothing, whatever its values are."""
    rewards, values = np.array([0.1, 0.2, 0.7]), np.array([0.3, -0.1, 0.6])
    expected, _ = gae(rewards, values, np.ones(3, bool), gamma=0.9, lam=0.7)
    with_answer, drawn = np.insert(values, 1, [9.0, -9.0]), np.array([1, 0, 0, 1, 1], bool)
    advantages, _ = gae(np.insert(rewards, 1, [5.0, 5.0]), with_answer, drawn, gamma=0.9, lam=0.7)
    np.testing.assert_allclose(advantages[drawn], expected)


def test_rewards_of_tokens():
    kl, drawn = np.array([9.0, 0.5, -1.0, 9.0, 2.0, 9.0], np.float32), np.array([0, 1, 1, 0, 1, 0], bool)
    np.testing.assert_allclose(token_rewards(1.5, kl, drawn, 0.1), [0, -0.05, 0.1, 0, 1.3, 0])
    np.testing.assert_allclose(token_rewards(1.5, None, drawn, 0.1), [0, 0, 0, 0, 1.5, 0])
    assert not token_rewards(1.5, kl, np.zeros(6, bool), 0.1).any()


@given(st.lists(episodes(), min_size=1, max_size=4))
@settings(deadline=None)
def test_whitened_advantages(group):
    """Over the drawn tokens of all episodes together, beside torch."""
    advantages, drawn = [episode[0] for episode in group], [episode[2] for episode in group]
    white = whiten(advantages, drawn)
    values = torch.cat([torch.from_numpy(a[d]) for a, d in zip(advantages, drawn, strict=True)])
    assert all(np.isfinite(episode).all() for episode in white)
    assert not any(episode[~d].any() for episode, d in zip(white, drawn, strict=True))
    if len(values) > 1:
        expected = (values - values.mean()) * torch.rsqrt(values.var() + 1e-8)
        whitened = np.concatenate([episode[d] for episode, d in zip(white, drawn, strict=True)])
        np.testing.assert_allclose(whitened, expected.numpy(), rtol=1e-6, atol=1e-6)


def test_equal_advantages_are_whitened_to_0():
    for count in (1, 5):
        (white,) = whiten([np.full(count, 0.7)], [np.ones(count, bool)])
        np.testing.assert_allclose(white, np.zeros(count), atol=1e-6)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "is_clipped"),
    [  # the old value is 1, it may move by 0.2, the return is 2
        (1.1, 0.405, -0.9, False),
        (1.5, 0.32, 0.0, True),  # too fast towards the return: the clipped value is further away
        (0.5, 1.125, -1.5, False),  # away from it: the value itself is
        (2.5, 0.32, 0.0, True),
        (3.5, 1.125, 1.5, False),
    ],
)
def test_clipped_value_loss(value, loss, slope, is_clipped):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    losses, clipped = value_losses(values, torch.ones(1).double(), torch.full((1,), 2.0).double(), 0.2)
    losses.sum().backward()
    assert values.grad is not None
    np.testing.assert_allclose([losses.item(), values.grad.item()], [loss, slope], atol=1e-9)
    assert clipped.item() == is_clipped


def test_explained_variance():
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns + 5, returns) == 1.0  # a constant error is no variance
    assert explained_variance(np.zeros(4), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert explained_variance(returns, np.ones(4)) == 0.0
