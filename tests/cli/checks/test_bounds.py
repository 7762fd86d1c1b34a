"""Every numeric flag has bounds, and numbers outside of them are refused with the name of the flag."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from megaswift.cli.checks.common import check_training
from megaswift.cli.commands import COMMANDS, PREFERENCES, TASKS
from megaswift.cli.flags import Flag, UsageError, convert, flags_of
from megaswift.cli.parse import resolve
from megaswift.tasks import options
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.kinds import check

NEVER = ("1e300", "nan", "inf", "-inf")
LONG = ("100000000000000000000", "-100000000000000000000")
EXTREME = ("-1", "0", "1.5", *NEVER, *LONG)


def numbers(name: str) -> Iterator[Flag]:
    """Return the numeric flags of an option class."""
    for flag in flags_of(getattr(options, name)).values():
        if (get_args(flag.type)[0] if flag.is_list else flag.type) in (int, float):
            yield flag


SETS = sorted({kind.options for each in COMMANDS.values() for one in each.values() for kind in one.kinds.values()})


@pytest.mark.parametrize("name", SETS)
def test_every_numeric_flag_has_bounds(name: str) -> None:
    assert not [flag.name for flag in numbers(name) if not flag.bounds]


@pytest.mark.parametrize("name", SETS)
def test_extreme_numbers_are_accepted_or_refused_by_name(name: str) -> None:
    for flag in numbers(name):
        for value in EXTREME:
            refusal, converted = attempt(flag, value)
            assert refusal.startswith(f"--{flag.name} ") or converted in (float(value), [float(value)])
            if value in NEVER or (value in LONG and float not in (flag.type, *get_args(flag.type))):
                assert refusal, flag


def attempt(flag: Flag, value: str) -> tuple[str, Any]:
    """Return the converted value, or the error message."""
    try:
        return "", convert(flag, value, "command line")
    except UsageError as error:
        return str(error), None


@pytest.mark.parametrize("kind", ["grpo", "dpo", "embedding"])
def test_what_is_accepted_is_checked_without_a_traceback(kind: str, dense: Path) -> None:
    """A number within bounds may not fit the other options: then too it is a UsageError."""
    options_class = getattr(options, (PREFERENCES | TASKS)[kind].options)
    base = {"model": str(dense), "dataset": "d", "train_iters": "1"}
    for flag in numbers(options_class.__name__):
        for value in ("0", "1.5", "2147483647"):
            with suppress(UsageError):  # any other exception would be a traceback
                resolved, sources = resolve(options_class, base | {flag.name: value}, None)
                check_training(resolved, ProcessLayout.of(resolved.build, 1), gpus=0, processes=1, sources=sources)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--adam_beta1 1.5", "--adam_beta1 1.5: must be at least 0 and below 1."),
        ("--adam_beta2 1", "--adam_beta2 1.0: must be at least 0 and below 1."),
        ("--seed 99999999999999999999", "--seed 99999999999999999999: must be at most 2147483647 in size."),
        ("--seed -1", "--seed -1: must be at least 0."),
        ("--lr 1e300", "--lr 1e+300: must be at most 3.4e+38 in size."),
        ("--num_train_epochs 1e7", "--num_train_epochs 10000000.0: must be at most 1000000."),
        ("--profile_ranks 0 -1", "--profile_ranks -1: must be at least 0."),
        ("--lr_warmup_init 1 --lr 0.5", "--lr_warmup_init 1.0: above --lr 0.5. Set a lower one."),
    ],
)
def test_messages(words: str, message: str, dense: Path) -> None:
    with pytest.raises(UsageError) as error:
        check("causal_lm", dense, words)
    assert str(error.value) == message


def test_betas_are_those_that_torch_takes() -> None:
    import torch

    (flag,) = (flag for flag in numbers("SftOptions") if flag.name == "adam_beta1")
    for value in (-0.1, 0.0, 0.5, 0.999, 1.0, 1.5):
        refusals = []
        for use in (
            lambda: torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(value, 0.9)),  # noqa: B023
            lambda: convert(flag, value, "command line"),  # noqa: B023
        ):
            try:
                use()
            except (ValueError, UsageError):
                refusals.append(True)
        assert len(refusals) in (0, 2), value
