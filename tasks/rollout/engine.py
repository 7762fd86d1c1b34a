"""What every rollout engine does: tokens in, tokens and their log-probabilities out, and new weights in between."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in a whole run."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()  # texts that end a completion, and stay in it
    experts: bool = False  # Completion.experts is asked for
    ends: tuple[int, ...] | None = None  # tokens that end a completion; None: those of the engine's own folder


@dataclass(frozen=True)
class Request:
    """A prompt, for one completion.

    `seed` is of this completion's random numbers: the same request gives the same tokens, whatever else is generated
    beside it (exactly with the transformers engine; with vLLM as far as its kernels repeat).
    """

    tokens: list[int]
    seed: int
    max_new_tokens: int | None = None  # less than Sampling's, where less is left


@dataclass(frozen=True)
class Completion:
    """What was drawn for a request, with the end token where one was drawn.

    `log_probs`, of each token: log softmax(logits / temperature), so before top_p, top_k and the repetition penalty;
    at temperature 0 as at 1.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]  # stop: by an end token or a stop text
    # [tokens, layers, topk], any integer type: the experts of the prompt's tokens and the completion's but for the
    # last, which no layer has seen; of dense layers anything.
    experts: np.ndarray | None = field(default=None, compare=False)

    def experts_of(self, length: int) -> np.ndarray | None:
        """int16 [length, layers, topk], of prompt and completion; -1 where nothing is known."""
        if self.experts is None:
            return None
        whole = np.full((length, *self.experts.shape[1:]), -1, np.int16)
        whole[: len(self.experts)] = self.experts
        return whole


class Writer(Protocol):
    """Generates."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """A completion of each request, in their order."""
        ...

    def sleep(self) -> None:
        """Free what generation needs until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be asked of it afterwards."""
        ...


class Engine(Writer, Protocol):
    """Generates, and takes new weights."""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights: whole tensors by their Hugging Face names, on any device. Reads `weights` to its end."""
        ...

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """`weights.checksum` of the engine's own tensors, by Hugging Face name; without those it cannot tell of."""
        ...


class Top(NamedTuple):
    """The likeliest next tokens at some places of a text, from the likeliest on."""

    log_probs: np.ndarray  # fp32 [places, top], at temperature 1
    tokens: np.ndarray  # int32 [places, top]


class Cancelled(Exception):
    """Nobody waits for the completions any more."""


class Reader(Engine, Protocol):
    """An engine that can be asked what it makes of given tokens too, and whose completions can be given up."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """As a `Writer` does. `is_cancelled` is asked before each token; where it says so Cancelled is raised."""
        ...

    def top_log_probs(self, tokens: list[int], places: list[int], top: int, vocab_size: int) -> Top:
        """At each of `places` (0: behind the first of the tokens) the `top` likeliest next ones, of those below
        `vocab_size`. Raises ValueError for more than the model has."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """The tokenizer's."""
        ...
