"""What of a step a micro batch's loss is told, where there are fewer completions than places for them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.rl.policy_loss import PolicyLoss
from megaswift.templates.batching.collator import BatchLayout
from megaswift.templates.batching.episode_batches import BatchPlan, Sequences
from megatron.core import parallel_state

pytestmark = pytest.mark.usefixtures("one_process")
LENGTHS, ADVANTAGES = [5, 7, 4], [1.0, -0.5, 2.0]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: SimpleNamespace(size=lambda: 1))


def sequences(untrained: int = 0) -> Sequences:
    """Of a prompt of two tokens each; the last ones were cut off."""
    trained = len(LENGTHS) - untrained
    weights = [np.array([0.0, 0.0] + [float(at < trained)] * (n - 2), np.float32) for at, n in enumerate(LENGTHS)]
    log_probs = [np.full(n, -1.0, np.float32) for n in LENGTHS]
    return Sequences([np.arange(n, dtype=np.int32) for n in LENGTHS], weights, ADVANTAGES, log_probs)


def sums(given: Sequences, ranks: int, multiple: int, **options) -> dict[str, float]:
    """The shares of all micro batches and ranks, of a model that agrees with the engine."""
    found: dict[str, float] = {}
    for rank in range(ranks):
        loss = PolicyLoss(compose(GrpoOptions, epsilon_high=0.2, beta=0.0, **options))
        plan = BatchPlan(BatchLayout(stage="prompts"), 1, rank, ranks, pack_length=8, multiple=multiple)
        batches = plan.batches(given)
        loss.begin_step(given, batches)
        for batch in batches:
            _, metrics = loss(batch, torch.full_like(batch.loss_weights, -1.0))
            for name, value in metrics.items():
                found[name] = found.get(name, 0.0) + value.item()
    return found


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_mean_over_micro_batches_is_over_those_with_a_completion(ranks, multiple):
    found = sums(sequences(), ranks, multiple, loss_type="bnpo")
    assert found["loss"] == pytest.approx(-sum(ADVANTAGES) / 3)


def test_a_mean_over_completions_is_over_those_with_a_token():
    """Model and engine agree: their ratio is 1, also where completions are left out."""
    for untrained in (0, 1, 2):
        found = sums(sequences(untrained), 2, 1, rollout_importance_sampling_mode="sequence_truncate")
        assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)
    assert found["loss"] == pytest.approx(-ADVANTAGES[0] / 3)  # of all three completions
