"""The learning-rate schedules, against transformers' of the same name."""

import math

import pytest
import torch
import transformers
from megaswift.bridge.options import ParallelOptions
from megaswift.tasks.optimizer import _overlaps, build_schedule
from megaswift.tasks.options import ScheduleOptions

STEPS, LR = 40, 2.0


class Optimizer:
    """What a schedule needs of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.1}]


def rates(**flags) -> list[float]:
    optimizer = Optimizer()
    options = ScheduleOptions(lr=LR, **flags)
    schedule = build_schedule(optimizer, options, 0.1, STEPS)  # type: ignore[arg-type]
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    return found


def expected(make, *args, **kwargs) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    schedule = make(optimizer, *args, **kwargs)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_cosine_with_a_warmup_and_a_floor():
    reference = expected(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=4,
        num_training_steps=STEPS,
        min_lr=0.5,
    )
    assert rates(lr_warmup_fraction=0.1, min_lr=0.5) == pytest.approx(reference)
    assert rates(lr_warmup_iters=4, min_lr=0.5) == pytest.approx(reference)


def test_linear():
    reference = expected(transformers.get_linear_schedule_with_warmup, num_warmup_steps=5, num_training_steps=STEPS)
    assert rates(lr_decay_style="linear", lr_warmup_iters=5) == pytest.approx(reference)


def test_constant():
    reference = expected(transformers.get_constant_schedule_with_warmup, num_warmup_steps=5)
    assert rates(lr_decay_style="constant", lr_warmup_iters=5) == pytest.approx(reference)


def test_inverse_square_root():
    found = rates(lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    assert found == pytest.approx([LR * min(step / 4, math.sqrt(4 / max(step, 1))) for step in range(STEPS)])


def test_warmup_stable_decay():
    found = rates(lr_decay_style="WSD", lr_warmup_iters=4, lr_wsd_decay_iters=10, lr_wsd_decay_style="linear")
    assert found[4:31] == [LR] * 27
    assert found[31:] == pytest.approx([LR * (1 - step / 10) for step in range(1, 10)])


def test_decay_that_ends_before_the_run():
    assert rates(lr_decay_iters=20, min_lr=0.5)[21:] == [0.5] * 19


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(ValueError, match="--lr_warmup_iters 40 must be less than the 40 steps of the run"):
        rates(lr_warmup_iters=40)


@pytest.mark.parametrize(
    ("flags", "processes", "expected"),
    [
        ({}, 1, (False, False)),
        ({}, 2, (True, True)),
        ({"use_distributed_optimizer": False}, 2, (True, False)),
        ({"overlap_grad_reduce": False}, 2, (False, False)),
        ({"overlap_param_gather": False}, 2, (True, False)),
        ({"overlap_grad_reduce": True}, 1, (True, False)),
    ],
)
def test_communication_is_overlapped_where_there_is_some(flags, processes, expected):
    assert _overlaps(ParallelOptions(**flags), processes) == expected
