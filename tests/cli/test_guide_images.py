"""The guide's command for vision-language models, run as it is written there, with a tiny model and local pictures.

What is changed: --model, --dataset. Two processes on two cores take a minute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_vision
from tests.cli.test_examples import EXAMPLES, MULTIMODAL
from tests.cli.test_guide_generation import words_of

SFT = "\n".join(line for line in EXAMPLES[MULTIMODAL].splitlines() if not line.startswith("#"))


@pytest.mark.long
def test_sft_with_images_and_videos(tmp_path: Path) -> None:
    """It ends, has seen its media, changes the language model alone, and saves what transformers loads."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tiny_vision.qwen3_vl(tmp_path / "model")
    for number in range(3):
        tiny_vision.picture(200, 120, seed=number).save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    kinds = [
        {"query": "<image>what colour is it?", "images": paths[:1]},
        {"query": "<image><image> which?", "images": paths[1:]},
        {"query": "<video>what is it?", "videos": [paths]},
        {"query": "what is the sky?"},
    ]
    rows = [kinds[number % 4] | {"response": f"blue {number}"} for number in range(160)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment, words = words_of(SFT, model="model", dataset="data.jsonl")
    done = subprocess.run(
        [Path(sys.executable).parent / words[0], *words[1:]],
        cwd=tmp_path,
        env=os.environ | environment | {"MODELSCOPE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (saved,) = (tmp_path / "megatron_output" / "Qwen3-VL-8B").glob("v*/checkpoint-*")
    lines = [json.loads(line) for line in (saved.parent / "logging.jsonl").read_text().splitlines()]
    assert any(line.get("images", 0) > 0 and line["visual_tokens"] > 0 and line["loss"] > 0 for line in lines)
    _, info = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    AutoProcessor.from_pretrained(saved)
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name].to(tensor.dtype))}
    assert changed
    assert not [name for name in changed if "visual" in name]
