"""Runs of preference training, and of heads, that are killed go on bit for bit."""

from dataclasses import replace

import pytest

from tests.resume.harness import DROPOUT, LAYOUTS, LORA, Case, Output

pytestmark = pytest.mark.slow
PAIRS, LABELLED = "--dataset pairs.jsonl", "--dataset labelled.jsonl"
CLASSES, TEXTS = "--dataset classes.jsonl --num_labels 3", "--dataset texts.jsonl"
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
    "classes PP2": ("sft --task_type seq_cls " + CLASSES, f"{LAYOUTS['PP2']} {DROPOUT}"),
    "classes EP2 LoRA": ("sft --task_type seq_cls " + CLASSES, f"{LAYOUTS['EP2']} {LORA}"),
    "embedding DP2": ("sft --task_type embedding " + TEXTS, f"{LAYOUTS['DP2']} {DROPOUT}"),
    "reranker TP2 LoRA": ("sft --task_type reranker " + TEXTS, f"{LAYOUTS['TP2']} {LORA} --max_length 1024"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_killed_and_resumed(name, place):
    command, flags = CASES[name]
    model = "qwen3_moe" if "EP2" in name else "qwen3"
    case = Case(place, name.replace(",", "").replace("'", ""), flags, model, steps=6, command=command)
    output = Output(case)
    for at in ({"rank": 0, "label": "step 4", "count": 1, "how": "kill"}, _within_a_save(case)):
        assert output.run(at).killed
    output.run()
    output.compare()


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        pytest.param("dpo DP2", "model", marks=pytest.mark.long),
        pytest.param("kto PP2 LoRA", "adapters", marks=pytest.mark.long),
        pytest.param("rm TP2, megatron-core's format", "mcore_model", marks=pytest.mark.long),
        pytest.param("dpo, megatron-core's format", "mcore_model", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_given_as_the_weights(name, flag, place):
    """--finetune false: the reference is what the run began from, not the checkpoint."""
    cases = CASES | {"dpo, megatron-core's format": (CASES["dpo DP2"][0], f"{LAYOUTS['TP2']} --save_safetensors false")}
    command, flags = cases[name]
    case = Case(place, f"{flag} {name}".replace(",", "").replace("'", ""), flags, steps=6, command=command)
    output = Output(case)
    assert output.run({"rank": 0, "label": "step 3", "count": 1, "how": "kill"}).killed
    output.flags = "--finetune false --save_total_limit 2"
    for base, end in ((2, 5), (4, None)):  # the second time from a checkpoint of a run that went on so
        given = output.run_folder / f"checkpoint-{base}"
        resumed = (
            replace(case, model=str(given)) if flag == "model" else replace(case, flags=f"{flags} --{flag} {given}")
        )
        ended = output.run(
            {"rank": 0, "label": f"step {end}", "count": 1, "how": "kill"} if end else None, case=resumed
        )
        assert bool(ended.killed) == bool(end)
        assert min(ended.steps[0]) == base + 1
    output.compare()


def _within_a_save(case: Case) -> dict:
    saves = [at for at in case.operations if at["rank"] == 0 and "manifest" in at["label"]]
    return saves[-1]
