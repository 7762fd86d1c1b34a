"""The real vLLM with Omni models and Llama 4, on the CPU, beside transformers: answers, GRPO in the process and served.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. A model takes three minutes.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_audio, tiny_omni, tiny_vision
from tests.bridge.checkpoint.test_vllm_vision import widen, without_end
from tests.tasks.rollout.test_vllm_images import LINE, REWARD, rows_of, run
from tests.tasks.rollout.test_vllm_server import PYTHON, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]


def llama4(folder: Path) -> None:
    tiny_vision.FAMILIES["llama4"](folder)
    widen(folder)


# With heads that vLLM's attention takes, a width that its experts take, and seeds whose answers differ.
MODELS: dict[str, Callable[[Path], Any]] = {
    "qwen3_omni_moe": lambda folder: tiny_omni.qwen3_omni_moe(folder, seed=2, head_dim=32, hidden_size=64),
    "qwen2_5_omni": lambda folder: tiny_omni.qwen2_5_omni(folder, seed=2, head_dim=32),
    "llama4": llama4,
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows of up to two images and audios together: some of a size of their own, one below a second."""
    root = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](root / "model")
    has_audios = request.param != "llama4"
    for number in range(6):
        tiny_vision.picture(40 + 37 * number, 220 - 29 * number, number).save(root / f"{number}.png")
        (root / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(4_000 + 9_117 * number, number)))
    rows: list[dict[str, Any]] = []
    for number in range(6):
        images = [str(root / f"{(number + i) % 6}.png") for i in range(number % 3)]
        audios = [str(root / f"{(number + i) % 6}.wav") for i in range((number + 1) % 3 * has_audios)]
        content = "<audio>what " * len(audios) + "is <image>" * len(images) + "colour?" * (1 + number % 2)
        row = {"messages": [{"role": "user", "content": content}], "images": images, "audios": audios}
        rows.append(row | ({"chat_template_kwargs": {"max_pixels": 8192}} if number == 4 else {}))
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD.replace("images, **columns", "**columns"))
    return root


def test_answers_are_those_of_transformers(folder: Path) -> None:
    words = (
        "swift infer --model model --val_dataset rows.jsonl --temperature 0 --max_new_tokens 12 --torch_dtype float32"
    )
    vllm = "--infer_backend vllm --vllm_max_model_len 384 --vllm_enforce_eager true --result_path vllm.jsonl"
    run(folder, PYTHON, *words.split(), *vllm.split())
    run(folder, sys.executable, *words.split(), "--result_path", "transformers.jsonl")
    answers, expected = (
        without_end([row["response"] for row in rows_of(folder / f"{name}.jsonl")]) for name in ("vllm", "transformers")
    )
    assert answers == expected
    assert len(set(expected)) > 3


def test_completions_are_by_the_weights_of_the_step(folder: Path) -> None:
    """With trained towers. The lengths of vLLM's prompts are compared with training's, and log-probabilities."""
    line = f"{LINE} --freeze_vit false --freeze_aligner false"
    colocated = "--vllm_mode colocate --vllm_max_model_len 384 --output_dir colocated"
    run(folder, PYTHON, "megatron", *f"{line} {colocated}".split())
    with running(folder / "model", vllm_max_model_len=384) as server:
        served = f"--vllm_server_base_url {server.url} --vllm_server_timeout 600 --output_dir served"
        run(folder, PYTHON, "megatron", *f"{line} {served}".split())
    for name in ("colocated", "served"):
        steps = [row for row in rows_of(folder / name / "logging.jsonl") if "loss" in row]
        assert len(steps) == 3
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 3e-4
    first, second = (rows_of(folder / name / "completions.jsonl") for name in ("colocated", "served"))
    assert [row["completion_ids"] for row in first] == [row["completion_ids"] for row in second]
