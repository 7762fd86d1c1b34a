"""Runs of preference training that are killed go on bit for bit: reference, precomputed log-probabilities, heads."""

import pytest

from tests.resume.harness import DROPOUT, LAYOUTS, LORA, Case, Output

pytestmark = pytest.mark.slow
PAIRS, LABELLED = "--dataset pairs.jsonl", "--dataset labelled.jsonl"
CASES = {
    "dpo DP2": ("rlhf --rlhf_type dpo " + PAIRS, f"{LAYOUTS['DP2']} {DROPOUT}"),
    "dpo TP2 LoRA, precomputed": (
        "rlhf --rlhf_type dpo " + PAIRS,
        f"{LAYOUTS['TP2']} {LORA} {DROPOUT} --precompute_ref_log_probs true",
    ),
    "kto PP2 LoRA": ("rlhf --rlhf_type kto " + LABELLED, f"{LAYOUTS['PP2']} {LORA}"),
    "rm DP2": ("rlhf --rlhf_type rm " + PAIRS, LAYOUTS["DP2"]),
    "rm TP2, megatron-core's format": (
        "rlhf --rlhf_type rm " + PAIRS,
        f"{LAYOUTS['TP2']} --save_safetensors false",
    ),
}
SHORT = "dpo TP2 LoRA, precomputed", "rm DP2"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in CASES])
def test_killed_and_resumed(name, place):
    command, flags = CASES[name]
    case = Case(place, name.replace(",", "").replace("'", ""), flags, steps=6, command=command)
    output = Output(case)
    for at in ({"rank": 0, "label": "step 4", "count": 1, "how": "kill"}, _within_a_save(case)):
        assert output.run(at).killed
    output.run()
    output.compare()


def _within_a_save(case: Case) -> dict:
    saves = [at for at in case.operations if at["rank"] == 0 and "manifest" in at["label"]]
    return saves[-1]
