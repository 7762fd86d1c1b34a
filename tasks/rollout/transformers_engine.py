"""Generation with transformers in this process: left-padded batches, and a random generator per completion."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from ...bridge import runtime
from ...bridge.checkpoint.pretrained import load_tokenizer
from .engine import Cancelled, Completion, Request, Sampling, TopLogProbs
from .eos import eos_token_ids
from .hf_replica import Replica
from .transformers_experts import ExpertRecorder

ROWS = 64  # requests per batch
MAX_POSITIONS = 1024  # positions whose logits are in fp32 at a time


class TransformersEngine:
    """Engine over a replica of the model in `folder`, on this rank's device.

    `load`: start with the folder's weights, else with none, so that the first `update` must send every tensor. The same
    request gives the same tokens in any batch, as far as batches of other shapes give the same logits: in fp32 up to
    near ties. Raises ValueError where transformers does not support the model.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype, load: bool = True, rows: int = ROWS):
        folder = Path(folder)
        self.device, self.rows = runtime.device(), rows
        self.replica = Replica(folder, dtype=dtype, device=self.device, load=load)
        self.tokenizer = load_tokenizer(folder)
        self.ends = eos_token_ids(folder, self.tokenizer)
        self.replica.model.generation_config = GenerationConfig()  # no defaults beside Sampling

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Generate as `ScoringEngine`. Raises RuntimeError where weights have not arrived yet."""
        if missing := self.replica.lacking:
            raise RuntimeError(f"{len(missing)} weights of the engine have not arrived yet, such as {min(missing)}")
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))  # little padding
        completions: dict[int, Completion] = {}
        for first in range(0, len(order), self.rows):
            if is_cancelled and is_cancelled():
                raise Cancelled
            batch = order[first : first + self.rows]
            batch_completions = self._batch([requests[i] for i in batch], sampling, is_cancelled)
            completions.update(zip(batch, batch_completions, strict=True))
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def top_log_probs(self, tokens: list[int], positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Score one text as `ScoringEngine`; logits are made only at the positions."""
        kept = torch.tensor(positions, device=self.device)
        logits = self.replica.model(torch.tensor([tokens], device=self.device), logits_to_keep=kept).logits[0]
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
        del self.replica
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cuda":
            self.replica.move(device)
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _batch(
        self, requests: list[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None
    ) -> list[Completion]:
        tokens, mask = left_pad([request.tokens for request in requests], 0)  # masked: any token will do
        longest = tokens.shape[1]
        sampler = _Sampler(requests, sampling, longest, mask.to(self.device))
        ends = self.ends if sampling.ends is None else set(sampling.ends)
        stop = _Stop(sampler.limits, longest, ends, sampling.stop, self.tokenizer, is_cancelled)
        settings = GenerationConfig(
            max_new_tokens=max(sampler.limits), do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True
        )
        model = self.replica.model
        recorder = ExpertRecorder(model.config.get_text_config().num_hidden_layers)
        with recorder.record(model, len(requests)) if sampling.experts else nullcontext():
            model.generate(
                tokens.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=settings,
                logits_processor=[sampler],
                stopping_criteria=[stop],
            )
        completions = sampler.completions(stop)
        if not sampling.experts:
            return completions
        first = [longest - len(request.tokens) for request in requests]
        ends = [longest + len(completion.tokens) - 1 for completion in completions]
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
    """Logits processor that draws the next token of each row, and leaves only that one."""

    def __init__(self, requests: list[Request], sampling: Sampling, longest: int, mask: Tensor):
        self.limits = [
            max(1, min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens))
            for request in requests
        ]
        self._sampling, self._longest, self._mask = sampling, longest, mask
        self._tokens: list[Tensor] = []  # [rows] per step
        self._log_probs: list[Tensor] = []
        numbers = torch.zeros(len(requests), max(self.limits), dtype=torch.float64)
        for row, (request, limit) in enumerate(zip(requests, self.limits, strict=True)):
            generator = torch.Generator().manual_seed(request.seed)
            numbers[row, :limit] = torch.rand(limit, generator=generator, dtype=torch.float64)
        self._numbers = numbers.to(mask.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw from scores (logits [rows, vocabulary]), after input_ids [rows, tokens so far]."""
        sampling, logits = self._sampling, scores.float()
        log_probs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
        if sampling.repetition_penalty != 1.0:
            logits = self._penalize(input_ids, logits)
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = sample_tokens(
                filter_logits(logits / sampling.temperature, sampling), self._numbers[:, len(self._tokens)]
            )
        self._tokens.append(chosen)
        self._log_probs.append(log_probs.gather(-1, chosen[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)

    def completions(self, stop: "_Stop") -> list[Completion]:
        tokens, log_probs = (torch.stack(steps, dim=1).tolist() for steps in (self._tokens, self._log_probs))
        return [
            Completion(tokens[row][:length], log_probs[row][:length], "stop" if stop.stopped[row] else "length")
            for row, length in enumerate(stop.lengths)
        ]

    def _penalize(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Apply the repetition penalty (https://arxiv.org/abs/1909.05858) to tokens of prompt and completion."""
        new = input_ids.shape[1] - self._longest
        seen = torch.zeros_like(logits, dtype=torch.int64)
        seen.scatter_add_(-1, input_ids, torch.nn.functional.pad(self._mask, (0, new), value=1))
        penalty = self._sampling.repetition_penalty
        return torch.where(seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Stop(StoppingCriteria):
    """Stopping criterion of rows: an end token, a stop text, the length. Raises Cancelled once `is_cancelled()` is
    true."""

    def __init__(
        self,
        limits: list[int],
        longest: int,
        ends: set[int],
        texts: tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        is_cancelled: Callable[[], bool] | None,
    ):
        self.lengths = [0] * len(limits)  # of completions that have ended
        self.stopped = [False] * len(limits)  # at an end token or a stop text
        self._limits, self._longest, self._ends, self._texts = limits, longest, ends, texts
        self._tokenizer, self._is_cancelled = tokenizer, is_cancelled
        # Tokens other than special ones have at least a byte of text: the window holds any text that the last one ends.
        self._window = max((len(text.encode()) for text in texts), default=0) + 8

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        if self._is_cancelled and self._is_cancelled():
            raise Cancelled
        rows = input_ids[:, self._longest :][:, -max(1, self._window) :].tolist()
        new = input_ids.shape[1] - self._longest
        for row, tail in enumerate(rows):
            if self.lengths[row]:
                continue
            self.stopped[row] = tail[-1] in self._ends or self._says_stop(tail)
            if self.stopped[row] or new == self._limits[row]:
                self.lengths[row] = new
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)

    def _says_stop(self, tail: list[int]) -> bool:
        if not self._texts:
            return False
        tail_text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(text in tail_text for text in self._texts)


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Mask logits [rows, vocabulary] outside of the top k, then outside of the nucleus top p, by -inf.

    The nucleus is the smallest set of likeliest tokens with that probability (https://arxiv.org/abs/1904.09751).
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # total probability of likelier tokens
        out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(out, -torch.inf)
    return logits


def sample_tokens(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens [rows] where the cumulative softmax of logits [rows, vocabulary] passes `numbers` [rows] in [0,
    1)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    tokens = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # the last token with non-zero probability
    return torch.minimum(tokens, last)[:, 0]
