"""Interface of rollout engines: generate completions with log-probabilities, and load new weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a run."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()  # stop texts, which stay in the completion
    experts: bool = False  # record Completion.experts
    ends: tuple[int, ...] | None = None  # end tokens; None: those of the engine's checkpoint


@dataclass(frozen=True)
class Request:
    """Prompt of one completion.

    `seed` seeds this completion's random numbers. The same request gives the same tokens in any batch: exactly with the
    transformers engine, and with vLLM as far as its kernels are deterministic.
    """

    tokens: list[int]
    seed: int
    max_new_tokens: int | None = None  # a lower limit than Sampling's


@dataclass(frozen=True)
class Completion:
    """Tokens generated for a request, with the end token if one was drawn.

    `log_probs`: log softmax(logits / temperature) of each token, before top_p, top_k and the repetition penalty. At
    temperature 0 they are those of temperature 1.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]  # stop: at an end token or a stop text
    # Integers [tokens, layers, topk], arbitrary in dense layers: the experts of prompt and completion, except the last
    # token, which never goes through the model.
    experts: np.ndarray | None = field(default=None, compare=False)

    def experts_of(self, length: int) -> np.ndarray | None:
        """Return int16 [length, layers, topk] for prompt and completion, -1 where nothing was recorded."""
        if self.experts is None:
            return None
        padded = np.full((length, *self.experts.shape[1:]), -1, np.int16)
        padded[: len(self.experts)] = self.experts
        return padded


class CompletionEngine(Protocol):
    """Engine that generates completions."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return a completion of each request, in their order."""
        ...

    def sleep(self) -> None:
        """Free the memory of generation until `wake`."""
        ...

    def wake(self) -> None:
        """Get ready to generate again."""
        ...

    def close(self) -> None:
        """Release all resources; the engine cannot be used afterwards."""
        ...


class Engine(CompletionEngine, Protocol):
    """Engine that generates completions and loads new weights."""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors by their Hugging Face names, on any device. Reads `weights` to its end."""
        ...

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return checksums (weight_sync.py) of the engine's tensors by Hugging Face name, except those it holds in
        part."""
        ...


class TopLogProbs(NamedTuple):
    """Most likely next tokens at some positions of a text, the likeliest first."""

    log_probs: np.ndarray  # fp32 [positions, top], at temperature 1
    tokens: np.ndarray  # int32 [positions, top]


class Cancelled(Exception):
    """Raised when the client of a generation has disconnected."""


class ScoringEngine(Engine, Protocol):
    """Engine that also scores given tokens, and whose generation can be cancelled."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Generate as `CompletionEngine`; raise Cancelled once `is_cancelled()`, polled before each token, is true."""
        ...

    def top_log_probs(self, tokens: list[int], positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Return the `top` likeliest next tokens below `vocab_size` at each of `positions` (0: after the first token).

        Raises ValueError where `top` is larger than the vocabulary.
        """
        ...

    def vocabulary(self) -> dict[str, int]:
        """Return the tokenizer's vocabulary."""
        ...
