"""Which labels of a micro batch the output layer scores."""

import pytest
import torch
from megaswift.tasks.train.step import loss_positions


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_all_that_is_trained_on_and_few_more(share):
    weights = (torch.rand(2, 400, generator=torch.Generator().manual_seed(0)) < share).float() * 0.5
    places = loss_positions(weights)
    assert places is not None
    assert len(set(places.tolist())) == len(places)
    trained = int(weights.count_nonzero())
    assert int(weights.flatten()[places].count_nonzero()) == trained
    assert len(places) % 50 == 0
    assert max(trained, 1) <= len(places) <= trained + 50


@pytest.mark.parametrize("share", [0.96, 1.0])
def test_all_where_nearly_all_are_trained_on(share):
    assert loss_positions((torch.arange(800) < 800 * share).float().view(1, -1)) is None
