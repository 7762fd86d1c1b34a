"""Rows -> tokens and how much each is trained on."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .chat import ChatTemplate
from .formats import Conversation, Stage, UnusableRow, to_conversation, to_text
from .offsets import Offsets, Span
from .options import TemplateOptions
from .store import FORMAT, Refusals

Row = tuple[int, str, dict[str, Any]]  # number, place to name in a message, columns
Runs = list[tuple[int, float]]  # loss weights, run-length encoded: (tokens, weight)
Document = tuple[int, np.ndarray, Runs]  # number of the row, token ids, loss weights


GROUP = 1 << 20  # characters tokenized at a time: what the tokenizer returns is a hundred times as large


@dataclass(frozen=True)
class _Rendered:
    number: int
    place: str
    text: str
    turns: list[Span]  # of characters
    weights: list[float]  # of each turn


class Encoder:
    """Encodes rows by the options. Raises ValueError where the options and the tokenizer do not fit together."""

    def __init__(self, tokenizer, options: TemplateOptions, stage: Stage, columns: dict[str, str]):
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer has no fast version (tokenizer.json), which finds the tokens of a turn")
        if stage == "sft" and options.truncation_strategy == "split":
            raise ValueError("--truncation_strategy split cuts plain text (megatron pt); take delete, left or right")
        if stage == "pt" and (options.system or options.enable_thinking is not None):
            raise ValueError(
                "--system and --enable_thinking are for conversations; megatron pt takes plain text: drop it"
            )
        if stage == "pt" and tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which ends each document of pre-training")
        self.tokenizer, self.options, self.stage, self.columns = tokenizer, options, stage, columns
        self.system = _system(options.system)
        thinking = {} if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
        self.chat = ChatTemplate(tokenizer, **thinking) if stage == "sft" else None
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        self.offsets = Offsets(backend)

    @property
    def fingerprint(self) -> str:
        """Names all that decides what a row becomes."""
        import tokenizers
        import transformers

        options = [getattr(self.options, f.name) for f in fields(TemplateOptions)]
        tokenizer = self.tokenizer
        parts = [
            FORMAT, self.stage, options, self.system, self.columns,
            tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map,
            transformers.__version__, tokenizers.__version__,
        ]  # fmt: skip
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()

    def encode(self, rows: Iterable[Row]) -> tuple[list[Document], Refusals]:
        """The documents of rows, in order, and the rows that give none."""
        refusals = Refusals()
        rendered: list[_Rendered] = []
        for number, place, row in rows:
            try:
                rendered.append(_Rendered(number, place, *self._text(row)))
            except UnusableRow as reason:
                refusals.add(str(reason), place)
        documents = []
        for row, (ids, runs) in zip(rendered, self._tokenize(rendered), strict=True):
            try:
                documents += [(row.number, *piece) for piece in self._cut(ids, runs)]
            except UnusableRow as reason:
                refusals.add(str(reason), row.place)
        return documents, refusals

    def _tokenize(self, rows: list[_Rendered]) -> Iterator[tuple[np.ndarray, Runs]]:
        """Token ids and loss weights of each row."""
        for group in _groups(rows):
            texts = [row.text for row in group]
            if self.chat is None:
                eos = self.tokenizer.eos_token_id
                for encoding in self.tokenizer.backend_tokenizer.encode_batch_fast(texts):
                    ids = encoding.ids if encoding.ids[-1:] == [eos] else [*encoding.ids, eos]
                    yield np.array(ids, np.int32), [(len(ids), 1.0)]
            else:
                found = self.offsets.tokenize(texts, [row.turns for row in group])
                for row, (ids, spans) in zip(group, found, strict=True):
                    yield ids, self._runs(len(ids), spans, row.weights)

    def _runs(self, length: int, spans: list[Span], weights: list[float]) -> Runs:
        """The loss weights of a document whose turns are these spans of tokens."""
        elsewhere = float(self.options.loss_scale == "all")
        runs, done = [], 0
        for (first, after), weight in zip(spans, weights, strict=True):
            first = max(first, done)
            if after > first:
                runs += [(first - done, elsewhere), (after - first, weight)]
                done = after
        return [run for run in (*runs, (length - done, elsewhere)) if run[0]]

    def _text(self, row: dict[str, Any]) -> tuple[str, list[Span], list[float]]:
        """The text of a row, where the assistant's turns are in it, and how much each is trained on."""
        if self.columns:
            row = {self.columns.get(column, column): value for column, value in row.items()}
        if self.chat is None:
            text = to_text(row)
            if not text:
                raise UnusableRow("it is empty")
            return text, [], []
        conversation = to_conversation(row)
        if self.system and conversation.messages[0]["role"] != "system":
            conversation.messages.insert(0, {"role": "system", "content": self.system})
            conversation.weights.insert(0, None)
        return *self.chat.turns(conversation), self._turn_weights(conversation)

    def _turn_weights(self, conversation: Conversation) -> list[float]:
        """How much each turn of the assistant is trained on: as the message says, else by --loss_scale."""
        roles = [message["role"] for message in conversation.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        first = last_user if self.options.loss_scale == "last_round" else -1
        return [
            float(i > first) if weight is None else weight
            for i, (role, weight) in enumerate(zip(roles, conversation.weights, strict=True))
            if role == "assistant"
        ]

    def _cut(self, ids: np.ndarray, runs: Runs) -> list[tuple[np.ndarray, Runs]]:
        """A document within --max_length, or its pieces."""
        limit = self.options.max_length or len(ids)
        pieces = [(ids, runs)]
        if len(ids) > limit:
            match self.options.truncation_strategy:
                case "delete":
                    raise UnusableRow(f"longer than --max_length {limit}")
                case "left":
                    pieces = [(ids[-limit:], _slice(runs, len(ids) - limit, len(ids)))]
                case "right":
                    pieces = [(ids[:limit], _slice(runs, 0, limit))]
                case "split":
                    starts = range(0, len(ids), limit)
                    pieces = [(ids[i : i + limit], [(len(ids[i : i + limit]), 1.0)]) for i in starts]
        pieces = [(ids, runs) for ids, runs in pieces if any(weight for _, weight in _slice(runs, 1, len(ids)))]
        if not pieces:
            raise UnusableRow("no token of it is trained on")
        return pieces


def _system(system: str | None) -> str | None:
    if system and system.endswith(".txt") and Path(system).is_file():
        return Path(system).read_text(encoding="utf-8").strip()
    return system


def _groups(rows: list[_Rendered]) -> Iterator[list[_Rendered]]:
    """The rows, in order, in groups of about GROUP characters."""
    group, size = [], 0
    for row in rows:
        group.append(row)
        size += len(row.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The runs of the tokens [start, stop)."""
    cut, at = [], 0
    for tokens, weight in runs:
        inside = min(at + tokens, stop) - max(at, start)
        if inside > 0:
            cut.append((inside, weight))
        at += tokens
    return cut
