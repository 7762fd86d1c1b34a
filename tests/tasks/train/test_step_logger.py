"""When the lines of steps are written."""

from unittest.mock import MagicMock

import pytest
import torch
from megaswift.tasks.train import step_logger

PARTS = "Flops", "RunLog", "MetricsAccumulator", "StepTimes", "StepTimer", "peak_flops", "auxiliary_losses"


@pytest.mark.parametrize(("on_gpu", "lines"), [(True, [[1], [1], [1, 2]]), (False, [[1], [1, 2], [1, 2, 3]])])
def test_the_first_line_does_not_wait_for_the_next_step(
    on_gpu: bool, lines: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PARTS:
        monkeypatch.setattr(step_logger, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(step_logger, "flag_values", lambda options: {})
    state = MagicMock()
    state.model.vision = None
    logger = step_logger.StepLogger(MagicMock(resumed=None), state, MagicMock(loop=None), 3)
    logger.metrics.reduce.return_value = lambda: ({}, 0, 0.0)  # pyright: ignore[reportAttributeAccessIssue]
    written: list[int] = []
    logger.on_line = lambda step, values: written.append(step)
    seen = []
    for step in (1, 2, 3):
        result = MagicMock(is_overflow=False, is_spike=False)
        logger.post_step(MagicMock(step=step, evaluates=False, saves=False, skips_update=False, result=result))
        seen.append([*written])
    assert seen == lines
    # Numbers are read when their step has ended: the second step of a GPU has, before the third is updated.
    assert state.synchronize.call_count == (1 if on_gpu else 3)
