"""A server that is asked, and given nothing: what its model makes of given tokens, and completions by it.

Two kinds are spoken with: `swift rollout`, and vLLM's own (`vllm serve MODEL --max-logprobs K`), by its API of
completions. Whatever is waited for, the server is asked now and then whether it is still there.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np

from .completion_json import from_json
from .engine import Completion, Request, Sampling, Top
from .health import ANSWER, POLL, all_of, cure, say, silence
from .keys import client_key
from .scoring_routes import unpacked

AT_ONCE = 256  # requests of one process
FLAG = "--teacher_model_server"
# What the tokenizers of a server that does not tell its vocabulary are compared by: words, digits, signs, scripts.
SAMPLE = "The teacher's server, 3.14 & 0x7F;\n\tdef f(x): return [x**2]  # Übung, 汉语, العربية, हिन्दी, 🙂<br/>"


class ReaderLost(ConnectionError):
    """The server does not answer."""


class ServerReader:
    """Asks the server at `url`. `timeout`: seconds to wait for it at first; `wait`: for one that is lost later.

    Raises ReaderLost where it does not answer in time, PermissionError where it wants a key.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 240.0, wait: float = 0.0):
        self.url, self._wait = url.rstrip("/").removesuffix("/v1"), wait
        self._api_key = api_key
        self._model = asyncio.run(self._connect(timeout))  # None: a `swift rollout`

    @property
    def kind(self) -> str:
        return "swift rollout" if self._model is None else f"vLLM's own, {self._model}"

    def check_vocabulary(self, tokenizer: Any) -> None:
        """Raise ValueError where a token means something else there."""
        if self._model is None:
            theirs, ours = self._all([("/vocabulary", {})], httpx.Response.json)[0], tokenizer.get_vocab()
            for word in theirs.keys() | ours.keys() if theirs != ours else ():
                if theirs.get(word) != ours.get(word):
                    raise ValueError(self._other(word, theirs.get(word), ours.get(word)))
            return
        text = SAMPLE + "".join(dict.fromkeys(tokenizer.all_special_tokens))
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        theirs = self._all([("/tokenize", asked)], lambda response: response.json()["tokens"])[0]
        ours = tokenizer.encode(text, add_special_tokens=False)
        if theirs != ours:
            at = next((n for n, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), 0)
            raise ValueError(self._other(tokenizer.decode(ours[at : at + 1]), theirs[at : at + 1], ours[at : at + 1]))

    def _other(self, word: str, theirs: Any, ours: Any) -> str:
        return (
            f"{FLAG} {self.url} has another vocabulary than the model that is trained: {word!r} is token {theirs} "
            f"there and {ours} here. Serve a model that has the same tokenizer"
        )

    def top_log_probs(
        self, documents: Sequence[np.ndarray], places: Sequence[np.ndarray], top: int, vocab_size: int
    ) -> list[Top]:
        """Of each document, at its places, as of engine.Reader. Raises ReaderLost, ValueError for what the server
        refuses, RuntimeError for answers that are short or of another vocabulary."""
        if self._model is None:
            asked = [
                (
                    "/top_log_probs",
                    {"tokens": tokens.tolist(), "places": at.tolist(), "top": top, "vocab_size": vocab_size},
                )
                for tokens, at in zip(documents, places, strict=True)
            ]
            reads = [lambda response, at=at: unpacked(response.content, len(at), top) for at in places]
        else:
            each = {"model": self._model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
            asked = [("/v1/completions", each | {"prompt": tokens.tolist()}) for tokens in documents]
            reads = [lambda response, at=at: _of_openai(response.json(), at, top) for at in places]
        found = self._all(asked, reads)
        for each_top in found:
            if len(each_top.tokens) and not (each_top.tokens.min() >= 0 and each_top.tokens.max() < vocab_size):
                raise RuntimeError(
                    f"{FLAG} {self.url}: it names token {each_top.tokens.max()}, and the model that is trained has "
                    f"{vocab_size}. Serve a model that has the same vocabulary"
                )
            if not np.isfinite(each_top.log_probs).all():
                raise RuntimeError(f"{FLAG} {self.url}: some of its log-probabilities are not finite. See what it runs")
        return found

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """A completion of each request, in their order; from vLLM's own without log-probabilities."""
        if self._model is None:
            # No version of the weights: those of the model's folder.
            asked = [
                ("/generate", {"requests": [asdict(request)], "sampling": asdict(sampling), "version": None})
                for request in requests
            ]
            return self._all(asked, lambda response: from_json(response.json()["completions"][0]))
        each = {
            "model": self._model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        return self._all(
            [
                ("/v1/completions", each | {"prompt": request.tokens, "seed": request.seed, "max_tokens": limit})
                for request in requests
                for limit in [max(1, min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens))]
            ],
            _completion,
        )

    def sleep(self) -> None:
        """It is not ours."""

    def wake(self) -> None: ...

    def close(self) -> None: ...

    # ---- what is said to it

    def _all(self, asked: Sequence[tuple[str, Any]], reads: Any) -> list[Any]:
        """What `reads`, one or for each, make of the answers. A server that is lost is waited for, and asked again."""
        reads = [reads] * len(asked) if callable(reads) else reads
        while True:
            try:
                return asyncio.run(self._asked(asked, reads))
            except ReaderLost as lost:
                if not self._wait:
                    raise
                say(str(lost))
                self._model = asyncio.run(self._connect(self._wait, lost))
                say("The teacher's server is there again: the run goes on.")

    async def _asked(self, asked: Sequence[tuple[str, Any]], reads: Sequence[Callable]) -> list[Any]:
        async with self._client() as http:
            slots = asyncio.Semaphore(AT_ONCE)

            async def one(path: str, body: Any, read: Callable[[httpx.Response], Any]) -> Any:
                async with slots:
                    response = await self._post(http, path, body)
                try:
                    return read(response)
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    what = f"{type(error).__name__}: {error}"
                    raise RuntimeError(
                        f"{FLAG} {self.url}, {path}: the answer is not what was asked for ({what})"
                    ) from error

            calls = (one(path, body, read) for (path, body), read in zip(asked, reads, strict=True))
            return await self._watched(http, all_of(calls))

    async def _watched(self, http: httpx.AsyncClient, work: Coroutine) -> Any:
        """Look after the server as long as it has not answered."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=POLL))[0]:
                if reason := await silence(http):
                    raise self._lost(reason)
            return await task
        finally:
            task.cancel()

    async def _post(self, http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
        try:
            response = await http.post(path, json=body)
        except httpx.TransportError as error:
            raise self._lost(str(error) or type(error).__name__) from error
        if response.is_success:
            return response
        said = response.text[:500]
        try:
            answer = response.json()
            said = answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"]
        except (ValueError, KeyError, TypeError):
            pass
        if response.status_code in (401, 403):
            raise PermissionError(f"{FLAG} {self.url}: {said}. Give its key as --teacher_model_server_api_key.")
        if "prompt logprobs of" in said:
            said = f"{said}. Start it with --max-logprobs as large as --gkd_logits_topk"
        kind = ValueError if 400 <= response.status_code < 500 else RuntimeError
        raise kind(f"{FLAG} {self.url}, {path}: {said} (status {response.status_code})")

    def _lost(self, reason: str) -> ReaderLost:
        return ReaderLost(f"The teacher's server {self.url} is gone: {reason}. {cure(self._wait)}")

    async def _connect(self, patience: float, lost: ReaderLost | None = None) -> str | None:
        """Wait for the server. The name of the model of vLLM's own; None of a `swift rollout`."""
        end = time.monotonic() + patience
        told = not patience or lost is not None or os.environ.get("RANK", "0") != "0"
        async with self._client() as http:
            while reason := await silence(http):
                if not told:
                    say(
                        f"{FLAG} {self.url}: no server answers there yet ({reason}). It is waited for, for up to "
                        f"{patience:.0f} s."
                    )
                    told = True
                if time.monotonic() > end:
                    if lost is not None:
                        raise ReaderLost(f"{lost} It was waited for {patience:.0f} s.")
                    raise ReaderLost(
                        f"{FLAG} {self.url}: no server answers there ({reason}), after {patience:.0f} s. Start one "
                        "(swift rollout --model TEACHER --port ..., or vllm serve TEACHER --max-logprobs K), give the "
                        "right address, or wait longer for it with --vllm_server_timeout."
                    )
                await asyncio.sleep(0.5)
            try:
                health = await http.get("/health", timeout=ANSWER)
                if health.headers.get("content-type", "").startswith("application/json") and "backend" in health.text:
                    return None
                models = await http.get("/v1/models", timeout=ANSWER)
            except httpx.TransportError as error:
                raise self._lost(str(error) or type(error).__name__) from error
            if models.status_code in (401, 403):
                raise PermissionError(f"{FLAG} {self.url} wants a key. Give it as --teacher_model_server_api_key.")
            try:
                return models.json()["data"][0]["id"]
            except (ValueError, KeyError, TypeError, IndexError):
                raise ValueError(
                    f"{FLAG} {self.url}: neither a `swift rollout` nor vLLM's server answers there (/v1/models gives "
                    f"{models.status_code}). Give the address of one, without a path"
                ) from None

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        timeout = httpx.Timeout(None, connect=ANSWER)
        key = client_key(self._api_key, self.url, own=False)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


def _of_openai(answer: Any, places: np.ndarray, top: int) -> Top:
    """Of vLLM's `prompt_logprobs`: for each token but the first the likeliest in the place of it, and itself."""
    found = answer["choices"][0]["prompt_logprobs"]
    best = [
        sorted(((item["logprob"], int(token)) for token, item in found[place + 1].items()), reverse=True)[:top]
        for place in places.tolist()
    ]
    if short := [row for row in best if len(row) < top]:
        raise ValueError(f"{len(short[0])} of {top} tokens at a place")
    rows = np.array(best, np.float64).reshape(len(best), top, 2)
    return Top(rows[..., 0].astype(np.float32), rows[..., 1].astype(np.int32))


def _completion(response: httpx.Response) -> Completion:
    choice = response.json()["choices"][0]
    tokens = choice["token_ids"]
    return Completion(tokens, [0.0] * len(tokens), "stop" if choice["finish_reason"] == "stop" else "length")
