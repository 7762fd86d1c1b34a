"""The trainer, where a run fails."""

import gc
from unittest.mock import MagicMock

import pytest
from megaswift.tasks.train import trainer


def test_a_run_that_fails_frees_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with what went wrong first, whatever they say to it."""
    for name in ("StepLogger", "Profile", "Stop", "Watchdog", "Checkpointer", "EvalCommandCallback"):
        monkeypatch.setattr(trainer, name, MagicMock())
    run, objective, order = MagicMock(resumed=None), MagicMock(), []

    def release() -> None:
        order.append("released")
        raise ConnectionError("no server answers")

    objective.loop.train.side_effect = ArithmeticError("a step failed")
    objective.loop.release = release
    try:
        with pytest.raises(ArithmeticError, match="a step failed"):
            trainer.Trainer(run, MagicMock(), objective, MagicMock(), None, 3).fit()
    finally:
        gc.unfreeze()
    assert order == ["released"]
