"""A server that is only asked: what it says of given tokens, what it is not asked for, and what a user reads of one
that is gone, short, another's or locked."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.engine import Request as Asked
from megaswift.tasks.rollout.engine import Sampling
from megaswift.tasks.rollout.scoring_client import ScoringClient, ScoringServerLost
from megaswift.tasks.rollout.server_connection import ClientSettings

from tests import tiny
from tests.prepared import ROOT, free_port
from tests.tasks.rollout.served import KnownEngine, listening, serving

DOCUMENTS = [np.array([5, 9, 7, 11]), np.array([3, 4])]
PLACES = [np.array([0, 2]), np.array([0])]


def ask(reader: ScoringClient, first: int | None = None, top: int = 3):
    documents = DOCUMENTS if first is None else [np.array([first, 9, 7]), DOCUMENTS[1]]
    places = PLACES if first is None else [np.array([0, 1]), PLACES[1]]
    return reader.top_log_probs([Asked(ids.tolist(), 0) for ids in documents], places, top, 90)


def test_what_a_server_says_of_tokens() -> None:
    with serving() as (url, engine, _):
        found = ask(ScoringClient(url))
        for document, places, top in zip(DOCUMENTS, PLACES, found, strict=True):
            wanted = engine.top_log_probs(Asked(document.tolist(), 0), places.tolist(), 3, 90)
            assert (top.tokens == wanted.tokens).all()
            assert (top.log_probs == wanted.log_probs).all()  # to the last bit
        assert ScoringClient(url).generate([Asked([1, 2], 0)], Sampling())[0].tokens == [2, 1]


def test_nobody_claims_a_server_by_asking() -> None:
    with serving() as (url, _, server):
        reader = ScoringClient(url)
        ask(reader)
        assert server.owner.run is None
        client = ServerEngine([url], ClientSettings(timeout=10.0))
        ask(reader)  # it has another's run, and its own weights
        client.update([("scale", torch.tensor(1.5))])
        for refused in (lambda: ask(reader), lambda: reader.generate([Asked([1], 0)], Sampling())):
            with pytest.raises(
                ValueError, match=r"weights of a training|has version 1 of \w+ of the weights, not None"
            ):
                refused()
        client.close()


@pytest.mark.parametrize(
    ("first", "kind", "said"),
    [
        (98, ValueError, "the prompt has 98 tokens, and the model takes 97"),
        (97, RuntimeError, "ZeroDivisionError: a kernel broke"),
        (96, RuntimeError, r"/top_log_probs: unexpected answer .*24 bytes instead of 48"),
        (95, RuntimeError, "it returns token 1000000, and the trained model has 90 tokens. Serve a model"),
        (94, RuntimeError, "some of its log-probabilities are not finite"),
    ],
)
def test_answers_that_cannot_be_used(first: int, kind: type, said: str) -> None:
    with serving() as (url, _, _), pytest.raises(kind, match=f"--teacher_model_server {url}.*{said}"):
        ask(ScoringClient(url), first)


def test_places_that_there_are_not() -> None:
    with (
        serving() as (url, _, _),
        pytest.raises(ValueError, match="an item of places is 1: it must be a whole number from 0 to 0"),
    ):
        ScoringClient(url).top_log_probs([Asked([1, 2], 0)], [np.array([1])], 3, 90)


def test_the_key() -> None:
    with serving(api_key="open sesame") as (url, _, _):
        ask(ScoringClient(url, api_key="open sesame"))
        with pytest.raises(PermissionError, match="Set --teacher_model_server_api_key to its key"):
            ask(ScoringClient(url))


def test_vocabularies() -> None:
    with serving() as (url, engine, _):
        reader = ScoringClient(url)
        reader.check_vocabulary(SimpleNamespace(get_vocab=engine.vocabulary))
        with pytest.raises(
            ValueError, match=f"--teacher_model_server {url} has another voc.*'blue' is token 2 there and 3"
        ):
            reader.check_vocabulary(SimpleNamespace(get_vocab=lambda: {"red": 0, "green": 1, "blue": 3}))


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    start, port = time.monotonic(), free_port()
    with pytest.raises(ScoringServerLost, match=f"--teacher_model_server http://127.0.0.1:{port}: no server answers "):
        ScoringClient(f"http://127.0.0.1:{port}", timeout=1.0)
    assert time.monotonic() - start < 30
    assert capsys.readouterr().err.count(f"http://127.0.0.1:{port}: no server answers yet (") == 1


@contextmanager
def app_at(app: FastAPI) -> Iterator[str]:
    with listening(app) as port:
        yield f"http://127.0.0.1:{port}"


def openai_like(engine: KnownEngine) -> FastAPI:
    """Imitation of vLLM's own server; test_teacher_vllm.py runs the real one."""
    app = FastAPI()
    app.get("/health")(lambda: JSONResponse(None))
    app.get("/v1/models")(lambda: {"data": [{"id": "a-teacher"}]})

    @app.post("/tokenize")
    async def tokenize(http: Request):
        return {"tokens": [ord(letter) for letter in (await http.json())["prompt"]]}

    @app.post("/v1/completions")
    async def complete(http: Request):
        body = await http.json()
        if body["prompt"][0] == 98:
            said = {"error": {"message": "Requested prompt logprobs of 64, which is greater than max allowed: 20"}}
            return JSONResponse(said, 400)
        if "prompt_logprobs" not in body:
            choice = {"token_ids": body["prompt"][::-1][: body["max_tokens"]], "finish_reason": "stop"}
            return {"choices": [choice]}
        tokens, top = body["prompt"], body["prompt_logprobs"]
        best = engine.top_log_probs(Asked(tokens, 0), list(range(len(tokens) - 1)), top, 90)
        rows: list[dict | None] = [None]
        for place, (log_probs, ids) in enumerate(zip(best.log_probs.tolist(), best.tokens.tolist(), strict=True)):
            own = {str(tokens[place + 1]): {"logprob": -9.0, "rank": 50}}  # unlikelier than all of them
            rows.append(own | {str(token): {"logprob": value} for token, value in zip(ids, log_probs, strict=True)})
        return {"choices": [{"prompt_logprobs": rows if tokens[0] != 93 else rows[:2]}]}

    return app


def test_vllm_s_own_server() -> None:
    engine = KnownEngine()
    with app_at(openai_like(engine)) as url:
        reader = ScoringClient(url + "/v1/")
        assert reader.kind == "vLLM's own, a-teacher"
        for document, places, top in zip(DOCUMENTS, PLACES, ask(reader), strict=True):
            wanted = engine.top_log_probs(Asked(document.tolist(), 0), places.tolist(), 3, 90)
            assert (top.tokens == wanted.tokens).all()
            assert (top.log_probs == wanted.log_probs).all()
        assert reader.generate([Asked([1, 2, 3], 0, max_new_tokens=2)], Sampling())[0].tokens == [3, 2]
        with pytest.raises(ValueError, match=r"greater than max allowed: 20. Start it with --max-logprobs as large"):
            ask(reader, 98)
        with pytest.raises(RuntimeError, match="/v1/completions: unexpected answer"):
            ask(reader, 93)
        letters = SimpleNamespace(
            all_special_tokens=["<s>"],
            encode=lambda text, add_special_tokens: [ord(letter) for letter in text],
            decode=lambda ids: "".join(map(chr, ids)),
        )
        reader.check_vocabulary(letters)
        letters.encode = lambda text, add_special_tokens: [ord(letter) + (letter == "x") for letter in text]
        with pytest.raises(ValueError, match=r"'y' is token \[120\] there and \[121\] in the trained model"):
            reader.check_vocabulary(letters)
        with pytest.raises(ValueError, match=r"vLLM's own server takes none .* Start `swift rollout`"):
            reader.check_media(1)


def test_neither_kind_of_server() -> None:
    app = FastAPI()
    app.get("/health")(lambda: JSONResponse({}))
    with app_at(app) as url, pytest.raises(ValueError, match="neither a `swift rollout` nor vLLM's server "):
        ScoringClient(url)


def test_what_transformers_says_of_tokens(tmp_path, monkeypatch) -> None:
    from megaswift.tasks.rollout import transformers_engine

    monkeypatch.setattr(transformers_engine, "MAX_POSITIONS", 2)
    folder = tiny.save(tmp_path / "model", "qwen3")
    tiny.save_tokenizer(folder)
    engine = transformers_engine.TransformersEngine(folder, dtype=torch.float32)
    tokens, places = [5, 9, 60, 31, 7, 2], [0, 2, 3, 4]
    with torch.no_grad():
        logits = tiny.model("qwen3")(torch.tensor([tokens])).logits[0, places]
    for vocab_size in (tiny.VOCAB, 50):
        wanted = logits[:, :vocab_size].log_softmax(-1).topk(7)
        found = engine.top_log_probs(Asked(tokens, 0), places, 7, vocab_size)
        assert (found.tokens == wanted.indices.numpy()).all()
        np.testing.assert_allclose(found.log_probs, wanted.values.numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="51 likeliest tokens: the model has 50"):
        engine.top_log_probs(Asked(tokens, 0), places, 51, 50)


class Process:
    def __init__(self, port: int):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.rollout.served", str(port)], cwd=ROOT, env=environment
        )


@pytest.fixture
def servers():
    started: list[Process] = []

    def start(port: int) -> Process:
        started.append(Process(port))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow
def test_killed_while_it_is_asked(servers, capfd) -> None:
    """Named within seconds; with time to come back it is asked again."""
    port = free_port()
    server, url = servers(port), f"http://127.0.0.1:{port}"
    hasty, patient = ScoringClient(url, timeout=60.0), ScoringClient(url, reconnect_timeout=60.0)
    threading.Timer(1.0, server.process.kill).start()
    start = time.monotonic()
    with pytest.raises(
        ScoringServerLost, match=rf"teacher's server {url} is gone: .*with --server_reconnect_timeout SECONDS"
    ):
        ask(hasty, 99)
    assert time.monotonic() - start < 50  # the prompt takes 60 s
    threading.Timer(1.0, servers, (port,)).start()
    assert len(ask(patient)) == 2
    lost, back = (line for line in capfd.readouterr().err.splitlines() if line.startswith("The teacher's server"))
    assert lost.endswith("restart it: the run waits for it, for 60 s.")
    assert back == "The teacher's server answers again: the run continues."


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_hangs(servers, monkeypatch) -> None:
    monkeypatch.setattr("megaswift.tasks.rollout.health.ANSWER_TIMEOUT", 1.0)
    port = free_port()
    server = servers(port)
    reader = ScoringClient(f"http://127.0.0.1:{port}", timeout=60.0)
    threading.Timer(1.0, os.kill, (server.process.pid, signal.SIGSTOP)).start()
    start = time.monotonic()
    with pytest.raises(ScoringServerLost, match="is gone: no answer within 1 s, twice"):
        ask(reader, 99)
    assert time.monotonic() - start < 50
