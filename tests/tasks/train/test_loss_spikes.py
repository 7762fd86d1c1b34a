"""Steps that stand out are skipped, beside OLMo-core's rule computed with NumPy."""

import json

import numpy as np
import pytest
import torch
from megaswift.tasks.train.loss_spikes import WINDOW, SpikeFilter

SIGMA = 6.0


def judged(spikes: SpikeFilter, rows: np.ndarray) -> list[float]:
    return [float(spikes.judge(*torch.tensor(row, dtype=torch.float32))) for row in rows]


def by_hand(rows: np.ndarray) -> list[float]:
    """The rule, over all rows so far."""
    counted: list[np.ndarray] = []
    found = []
    for row in rows:
        spike, past = False, np.array(counted[-WINDOW:])
        if len(past) >= WINDOW // 2:
            bound = past.mean(0) + SIGMA * np.maximum(past.std(0, ddof=1), 1e-3 * np.abs(past.mean(0)))
            spike, row = bool((row > bound).any()), np.minimum(row, bound)
        counted.append(row)
        found.append(float(spike))
    return found


def test_is_the_rule_over_a_sliding_window() -> None:
    dice = np.random.default_rng(0)
    rows = np.abs(dice.normal([2.0, 1.0], [0.05, 0.3], (4 * WINDOW, 2)))
    rows[:, 0] += np.linspace(1, 0, len(rows))  # the loss falls
    rows[[80, 200, 201, 333], [0, 1, 0, 1]] *= 50
    found = judged(SpikeFilter(SIGMA), rows)
    assert found == by_hand(rows)
    assert [step for step, spike in enumerate(found) if spike] == [80, 200, 201, 333]


def test_none_before_half_a_window_and_none_without_variation() -> None:
    assert not any(judged(SpikeFilter(SIGMA), np.array([[1.0, 1.0]] * 30 + [[1e6, 1e6]] + [[1.0, 1.0]] * 32)))
    assert not any(judged(SpikeFilter(SIGMA), np.array([[2.0, 1.0], [2.001, 1.0005]] * 80)))


def test_a_level_that_stays_is_accepted() -> None:
    """Else a run would skip every step for ever."""
    dice = np.random.default_rng(0)
    rows = np.abs(dice.normal(1.0, 0.1, (WINDOW, 2)))
    found = judged(SpikeFilter(SIGMA), np.concatenate([rows, rows + 5]))
    assert found[WINDOW]
    assert not any(found[-WINDOW // 2 :])


@pytest.mark.parametrize("at", [10, 64, 130, 200])
def test_goes_on_where_it_was(at: int) -> None:
    rows = np.abs(np.random.default_rng(1).normal(1.0, 0.2, (300, 2)))
    rows[[150, 250]] *= 40
    whole, first, second = (SpikeFilter(SIGMA) for _ in range(3))
    expected = judged(whole, rows)
    found = judged(first, rows[:at])
    second.load(json.loads(json.dumps(first.state())))
    assert found + judged(second, rows[at:]) == expected
    assert sum(expected) == 2
