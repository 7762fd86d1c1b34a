"""The loop around the step, where a run fails."""

import gc
from unittest.mock import MagicMock

import pytest
from megaswift.tasks.train import trainer


def test_a_run_that_fails_frees_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with what went wrong first, whatever they say to it."""
    for name in ("Flops", "Window", "RunLog", "Profile", "Stop", "StepTimes", "Watchdog", "Checkpoints", "dist"):
        monkeypatch.setattr(trainer, name, MagicMock())
    run, objective, order = MagicMock(resumed=None), MagicMock(), []

    def steps(*_):
        yield from ()
        raise ArithmeticError("a step failed")

    def let_go() -> None:
        order.append("let go")
        raise ConnectionError("no server answers")

    objective.source.steps, objective.source.let_go = steps, let_go
    train = MagicMock(loss_tokens_are_local=False)
    try:
        with pytest.raises(ArithmeticError, match="a step failed"):
            trainer.fit(run, MagicMock(), objective, train, None, 3)
    finally:
        gc.unfreeze()
    assert order == ["let go"]
