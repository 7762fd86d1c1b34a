"""Generation with transformers in this process, in left-padded batches with a random generator per completion."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from ...bridge import runtime
from ...bridge.checkpoint.answering_model import answering_model
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...templates.dataset.transformers_inputs import Values, to_model
from .engine import Cancelled, Completion, Request, Sampling, TopLogProbs
from .eos import eos_token_ids
from .hf_replica import Replica
from .media_inputs import RequestInputs
from .transformers_experts import ExpertRecorder

BATCH_SIZE = 64  # requests
MAX_POSITIONS = 1024  # positions whose logits are converted to fp32 at once


class TransformersEngine:
    """Engine over a replica of the model in `folder`, on this rank's device.

    `load`: load the folder's weights; otherwise the first `update` must send every tensor.

    A request gives the same tokens in any batch, provided that batches of other shapes give the same logits (in fp32
    they do, up to near ties). Raises ValueError where transformers does not support the model.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype, load: bool = True, batch_size: int = BATCH_SIZE):
        self.folder = folder = Path(folder)
        self.device, self.batch_size = runtime.device(), batch_size
        self.replica = Replica(folder, dtype=dtype, device=self.device, load=load)
        self.model = answering_model(self.replica.model)
        self.tokenizer = load_tokenizer(folder)
        self.eos_ids = eos_token_ids(folder, self.tokenizer)
        self.model.generation_config = GenerationConfig()  # no defaults other than Sampling's

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Generate as `ScoringEngine`. Raises RuntimeError while weights are missing."""
        if missing := self.replica.missing(for_images=any(request.has_media for request in requests)):
            raise RuntimeError(f"{len(missing)} weights of the engine have not arrived yet, such as {missing[0]}")
        lengths = [request.prompt_length or len(request.tokens) for request in requests]
        order = sorted(range(len(requests)), key=lengths.__getitem__)  # neighbours need little padding
        completions: dict[int, Completion] = {}
        for first in range(0, len(order), self.batch_size):
            if is_cancelled and is_cancelled():
                raise Cancelled
            batch = order[first : first + self.batch_size]
            batch_completions = self._batch([requests[i] for i in batch], sampling, is_cancelled)
            completions.update(zip(batch, batch_completions, strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Score tokens as `ScoringEngine`. Only logits at `positions` are computed."""
        kept, drawn = torch.tensor(positions, device=self.device), {}
        if document.has_media:
            document, drawn = self._without_drawn(document)
        (prompt,), media = self._expanded([document])
        tokens = torch.tensor([prompt])
        inputs = self._media_inputs(media, tokens)
        with self._embedding_at({place - len(document.tokens): token for place, token in drawn.items()}):
            logits = self._logits(tokens.to(self.device), kept, inputs)
        if top > min(vocab_size, logits.shape[1]):
            raise ValueError(f"{top} likeliest tokens: the model has {min(vocab_size, logits.shape[1])}")
        parts = [torch.log_softmax(part[:, :vocab_size].float(), -1).topk(top) for part in logits.split(MAX_POSITIONS)]
        log_probs, ids = torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
        return TopLogProbs(log_probs.cpu().numpy(), ids.int().cpu().numpy())

    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.replica.update(weights)

    def sleep(self) -> None:
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        self._move(self.device)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        return self.replica.checksums(names)

    def close(self) -> None:
        del self.replica, self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cuda":
            self.replica.move(device)
            torch.cuda.empty_cache()

    @cached_property
    def _media(self) -> RequestInputs:
        return RequestInputs(self.folder)

    def _expanded(self, requests: Sequence[Request]) -> tuple[list[list[int]], list[Values]]:
        """Return the prompts with all tokens of their media, and these media."""
        prompts, media = [request.tokens for request in requests], []
        if any(request.has_media for request in requests):
            prompts, media = self._media.expand(requests)
        for prompt, request in zip(prompts, requests, strict=True):
            request.check_length(len(prompt))
        return prompts, media

    def _media_inputs(self, media: list[Values], tokens: Tensor) -> dict[str, Any]:
        """Return the model's inputs for media, on the device. tokens: int64 [requests, longest]"""
        inputs = self._media.inputs(media, tokens) if media else {}
        return to_model(inputs, self.device, self.model.dtype)

    def _logits(self, tokens: Tensor, kept: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return the logits of a document at some positions: [kept, vocabulary]. tokens: int64 [1, length]"""
        if "logits_to_keep" in signature(self.model.forward).parameters:
            return self.model(tokens, logits_to_keep=kept, **inputs).logits[0]
        # An Omni model has no positions of media without a mask.
        return self.model(tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0, kept]

    def _without_drawn(self, document: Request) -> tuple[Request, dict[int, int]]:
        """Return a document without the placeholders that a model has drawn behind its media, and these, by place.

        transformers would look for an image, video or audio of each; with an Omni model, also behind each token that
        begins one.
        """
        config, tokens, drawn = self.model.config, list(document.tokens), dict[int, int]()
        is_medium = [False] * (len(tokens) + 1)
        for token_id, media in (
            (getattr(config, "image_token_id", None), document.images),
            (getattr(config, "video_token_id", None), document.videos),
            (getattr(config, "audio_token_id", None), document.audios),
        ):
            places = [place for place, token in enumerate(tokens) if token == token_id]
            drawn |= {place: tokens[place] for place in places[len(media) :]}
            for place in places[: len(media)]:
                is_medium[place] = True
        if (audio_start := getattr(config, "audio_start_token_id", None)) is not None:
            starts = audio_start, config.vision_start_token_id
            drawn |= {
                place: token for place, token in enumerate(tokens) if token in starts and not is_medium[place + 1]
            }
        for place in drawn:
            tokens[place] = 0
        return replace(document, tokens=tokens), drawn

    @contextmanager
    def _embedding_at(self, tokens: dict[int, int]) -> Iterator[None]:
        """Have the model embed these tokens at their places, counted from the end, whatever its input has there."""

        def embed(module: torch.nn.Module, _: object, embeddings: Tensor) -> Tensor:
            rows = module.weight[list(tokens.values())]  # pyright: ignore[reportIndexIssue]
            places = torch.tensor(list(tokens), device=self.device) % embeddings.shape[1]
            return embeddings.index_copy(1, places, rows[None])

        hook = self.model.get_input_embeddings().register_forward_hook(embed) if tokens else nullcontext()
        with hook:
            yield

    @torch.no_grad()
    def _batch(
        self, requests: list[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None
    ) -> list[Completion]:
        prompts, media = self._expanded(requests)
        tokens, mask = left_pad(prompts, 0)  # padding is masked, so any token id works
        inputs = self._media_inputs(media, tokens)
        prompt_length = tokens.shape[1]
        sampler = _Sampler(requests, sampling, prompt_length, mask.to(self.device))
        ends = self.eos_ids if sampling.ends is None else set(sampling.ends)
        stop = _Stop(sampler.limits, prompt_length, ends, sampling.stop, self.tokenizer, is_cancelled)
        settings = GenerationConfig(
            max_new_tokens=max(sampler.limits), do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True
        )
        model = self.model
        recorder = ExpertRecorder(model.config.get_text_config().num_hidden_layers)
        with recorder.record(model, len(requests)) if sampling.experts else nullcontext():
            model.generate(
                tokens.to(self.device),
                attention_mask=mask.to(self.device),
                **inputs,
                generation_config=settings,
                logits_processor=[sampler],
                stopping_criteria=[stop],
            )
        completions = sampler.completions(stop)
        if not sampling.experts:
            return completions
        first = [prompt_length - len(prompt) for prompt in prompts]
        ends = [prompt_length + len(completion.tokens) - 1 for completion in completions]
        recorded = zip(completions, recorder.experts(), first, ends, strict=True)
        return [replace(completion, experts=experts[start:end]) for completion, experts, start, end in recorded]


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, int64 [prompts, longest], with padding on the left."""
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return tokens, mask


class _Sampler(LogitsProcessor):
    """Logits processor that samples the next token of each row and masks all other tokens."""

    def __init__(self, requests: list[Request], sampling: Sampling, prompt_length: int, mask: Tensor):
        self.limits = [
            max(1, min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens))
            for request in requests
        ]
        self._sampling, self._prompt_length, self._mask = sampling, prompt_length, mask
        self._tokens: list[Tensor] = []  # [rows] per step
        self._log_probs: list[Tensor] = []
        uniforms = torch.zeros(len(requests), max(self.limits), dtype=torch.float64)
        for row, (request, limit) in enumerate(zip(requests, self.limits, strict=True)):
            generator = torch.Generator().manual_seed(request.seed)
            uniforms[row, :limit] = torch.rand(limit, generator=generator, dtype=torch.float64)
        self._uniforms = uniforms.to(mask.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample from `scores` (logits [rows, vocabulary]), given input_ids [rows, tokens so far]."""
        sampling, logits = self._sampling, scores.float()
        log_probs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
        if sampling.repetition_penalty != 1.0:
            logits = self._penalize(input_ids, logits)
        if sampling.temperature == 0:
            next_tokens = logits.argmax(-1)
        else:
            next_tokens = sample_tokens(
                filter_logits(logits / sampling.temperature, sampling), self._uniforms[:, len(self._tokens)]
            )
        self._tokens.append(next_tokens)
        self._log_probs.append(log_probs.gather(-1, next_tokens[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, next_tokens[:, None], 0.0)

    def completions(self, stop: "_Stop") -> list[Completion]:
        tokens, log_probs = (torch.stack(values, dim=1).tolist() for values in (self._tokens, self._log_probs))
        return [
            Completion(tokens[row][:length], log_probs[row][:length], "stop" if stop.stopped[row] else "length")
            for row, length in enumerate(stop.lengths)
        ]

    def _penalize(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Apply the repetition penalty (https://arxiv.org/abs/1909.05858) to the tokens of prompt and completion."""
        new_count = input_ids.shape[1] - self._prompt_length
        counts = torch.zeros_like(logits, dtype=torch.int64)
        counts.scatter_add_(-1, input_ids, torch.nn.functional.pad(self._mask, (0, new_count), value=1))
        penalty = self._sampling.repetition_penalty
        return torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Stop(StoppingCriteria):
    """Stopping criterion per row: an eos token, a stop string or the length limit.

    Raises Cancelled once `is_cancelled()` is true.
    """

    def __init__(
        self,
        limits: list[int],
        prompt_length: int,
        eos_ids: set[int],
        stops: tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        is_cancelled: Callable[[], bool] | None,
    ):
        self.lengths = [0] * len(limits)  # of ended completions; 0: not ended
        self.stopped = [False] * len(limits)  # by an eos token or a stop string
        self._limits, self._prompt_length, self._eos_ids, self._stops = limits, prompt_length, eos_ids, stops
        self._tokenizer, self._is_cancelled = tokenizer, is_cancelled
        # A token that is not special has at least a byte of text: this many tokens hold any stop string at their end.
        self._window = max((len(text.encode()) for text in stops), default=0) + 8

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        if self._is_cancelled and self._is_cancelled():
            raise Cancelled
        rows = input_ids[:, self._prompt_length :][:, -max(1, self._window) :].tolist()
        new_count = input_ids.shape[1] - self._prompt_length
        for row, tail in enumerate(rows):
            if self.lengths[row]:
                continue
            self.stopped[row] = tail[-1] in self._eos_ids or self._has_stop_string(tail)
            if self.stopped[row] or new_count == self._limits[row]:
                self.lengths[row] = new_count
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)

    def _has_stop_string(self, tail: list[int]) -> bool:
        if not self._stops:
            return False
        tail_text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(text in tail_text for text in self._stops)


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits [rows, vocabulary] with -inf outside the top k, then the nucleus of top p, then below min p.

    The nucleus is the smallest set of likeliest tokens with that total probability (https://arxiv.org/abs/1904.09751).
    min p is relative to the likeliest token's probability (https://arxiv.org/abs/2407.01082).
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        preceding_mass = probabilities.cumsum(-1) - probabilities  # total probability of likelier tokens
        excluded = torch.zeros_like(preceding_mass, dtype=torch.bool).scatter(
            -1, order, preceding_mass >= sampling.top_p
        )
        logits = logits.masked_fill(excluded, -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return logits


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return tokens [rows]: the first whose cumulative softmax of logits [rows, vocabulary] exceeds the uniform number.

    uniforms: [rows], in [0, 1).
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    last_possible = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # the last token with non-zero probability
    return torch.minimum(tokens, last_possible)[:, 0]
