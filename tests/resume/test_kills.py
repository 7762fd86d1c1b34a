"""SIGKILL at operations of a save and at random moments. The long version, at all of them: scripts/kill_test.py."""

import pytest

from tests.resume.harness import (
    BEST,
    DROPOUT,
    LAYOUTS,
    LORA,
    Case,
    Output,
    leftovers,
    newest,
)
from tests.resume.sweep import Chain, random_kills, sweep

pytestmark = pytest.mark.slow
# Of each rank, where a save has done how much: parts of labels, of which the first that is found is killed at.
MOMENTS = [
    "half:training_state/rank-00001",
    "kill:fsync v",
    "kill:rename v/.checkpoint",
    "kill:rename v/.last",
    "kill:remove",
]
ASYNC = f"{LAYOUTS['EP2']} {DROPOUT} {LORA} --async_save true"
HOST = "--optimizer_cpu_offload true --optimizer_offload_fraction 0.5 --torch_dtype bfloat16"
HOST = f"{LAYOUTS['DP2']} {DROPOUT} {HOST} --exp_avg_dtype bf16 --exp_avg_sq_dtype fp8 --async_save true"


def check(chain: Chain) -> None:
    print(chain)
    assert not chain.faults, "\n\n".join(chain.faults)
    assert chain.resumes >= chain.kills // 2 > 0


@pytest.mark.parametrize(
    ("name", "flags", "model", "moments"),
    [
        pytest.param("DP2, best kept", f"{LAYOUTS['DP2']} {DROPOUT} {BEST}", "qwen3", MOMENTS, marks=pytest.mark.long),
        pytest.param("EP2 LoRA async", ASYNC, "qwen3_moe", MOMENTS[::2], id="EP2 LoRA async"),
        pytest.param("DP2, optimizer on the host", HOST, "qwen3", MOMENTS[::2], marks=pytest.mark.long),
        pytest.param("EP2 LoRA async all", ASYNC, "qwen3_moe", MOMENTS, marks=pytest.mark.long, id="at all moments"),
    ],
)
def test_killed_within_a_save(name, flags, model, moments, place):
    case = Case(place, name, flags, model, steps=8)
    moments = [moment.split(":") for moment in moments]
    saves = [at for at in case.operations if "checkpoint-N" in at["label"] or "last" in at["label"]]
    targets = [next(at for at in saves if at["how"] == how and part in at["label"]) for how, part in moments]
    chain = sweep(case, targets)
    check(chain)
    assert not chain.missed


def test_killed_when_the_last_checkpoint_is_there_and_links_lead_elsewhere(place):
    output = Output(Case(place, "links", "", processes=None, steps=4))
    last = max((at for at in output.case.operations if "-> v/last" in at["label"]), key=lambda at: at["count"])
    output.run(last)
    assert newest(output.folder) == 4
    output.run()
    output.compare()


@pytest.mark.long
def test_nothing_is_left_of_a_run_that_was_killed_within_its_first_save(place):
    output = Output(Case(place, "first", "", processes=None, steps=4))
    at = next(at for at in output.case.operations if "manifest" in at["label"])
    for _ in range(2):
        output.run(at)
    output.run()
    assert not leftovers(output.folder)


def test_every_file_of_a_checkpoint_was_seen_being_written(place):
    """Else there are operations at which nobody is killed."""
    case = Case(place, "seen", LAYOUTS["DP2"], steps=2)
    labels = {at["label"].split("/")[-1] for at in case.reference.runs[0].operations if at["how"] == "kill"}
    files = {f.name for f in (case.reference.run_folder / "checkpoint-2").rglob("*") if f.is_file()}
    assert files <= labels


@pytest.mark.nosample
@pytest.mark.long
def test_killed_at_random_moments(place):
    case = Case(place, "TP2 async", f"{LAYOUTS['TP2']} {DROPOUT} --async_save true", steps=8)
    check(random_kills(case, 2, seed=1, first=5))  # a checkpoint is there
