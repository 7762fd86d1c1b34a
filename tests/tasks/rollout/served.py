"""A rollout server with an engine whose answers are known, in a thread of the test or as a process of its own."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import uvicorn
from megaswift.tasks.rollout.engine import Cancelled, Completion, Request, Sampling, TopLogProbs
from megaswift.tasks.rollout.in_process import InProcessBackend
from megaswift.tasks.rollout.server import Server
from torch import Tensor


class KnownEngine:
    """Says the prompt backwards, each token with a log-probability that shows the seed and the weights.

    A prompt that begins with 99 takes a minute, if it is not cancelled; one with 98 is an error, one with 97 fails.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.awake = True

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        return [self.answer(request, sampling, is_cancelled) for request in requests]

    def answer(
        self, request: Request, sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> Completion:
        if request.tokens[0] == 99:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if is_cancelled and is_cancelled():
                    raise Cancelled
                time.sleep(0.02)
        if request.tokens[0] == 98:
            raise ValueError("the prompt has 98 tokens, and the model takes 97")
        if request.tokens[0] == 97:
            raise ZeroDivisionError("a kernel broke")
        tokens = request.tokens[::-1][: request.max_new_tokens or sampling.max_new_tokens]
        ends = [at for at, token in enumerate(tokens, 1) if token in (sampling.ends or ())]
        tokens = tokens[: ends[0] if ends else None]
        weight = self.weights["scale"].item() if "scale" in self.weights else 0.0
        experts = np.array(request.tokens).reshape(-1, 1, 1) if sampling.experts else None
        return Completion(tokens, [-0.1 * request.seed - weight / 3] * len(tokens), "stop", experts)

    def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """The tokens after the one at each position, less and less likely; 96: too few, 95: an unknown one, 94: NaN."""
        tokens = document.tokens
        self.answer(Request(tokens, 0), Sampling(max_new_tokens=1))
        ids = np.array([[(tokens[position] + n) % vocab_size for n in range(top)] for position in positions], np.int32)
        log_probs = -0.5 * np.arange(1, top + 1, dtype=np.float32) - np.array(positions, np.float32)[:, None] / 8
        if tokens[0] == 96:
            return TopLogProbs(log_probs[1:], ids[1:])
        ids[0, 0] = 10**6 if tokens[0] == 95 else ids[0, 0]
        log_probs[0, 0] = np.nan if tokens[0] == 94 else log_probs[0, 0]
        return TopLogProbs(log_probs, ids)

    def vocabulary(self) -> dict[str, int]:
        return {"red": 0, "green": 1, "blue": 2}

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "refused":
                raise KeyError("the model has no weight refused")
            self.weights[name] = tensor.clone()

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        return {name: str(self.weights[name].double().sum().item()) for name in names if name in self.weights}

    def close(self) -> None:
        self.awake = False


@contextmanager
def listening(app: Any, port: int = 0, http: Any = "auto") -> Iterator[int]:
    """The port of a server in a thread; 0: any, which nobody else can take before it listens."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        running = uvicorn.Server(uvicorn.Config(app, http=http, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield bound.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join(10)


@contextmanager
def serving(port: int = 0, backend: type[InProcessBackend] = InProcessBackend, http: Any = "auto", **settings):
    """(address, engine, server) of one in a thread."""
    engine = KnownEngine()
    server = Server(backend(engine, "known"), "known", **settings)
    with listening(server.app, port, http) as port:
        yield f"http://127.0.0.1:{port}", engine, server


def tensors() -> dict[str, Tensor]:
    """Return tensors of many types: a scalar, an empty, a non-contiguous one, one beyond a bucket of 4096 bytes."""
    generator = torch.Generator().manual_seed(5)
    return {
        "scale": torch.tensor(1.5),
        "bf16": torch.randn(7, 5, generator=generator).bfloat16(),
        "turned": torch.randn(6, 9, generator=generator).T,
        "half": torch.randn(3, generator=generator).half(),
        "float8": torch.randn(11, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "large": torch.randn(40, 60, generator=generator),
        "int64": torch.arange(13),
    } | {f"layers.{i}.weight": torch.randn(17, 13, generator=generator) for i in range(30)}


if __name__ == "__main__":
    app = Server(InProcessBackend(KnownEngine(), "known"), "known").app
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", timeout_graceful_shutdown=1)
