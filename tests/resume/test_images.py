"""Runs with images or audios in flight that are killed go on bit for bit."""

import json
from pathlib import Path

import pytest

from tests import tiny_audio, tiny_vision
from tests.resume.harness import DROPOUT, LAYOUTS, LORA, Case, Output

pytestmark = pytest.mark.slow
ALL = "--freeze_vit false --freeze_aligner false"
CASES = {
    "DP2": (f"{LAYOUTS['DP2']} {DROPOUT} {ALL}", True),
    "TP2, mergers": (f"{LAYOUTS['TP2']} --freeze_aligner false --vit_gradient_checkpointing false", False),
    "PP2": (f"{LAYOUTS['PP2']} {ALL} --use_distributed_optimizer false", False),
    "TP2 LoRA": (f"{LAYOUTS['TP2']} {LORA} {DROPOUT} {ALL}", False),
    "DP2 LoRA beside the tower": (f"{LAYOUTS['DP2']} --tuner_type lora_llm {ALL}", False),
    "TP2, megatron-core's format": (f"{LAYOUTS['TP2']} {ALL} --save_safetensors false", False),
    "DP2, streamed": (f"{LAYOUTS['DP2']} {ALL} --streaming true", False),
    "GLM-4V, CP2, megatron-core's format": (f"--context_parallel_size 2 {ALL} --save_safetensors false", False),
    "Qwen3.5, TP2": (f"{LAYOUTS['TP2']} {ALL}", False),
    "InternVL, TP2": (f"{LAYOUTS['TP2']} {ALL} --streaming true", False),
    "Qwen3-ASR, PP2, megatron-core's format": (f"{LAYOUTS['PP2']} {ALL} --save_safetensors false", False),
    "Qwen3-ASR, TP2, streamed": (f"{LAYOUTS['TP2']} {ALL} --streaming true", False),
    "Mistral 3, PP2, megatron-core's format": (f"{LAYOUTS['PP2']} {ALL} --save_safetensors false", False),
}
# Keyed by the beginning of a case's name; other cases have Qwen3-VL.
MODELS = {
    "GLM-4V": "glm4v",
    "Qwen3.5": "qwen3_5",
    "Mistral 3": "mistral3",
    "InternVL": "internvl",
    "Qwen3-ASR": "qwen3_asr",
}


@pytest.fixture(scope="module")
def images(place: Path) -> Path:
    """Adds models with towers, and rows with 0 to 3 images or audios, to the folder of the other tests."""
    for model in ("qwen3_vl", *MODELS.values()):
        (tiny_vision.FAMILIES | tiny_audio.FAMILIES)[model](place / model)
    for number in range(9):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place / f"{number}.png")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<image>" * (number % 4) + "what colour?"},
                {"role": "assistant", "content": "a red circle " * (1 + number % 3)},
            ],
            "images": [f"{(number + i) % 9}.png" for i in range(number % 4)],
        }
        for number in range(40)
    ]
    (place / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(9):
        sound = tiny_audio.sound(3000 + 4000 * number, number)
        (place / f"{number}.wav").write_bytes(tiny_audio.wav(sound))
    for row in rows:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace("<image>", "<audio>")
        row["audios"] = [name.replace("png", "wav") for name in row.pop("images")]
    (place / "audios.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if usual else pytest.mark.long) for n, (_, usual) in CASES.items()]
)
def test_killed_and_resumed(name, images):
    flags, _ = CASES[name]
    case = Case(
        images,
        f"images {name}".replace(",", "").replace("'", ""),
        flags,
        MODELS.get(name.partition(",")[0], "qwen3_vl"),
        steps=6,
        command=f"sft --dataset {'audios' if name.startswith('Qwen3-ASR') else 'images'}.jsonl",
    )
    output = Output(case)
    assert output.run({"rank": 0, "label": "step 4", "count": 1, "how": "kill"}).killed
    saves = [at for at in case.operations if "checkpoint-N" in at["label"] and at["how"] == "kill"]
    assert output.run(saves[len(saves) // 2]).killed
    output.run()
    output.compare()
