"""Client of a teacher's server, which scores tokens and generates with fixed weights.

The server is `swift rollout`, or vLLM's own server (`vllm serve MODEL --max-logprobs K`) with its completions API. The
client checks the server's health during every call.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import httpx
import numpy as np

from ...templates.json_types import JsonObject
from ..run.vocabulary import compare_vocabularies, vocabulary_error
from .compatibility import audios_mismatch, images_mismatch, videos_mismatch
from .completion_json import from_json
from .engine import Completion, Request, Sampling, TopLogProbs
from .health import ANSWER_TIMEOUT, gather_all, notify, reconnect_hint, supervise, unreachable_reason
from .keys import client_key
from .request_bodies import request_bodies, scoring_body
from .scoring_routes import decode_top

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONCURRENT = 256  # requests per process
FLAG = "--teacher_model_server"
# Text to compare tokenizers with a server that does not return its vocabulary: words, digits, signs, scripts.
SAMPLE = "The teacher's server, 3.14 & 0x7F;\n\tdef f(x): return [x**2]  # Übung, 汉语, العربية, हिन्दी, 🙂<br/>"


type Call = tuple[str, JsonObject]  # path and body of a POST
type Parser[T] = Callable[[httpx.Response], T]


class ScoringServerLost(ConnectionError):
    """Raised when the scoring server does not answer."""


class ScoringClient:
    """Client of the server at `url`.

    `timeout`: seconds to wait for the server at the start.
    `reconnect_timeout`: seconds to wait for a server that is lost later.

    Raises ScoringServerLost where the server does not answer in time, PermissionError where it requires a key.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 240.0, reconnect_timeout: float = 0.0):
        self.url, self._reconnect_timeout = url.rstrip("/").removesuffix("/v1"), reconnect_timeout
        self._api_key = api_key
        self._model = asyncio.run(self._connect(timeout))  # None: a `swift rollout`

    @property
    def kind(self) -> str:
        return "swift rollout" if self._model is None else f"vLLM's own, {self._model}"

    def check_vocabulary(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raise ValueError where the server's vocabulary differs from the tokenizer's."""
        source = f"{FLAG} {self.url}"
        if self._model is None:
            served_ids = self._post_with_retry([("/vocabulary", {})], httpx.Response.json)[0]
            compare_vocabularies(served_ids, tokenizer.get_vocab(), source)
            return
        text = SAMPLE + "".join(dict.fromkeys(tokenizer.all_special_tokens))
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        served_ids = self._post_with_retry([("/tokenize", body)], lambda response: response.json()["tokens"])[0]
        local_ids = tokenizer.encode(text, add_special_tokens=False)
        if served_ids != local_ids:
            i = next(
                (i for i, (served, local) in enumerate(zip(served_ids, local_ids, strict=False)) if served != local), 0
            )
            part = slice(i, i + 1)
            raise vocabulary_error(source, str(tokenizer.decode(local_ids[part])), served_ids[part], local_ids[part])

    def check_media(self, images: int, videos: int = 0, audios: int = 0) -> None:
        """Raise ValueError where the server takes fewer images, videos or audios in a document."""
        if self._model is not None:
            raise ValueError(
                f"{FLAG} {self.url}: the run has images, videos or audios, and vLLM's own server takes none in a "
                "tokenized prompt. Start `swift rollout` with the teacher"
            )
        health = asyncio.run(self._health())
        mismatch = images_mismatch(images, health.get("images")) or videos_mismatch(videos, health.get("videos"))
        mismatch = mismatch or audios_mismatch(audios, health.get("audios", 0))
        if mismatch:
            raise ValueError(f"{FLAG} {self.url}: {mismatch}")

    async def _health(self) -> JsonObject:
        async with self._client() as http:
            try:
                return (await http.get("/health", timeout=ANSWER_TIMEOUT)).json()
            except httpx.TransportError as error:
                raise self._lost_error(str(error) or type(error).__name__) from error

    def top_log_probs(
        self, documents: Sequence[Request], positions: Sequence[np.ndarray], top: int, vocab_size: int
    ) -> list[TopLogProbs]:
        """Score each document at its positions, as `ScoringEngine.top_log_probs`. vLLM's own server takes no images.

        Raises ScoringServerLost, ValueError for requests that the server rejects, RuntimeError for incomplete responses
        or another vocabulary.
        """
        if self._model is None:
            calls = [
                (
                    "/top_log_probs",
                    scoring_body(document) | {"places": indices.tolist(), "top": top, "vocab_size": vocab_size},
                )
                for document, indices in zip(documents, positions, strict=True)
            ]
            parsers = [
                lambda response, indices=indices: decode_top(response.content, len(indices), top)
                for indices in positions
            ]
        else:
            settings = {"model": self._model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
            calls = [("/v1/completions", settings | {"prompt": document.tokens}) for document in documents]
            parsers = [
                lambda response, indices=indices: _parse_top_log_probs(response.json(), indices, top)
                for indices in positions
            ]
        scores = self._post_with_retry(calls, parsers)
        for score in scores:
            if len(score.tokens) and not (score.tokens.min() >= 0 and score.tokens.max() < vocab_size):
                raise RuntimeError(
                    f"{FLAG} {self.url}: it returns token {score.tokens.max()}, and the trained model has "
                    f"{vocab_size} tokens. Serve a model that has the same vocabulary"
                )
            if not np.isfinite(score.log_probs).all():
                raise RuntimeError(f"{FLAG} {self.url}: some of its log-probabilities are not finite. Fix its model")
        return scores

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return a completion of each request, in order. vLLM's own server sends no log-probabilities."""
        if self._model is None:
            # version None: the weights of the model's folder
            calls = [
                ("/generate", body | {"sampling": asdict(sampling), "version": None})
                for request in requests
                for body in request_bodies([request])
            ]
            return self._post_with_retry(calls, lambda response: from_json(response.json()["completions"][0]))
        settings = {
            "model": self._model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        return self._post_with_retry(
            [
                ("/v1/completions", settings | {"prompt": request.tokens, "seed": request.seed, "max_tokens": limit})
                for request in requests
                for limit in [max(1, min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens))]
            ],
            _parse_completion,
        )

    def sleep(self) -> None:
        """Do nothing: the server is external."""

    def wake(self) -> None: ...

    def close(self) -> None: ...

    # ---- requests

    def _post_with_retry[T](self, calls: Sequence[Call], parsers: Parser[T] | Sequence[Parser[T]]) -> list[T]:
        """POST all requests and parse the responses. Reconnect and retry after the server was lost."""
        parsers = [parsers] * len(calls) if callable(parsers) else parsers
        while True:
            try:
                return asyncio.run(self._post_all(calls, parsers))
            except ScoringServerLost as loss:
                if not self._reconnect_timeout:
                    raise
                notify(str(loss))
                self._model = asyncio.run(self._connect(self._reconnect_timeout, loss))
                notify("The teacher's server answers again: the run continues.")

    async def _post_all[T](self, calls: Sequence[Call], parsers: Sequence[Parser[T]]) -> list[T]:
        async with self._client() as http:
            slots = asyncio.Semaphore(MAX_CONCURRENT)

            async def post(path: str, body: JsonObject, parse: Parser[T]) -> T:
                async with slots:
                    response = await self._post(http, path, body)
                try:
                    return parse(response)
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    raise RuntimeError(f"{FLAG} {self.url}, {path}: unexpected answer ({problem})") from error

            tasks = (post(path, body, parse) for (path, body), parse in zip(calls, parsers, strict=True))
            return await supervise(http, gather_all(tasks), self._lost_error)

    async def _post(self, http: httpx.AsyncClient, path: str, body: JsonObject) -> httpx.Response:
        try:
            response = await http.post(path, json=body)
        except httpx.TransportError as error:
            raise self._lost_error(str(error) or type(error).__name__) from error
        if response.is_success:
            return response
        text = response.text[:500]
        try:
            answer = response.json()
            text = answer["error"]["message"] if isinstance(answer["error"], dict) else answer["error"]
        except (ValueError, KeyError, TypeError):
            pass
        if response.status_code in (401, 403):
            raise PermissionError(f"{FLAG} {self.url}: {text}. Set --teacher_model_server_api_key to its key.")
        if "prompt logprobs of" in text:
            text = f"{text}. Start it with --max-logprobs as large as --gkd_logits_topk"
        error_class = ValueError if 400 <= response.status_code < 500 else RuntimeError
        raise error_class(f"{FLAG} {self.url}, {path}: {text} (status {response.status_code})")

    def _lost_error(self, reason: str) -> ScoringServerLost:
        return ScoringServerLost(
            f"The teacher's server {self.url} is gone: {reason}. {reconnect_hint(self._reconnect_timeout)}"
        )

    async def _connect(self, timeout: float, loss: ScoringServerLost | None = None) -> str | None:
        """Wait for the server. Return the name of the model on vLLM's own server, None for a `swift rollout`."""
        deadline = time.monotonic() + timeout
        has_notified = not timeout or loss is not None or os.environ.get("RANK", "0") != "0"
        async with self._client() as http:
            while reason := await unreachable_reason(http):
                if not has_notified:
                    notify(f"{FLAG} {self.url}: no server answers yet ({reason}). Waiting up to {timeout:.0f} s.")
                    has_notified = True
                if time.monotonic() > deadline:
                    if loss is not None:
                        raise ScoringServerLost(f"{loss} It did not come back within {timeout:.0f} s.")
                    raise ScoringServerLost(
                        f"{FLAG} {self.url}: no server answers ({reason}) after {timeout:.0f} s. Start one (swift "
                        "rollout --model TEACHER --port ..., or vllm serve TEACHER --max-logprobs K), fix the address, "
                        "or wait longer with --vllm_server_timeout."
                    )
                await asyncio.sleep(0.5)
            try:
                health = await http.get("/health", timeout=ANSWER_TIMEOUT)
                if health.headers.get("content-type", "").startswith("application/json") and "backend" in health.text:
                    return None
                models = await http.get("/v1/models", timeout=ANSWER_TIMEOUT)
            except httpx.TransportError as error:
                raise self._lost_error(str(error) or type(error).__name__) from error
            if models.status_code in (401, 403):
                raise PermissionError(f"{FLAG} {self.url}: it requires a key. Set --teacher_model_server_api_key.")
            try:
                return models.json()["data"][0]["id"]
            except (ValueError, KeyError, TypeError, IndexError):
                raise ValueError(
                    f"{FLAG} {self.url}: neither a `swift rollout` nor vLLM's server (/v1/models returns "
                    f"{models.status_code}). Set the address of one, without a path"
                ) from None

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONCURRENT)
        timeout = httpx.Timeout(None, connect=ANSWER_TIMEOUT)
        key = client_key(self._api_key, self.url, is_rollout_server=False)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


def _parse_top_log_probs(answer: JsonObject, positions: np.ndarray, top: int) -> TopLogProbs:
    """Return the top tokens of vLLM's `prompt_logprobs`: after the first token, the likeliest and the actual one."""
    log_probs = answer["choices"][0]["prompt_logprobs"]
    top_items = [
        sorted(((item["logprob"], int(token)) for token, item in log_probs[position + 1].items()), reverse=True)[:top]
        for position in positions.tolist()
    ]
    if incomplete := [row for row in top_items if len(row) < top]:
        raise ValueError(f"{len(incomplete[0])} of {top} tokens at a position")
    rows = np.array(top_items, np.float64).reshape(len(top_items), top, 2)
    return TopLogProbs(rows[..., 0].astype(np.float32), rows[..., 1].astype(np.int32))


def _parse_completion(response: httpx.Response) -> Completion:
    choice = response.json()["choices"][0]
    tokens = choice["token_ids"]
    return Completion(tokens, [0.0] * len(tokens), "stop" if choice["finish_reason"] == "stop" else "length")
