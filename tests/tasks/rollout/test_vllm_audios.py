"""The real vLLM with audios, on the CPU, beside transformers: `swift infer`, GRPO in the process and by a server.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. vLLM starts three times, in minutes.
"""

import json
import sys
from pathlib import Path

import httpx
import pytest
from megaswift.tasks.rollout.keys import client_key
from megaswift.tasks.rollout.scoring_client import ScoringClient

from tests import tiny_audio
from tests.tasks.rollout.test_audio_requests import GOOD, body
from tests.tasks.rollout.test_vllm_images import LINE, REWARD, rows_of, run
from tests.tasks.rollout.test_vllm_server import PYTHON, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with heads that vLLM's attention takes, and rows of up to two audios: some end within a frame, one is
    shorter than the feature extractor takes."""
    root = tmp_path_factory.mktemp("audios")
    tiny_audio.qwen3_asr(root / "model", tied=True, head_dim=32)  # vLLM knows no output layer apart
    for number in range(6):
        (root / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(4_000 + 9_117 * number, number)))
    with (root / "rows.jsonl").open("w") as file:
        for number in range(6):
            audios = [str(root / f"{(number + i) % 6}.wav") for i in range(number % 3)]
            content = "what <audio>" * len(audios) + "colour?" * (1 + number % 2)
            file.write(json.dumps({"messages": [{"role": "user", "content": content}], "audios": audios}) + "\n")
    (root / "reward.py").write_text(REWARD.replace("images, **columns", "audios, **columns"))
    return root


def test_answers_are_those_of_transformers(folder: Path) -> None:
    words = (
        "swift infer --model model --val_dataset rows.jsonl --temperature 0 --max_new_tokens 12 --torch_dtype float32"
    )
    vllm = "--infer_backend vllm --vllm_max_model_len 256 --vllm_enforce_eager true --result_path vllm.jsonl"
    run(folder, PYTHON, *words.split(), *vllm.split())
    run(folder, sys.executable, *words.split(), "--result_path", "transformers.jsonl")
    # vLLM leaves out the bytes of an incomplete character at the end.
    answers, expected = (
        [row["response"].rstrip("\ufffd") for row in rows_of(folder / f"{name}.jsonl")]
        for name in ("vllm", "transformers")
    )
    assert answers == expected
    assert len(set(expected)) > 3


def test_completions_are_by_the_weights_of_the_step(folder: Path) -> None:
    """In the process and by a server, with a trained tower. The server survives bad audios."""
    line = f"{LINE} --freeze_vit false --freeze_aligner false"
    colocated = "--vllm_mode colocate --vllm_max_model_len 128 --output_dir colocated"
    run(folder, PYTHON, "megatron", *f"{line} {colocated}".split())
    with running(folder / "model", vllm_max_model_len=128) as server:
        ScoringClient(server.url, timeout=600.0)  # waits for it
        headers = {"authorization": f"Bearer {client_key(None, server.url, is_rollout_server=True)}"}
        client = httpx.Client(base_url=server.url, headers=headers, timeout=120)
        for sent, said in (
            (body(GOOD[:-40]), "an audio is damaged or truncated"),
            (body({"url": "http://127.0.0.1:9/a.wav"}), "private"),
            (body(b"no sound" * 9), "an audio is no WAV file"),
        ):
            answer = client.post("/generate", json=sent)
            assert answer.status_code == 422, answer.text
            assert said in answer.json()["error"]
        good = client.post("/generate", json=body(GOOD))
        assert len(good.json()["completions"][0]["tokens"]) == 2
        served = f"--vllm_server_base_url {server.url} --vllm_server_timeout 600 --output_dir served"
        run(folder, PYTHON, "megatron", *f"{line} {served}".split())
    for name in ("colocated", "served"):
        steps = [row for row in rows_of(folder / name / "logging.jsonl") if "loss" in row]
        assert len(steps) == 3
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 2e-5
    first, second = (rows_of(folder / name / "completions.jsonl") for name in ("colocated", "served"))
    assert [row["completion_ids"] for row in first] == [row["completion_ids"] for row in second]
