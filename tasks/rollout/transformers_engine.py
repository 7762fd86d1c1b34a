"""Generation by transformers, in this process: batches padded on the left, each completion with random numbers of its
own."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from ...bridge import runtime
from ...bridge.checkpoint.pretrained import load_tokenizer
from .engine import Cancelled, Completion, Request, Sampling, Top
from .eos import end_tokens
from .hf_replica import Replica
from .transformers_experts import ExpertsSeen

ROWS = 64  # requests that are generated at a time
PLACES = 1024  # of a text, whose logits are in fp32 at a time


class TransformersEngine:
    """An Engine over a replica of the model in `folder`, on this rank's device.

    `load`: begin with the folder's weights; else with none, so that every tensor has to come by the first `update`.
    The same request gives the same tokens whatever is beside it, as far as batches of other shapes give the same
    logits: in fp32 but for near ties. Raises ValueError where transformers does not know the model.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype, load: bool = True, rows: int = ROWS):
        folder = Path(folder)
        self.device, self.rows = runtime.device(), rows
        self.replica = Replica(folder, dtype=dtype, device=self.device, load=load)
        self.tokenizer: Any = load_tokenizer(folder)
        self.ends = end_tokens(folder, self.tokenizer)
        self.replica.model.generation_config = GenerationConfig()  # nothing of its own beside Sampling

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, is_cancelled: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """See Reader. Raises RuntimeError where weights have not come yet."""
        if lacking := self.replica.lacking:
            raise RuntimeError(f"{len(lacking)} weights of the engine have not come yet, {min(lacking)} among them")
        order = sorted(range(len(requests)), key=lambda at: len(requests[at].tokens))  # little padding
        found: dict[int, Completion] = {}
        for first in range(0, len(order), self.rows):
            if is_cancelled and is_cancelled():
                raise Cancelled
            batch = order[first : first + self.rows]
            completions = self._batch([requests[at] for at in batch], sampling, is_cancelled)
            found.update(zip(batch, completions, strict=True))
        return [found[at] for at in range(len(requests))]

    @torch.no_grad()
    def top_log_probs(self, tokens: list[int], places: list[int], top: int, vocab_size: int) -> Top:
        """See Reader. One text at a time: of all its places there are logits."""
        at = torch.tensor(places, device=self.device)
        logits = self.replica.model(torch.tensor([tokens], device=self.device), logits_to_keep=at).logits[0]
        if top > min(vocab_size, logits.shape[1]):
            raise ValueError(f"{top} likeliest tokens: the model has {min(vocab_size, logits.shape[1])}")
        found = [torch.log_softmax(part[:, :vocab_size].float(), -1).topk(top) for part in logits.split(PLACES)]
        log_probs, ids = torch.cat([each.values for each in found]), torch.cat([each.indices for each in found])
        return Top(log_probs.cpu().numpy(), ids.int().cpu().numpy())

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
        longest = max(len(request.tokens) for request in requests)
        tokens = torch.zeros(len(requests), longest, dtype=torch.int64)  # padding is masked: any token does
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(requests):
            tokens[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
            mask[row, longest - len(request.tokens) :] = 1
        draw = _Draw(requests, sampling, longest, mask.to(self.device))
        ends = self.ends if sampling.ends is None else set(sampling.ends)
        stop = _Stop(draw.limits, longest, ends, sampling.stop, self.tokenizer, is_cancelled)
        settings = GenerationConfig(
            max_new_tokens=max(draw.limits), do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True
        )
        model = self.replica.model
        seen = ExpertsSeen(model.config.get_text_config().num_hidden_layers)
        with seen.watching(model, len(requests)) if sampling.experts else nullcontext():
            model.generate(
                tokens.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=settings,
                logits_processor=[draw],
                stopping_criteria=[stop],
            )
        found = draw.completions(stop)
        if not sampling.experts:
            return found
        first = [longest - len(request.tokens) for request in requests]
        ends = [longest + len(one.tokens) - 1 for one in found]
        each = zip(found, seen.experts(), first, ends, strict=True)
        return [replace(one, experts=experts[start:end]) for one, experts, start, end in each]


class _Draw(LogitsProcessor):
    """Draws the next token of each row, and leaves nothing else to choose."""

    def __init__(self, requests: list[Request], sampling: Sampling, longest: int, mask: Tensor):
        self.limits = [
            max(1, min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens))
            for request in requests
        ]
        self._sampling, self._longest, self._mask = sampling, longest, mask
        self._tokens: list[Tensor] = []  # [rows] each, of one step after another
        self._log_probs: list[Tensor] = []
        numbers = torch.zeros(len(requests), max(self.limits), dtype=torch.float64)
        for row, (request, limit) in enumerate(zip(requests, self.limits, strict=True)):
            generator = torch.Generator().manual_seed(request.seed)
            numbers[row, :limit] = torch.rand(limit, generator=generator, dtype=torch.float64)
        self._numbers = numbers.to(mask.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [rows, so far]; scores, the logits [rows, vocabulary]."""
        sampling, logits = self._sampling, scores.float()
        every = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
        if sampling.repetition_penalty != 1.0:
            logits = self._penalised(input_ids, logits)
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            chosen = drawn(filtered(logits / sampling.temperature, sampling), self._numbers[:, len(self._tokens)])
        self._tokens.append(chosen)
        self._log_probs.append(every.gather(-1, chosen[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)

    def completions(self, stop: "_Stop") -> list[Completion]:
        tokens, log_probs = (torch.stack(steps, dim=1).tolist() for steps in (self._tokens, self._log_probs))
        return [
            Completion(tokens[row][:length], log_probs[row][:length], "stop" if stop.stopped[row] else "length")
            for row, length in enumerate(stop.lengths)
        ]

    def _penalised(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """By https://arxiv.org/abs/1909.05858, of tokens of the prompt and the completion."""
        new = input_ids.shape[1] - self._longest
        seen = torch.zeros_like(logits, dtype=torch.int64)
        seen.scatter_add_(-1, input_ids, torch.nn.functional.pad(self._mask, (0, new), value=1))
        penalty = self._sampling.repetition_penalty
        return torch.where(seen > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Stop(StoppingCriteria):
    """Ends a row at an end token, at a stop text, or at its limit; raises Cancelled where nobody waits any more."""

    def __init__(
        self,
        limits: list[int],
        longest: int,
        ends: set[int],
        texts: tuple[str, ...],
        tokenizer: Any,
        is_cancelled: Callable[[], bool] | None,
    ):
        self.lengths = [0] * len(limits)  # of the completions that have ended
        self.stopped = [False] * len(limits)  # by a token or a text
        self._limits, self._longest, self._ends, self._texts = limits, longest, ends, texts
        self._tokenizer, self._is_cancelled = tokenizer, is_cancelled
        # A token is a byte of text or more, but for special ones: enough to hold a text that the last token completes.
        self._window = max((len(text.encode()) for text in texts), default=0) + 8

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
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
        said = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(text in said for text in self._texts)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [rows, vocabulary] with those at -inf that are not among the top k, then not in the nucleus top p: the
    fewest likeliest tokens of that much probability (https://arxiv.org/abs/1904.09751)."""
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # of all that are likelier
        out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(out, -torch.inf)
    return logits


def drawn(logits: Tensor, numbers: Tensor) -> Tensor:
    """The tokens [rows] where the cumulative softmax of logits [rows, vocabulary] passes `numbers` [rows] of 0 to 1."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    places = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)  # the last token that has any probability
    return torch.minimum(places, last)[:, 0]
