"""Distillation beside the real vLLM, on the CPU: it writes for the student, and is the teacher behind a server.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. vLLM starts four times, in minutes.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from megaswift.tasks.rollout.engine import Request, Sampling
from megaswift.tasks.rollout.scoring_client import ScoringClient

from tests import tiny
from tests.bridge.checkpoint.test_vllm import PYTHON, SHAPE, _greedy
from tests.prepared import ON_CPU, ROOT, free_port
from tests.tasks.distillation.runs import Distilled, assert_same_run
from tests.tasks.preference.runs import Trained

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
LIMIT = 256  # tokens
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# The likeliest token always: then every engine writes the same.
WRITTEN = "--lmbda 1 --max_completion_length 8 --top_k 1 --gkd_logits_topk 9 --teacher_model taught --model small"


@pytest.fixture(scope="module")
def small(place: Distilled) -> Distilled:
    for name, seed in (("small", 0), ("taught", 1)):
        place.tokenized(tiny.save(place.folder / name, "qwen3", seed, **SHAPE))
    return place


@contextmanager
def serving(words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(
        [PYTHON, *words], cwd=ROOT, env=os.environ | ON_CPU | ENVIRONMENT, start_new_session=True
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def rollout(folder: Path) -> Iterator[str]:
    """`swift rollout` by vLLM."""
    port = free_port()
    options = {"model": str(folder), "port": port, "vllm_max_model_len": LIMIT, "torch_dtype": "float32"}
    with serving(["-m", "tests.tasks.rollout.serve_worker", json.dumps(options)]):
        yield f"http://127.0.0.1:{port}"


def check_reading(reader: ScoringClient, folder: Path) -> None:
    """The likeliest tokens are those of transformers' model, and what is written is its too."""
    from transformers import AutoTokenizer

    reader.check_vocabulary(AutoTokenizer.from_pretrained(folder))
    model = tiny.model("qwen3", 1, **SHAPE)
    documents = [np.arange(5, 5 + size) for size in (2, 17, 40)]
    places = [np.arange(len(each) // 3, len(each) - 1) for each in documents]
    for _ in range(2):  # the second time its cache knows the beginnings
        found = reader.top_log_probs([Request(ids.tolist(), 0) for ids in documents], places, 9, tiny.VOCAB)
        for document, at, top in zip(documents, places, found, strict=True):
            with torch.no_grad():
                wanted = model(torch.from_numpy(document)[None]).logits[0, at].log_softmax(-1).topk(9)
            np.testing.assert_allclose(top.log_probs, wanted.values.numpy(), atol=5e-5)
            assert (top.tokens == wanted.indices.numpy()).all()
    prompts = [each.tolist() for each in documents]
    found = reader.generate([Request(prompt, 0) for prompt in prompts], Sampling(0.0, max_new_tokens=24))
    assert [answer.tokens for answer in found] == [_greedy(model, prompt) for prompt in prompts]
    with pytest.raises((ValueError, RuntimeError), match=r"maximum context length|the model has 256 positions"):
        reader.top_log_probs([Request([n % 90 for n in range(3, 303)], 0)], [np.array([0])], 9, tiny.VOCAB)


def test_vllm_s_own_server_is_the_teacher(small: Distilled) -> None:
    port, folder = free_port(), small.folder / "taught"
    flags = f"--max-logprobs 9 --max-model-len {LIMIT} --dtype float32 --enforce-eager --host 127.0.0.1 --port {port}"
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *flags.split()]
    with serving(words):
        reader = ScoringClient(f"http://127.0.0.1:{port}", timeout=900.0)
        assert reader.kind == f"vLLM's own, {folder}"
        check_reading(reader, folder)
        with pytest.raises(ValueError, match=r"max allowed: 9 .*Start it with --max-logprobs as large as"):
            reader.top_log_probs([Request([5, 6, 7], 0)], [np.array([0])], 10, tiny.VOCAB)
        found = small.run(f'{WRITTEN} --teacher_model "" --teacher_model_server {reader.url}')
    assert_same_run(found, small.run(WRITTEN))


def test_vllm_writes_and_teaches_behind_servers(small: Distilled) -> None:
    with rollout(small.folder / "taught") as teacher, rollout(small.folder / "small") as student:
        check_reading(ScoringClient(teacher, timeout=900.0), small.folder / "taught")
        flags = f"--use_vllm true --vllm_mode server --vllm_server_base_url {student} --vllm_server_timeout 900"
        found = small.run(f'{WRITTEN} {flags} --teacher_model "" --teacher_model_server {teacher}', 2)
        assert_same_run(found, small.run(WRITTEN))
        assert found.steps[0]["loss"] > 0.1
        again = "--lmbda 0 --seq_kd true --max_completion_length 8 --top_k 1 --gkd_logits_topk 9 --model small"
        found = small.run(f'{again} --teacher_model "" --teacher_model_server {teacher}')
    assert_same_run(found, small.run(f"{again} --teacher_model taught"))


def test_vllm_writes_in_the_run_s_own_process(small: Distilled) -> None:
    wanted, output = small.run(WRITTEN), small.folder / "colocated"
    flags = f"--use_vllm true --vllm_mode colocate --vllm_max_model_len {LIMIT} --vllm_max_num_seqs 8"
    line = small.line(f"{WRITTEN} {flags}", output)
    done = subprocess.run(
        [PYTHON, "-m", "megaswift.cli.main", "megatron", "rlhf", *shlex.split(line)],
        cwd=small.folder,
        env=os.environ | ON_CPU | ENVIRONMENT | {"HF_HOME": str(small.folder / "cache")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = Trained(output, done.stdout)
    assert "completions: vLLM, in this process" in found.printed
    assert_same_run(found, wanted)
