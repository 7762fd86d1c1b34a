"""Interfaces of rollout engines, which generate completions with log-probabilities and load new weights."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ...bridge.checkpoint.strided_copy import WeightLayout
from .request_audio import RequestAudio
from .request_image import RequestImage
from .request_video import RequestVideo


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a run."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 or 0: all
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()  # stop strings; a completion includes the one that ended it
    experts: bool = False  # record Completion.experts
    ends: tuple[int, ...] | None = None  # eos token ids; None: those of the engine's checkpoint
    min_p: float = 0.0  # probability relative to the likeliest token's


@dataclass(frozen=True)
class Request:
    """Prompt of one completion.

    `seed` seeds this completion's random numbers. The same request gives the same tokens in any batch: exactly with the
    transformers engine, and with vLLM as far as its kernels are deterministic.
    """

    tokens: list[int]  # one placeholder stands for each image, video or audio
    seed: int
    max_new_tokens: int | None = None  # limit below Sampling.max_new_tokens
    images: Sequence[RequestImage] = ()  # in the order of their placeholders
    prompt_length: int | None = None  # tokens of the prompt in training, with those of its media; None: unknown
    videos: Sequence[RequestVideo] = ()  # in the order of their placeholders
    audios: Sequence[RequestAudio] = ()  # in the order of their placeholders

    @property
    def has_media(self) -> bool:
        return bool(self.images or self.videos or self.audios)

    def check_length(self, length: int) -> None:
        """Raise RuntimeError if the engine's prompt has another length than training's. length: in tokens"""
        if self.prompt_length not in (None, length):
            raise RuntimeError(
                f"the engine's prompt has {length} tokens with those of its {len(self.images)} images, "
                f"{len(self.videos)} videos and {len(self.audios)} audios, and training's has {self.prompt_length}: "
                "log-probabilities would be of other tokens. Set the same --model, and the same limits of images, for "
                "the engine and the run"
            )


@dataclass(frozen=True)
class Completion:
    """Tokens generated for a request, including the eos token if there is one.

    `log_probs`: log softmax(logits / temperature) of each token, before top_p, top_k and the repetition penalty. For
    temperature 0 the values are those at temperature 1.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]  # stop: at an eos token or a stop string
    # Integers [tokens, layers, topk]: experts of all tokens of prompt and completion but the last one, which the model
    # does not process. Values in dense layers are arbitrary.
    experts: np.ndarray | None = field(default=None, compare=False)

    def padded_experts(self, length: int) -> np.ndarray | None:
        """Return the experts padded to `length` tokens: int16 [length, layers, topk], -1 where none was recorded."""
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
        """Free the memory that generation needs, until `wake`."""
        ...

    def wake(self) -> None:
        """Restore the memory, so that the engine can generate."""
        ...

    def close(self) -> None:
        """Release all resources; the engine cannot be used afterwards."""
        ...


class Engine(CompletionEngine, Protocol):
    """Engine that generates completions and loads new weights."""

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors, named as in Hugging Face checkpoints, on any device. Reads `weights` to its end."""
        ...

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return `weight_sync.checksum` by Hugging Face name, of tensors that the engine does not shard or repack."""
        ...


@runtime_checkable
class WritableEngine(Engine, Protocol):
    """Engine whose tensors other code may write, once an update has shown their layout.

    `layout`: None before the first update, and where only `update` can load weights: `layout_problem` says why.
    """

    layout: WeightLayout | None
    layout_problem: str | None

    def writing(self) -> AbstractContextManager[None]:
        """Let the tensors of `layout` be written within the context."""
        ...


class TopLogProbs(NamedTuple):
    """Most likely next tokens at positions of a text, the likeliest first."""

    log_probs: np.ndarray  # fp32 [positions, top], at temperature 1
    tokens: np.ndarray  # int32 [positions, top]


class Cancelled(Exception):
    """Raised when the client of a generation has disconnected."""


class ScoringEngine(Engine, Protocol):
    """Engine that also scores existing tokens, and whose generation can be cancelled."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Generate as `CompletionEngine`. Raises Cancelled once `is_cancelled()`, called before each token, is true."""
        ...

    def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Return the `top` likeliest next tokens below `vocab_size` at each of `positions` (0: after the first token).

        positions: counted with all tokens of the document's images. Placeholders behind those of its images are tokens
        that a model has drawn. Raises ValueError where `top` is larger than the vocabulary.
        """
        ...

    def vocabulary(self) -> dict[str, int]:
        """Return the tokenizer's vocabulary: token ids by token."""
        ...
