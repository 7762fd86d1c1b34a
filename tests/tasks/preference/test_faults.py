"""Faults that are planted show in what the other tests compare."""

import pytest

from tests.tasks.preference.runs import Place, assert_same_steps

pytestmark = [pytest.mark.slow, pytest.mark.long]
LORA = "--tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 --merge_lora false --lr 1e-2"
OF_ONE_RANK = "preference.dist = SimpleNamespace(all_reduce=lambda *arguments, **named: None)"
WITH_ADAPTERS = (
    "reference_model._bind_adapter_switch = "
    "lambda model, forward: reference_model._bind_frozen_model(model, forward, offloads=False)"
)
OF_THE_OTHER_ANSWER = """
right = reference_model.PrecomputedLogProbs._indices
def wrong(table, batch):
    samples, parts = right(table, batch)
    return samples, 1 - parts
Table = reference_model.PrecomputedLogProbs
Table._indices = lambda table, batch: right(table, batch) if not table.filled else wrong(table, batch)
Table.filled = False
made = Table.__init__
def fill(table, *arguments):
    made(table, *arguments)
    table.filled = True
Table.__init__ = fill
"""


@pytest.mark.parametrize(
    ("kind", "flags", "processes", "base", "fault"),
    [
        pytest.param(
            "dpo",
            "--context_parallel_size 2",
            2,
            "",
            "objective.context_parallel_share = lambda value, groups: value",
            id="whole shares",
        ),
        pytest.param("kto", "--micro_batch_size 1", 2, "", OF_ONE_RANK, id="one rank's KL"),
        pytest.param("dpo", LORA, None, LORA, WITH_ADAPTERS, id="a reference with adapters"),
        pytest.param("dpo", "--precompute_ref_log_probs true", None, "", OF_THE_OTHER_ANSWER, id="the other answer's"),
    ],
)
def test_faults_show(kind: str, flags: str, processes: int | None, base: str, fault: str, place: Place) -> None:
    broken = place.run(kind, flags, processes, fault=fault)
    with pytest.raises(AssertionError):
        assert_same_steps(broken, place.run(kind, base))
