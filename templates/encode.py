"""Rows -> tokens and how much each is trained on."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from .chat import ChatTemplate
from .formats import Conversation, Stage, UnusableRow, to_conversation, to_text
from .options import TemplateOptions
from .store import FORMAT, Refusals

Row = tuple[int, str, dict[str, Any]]  # number, place to name in a message, columns
Runs = list[tuple[int, float]]  # loss weights, run-length encoded: (tokens, weight)
Document = tuple[int, list[int], Runs]  # number of the row, token ids, loss weights


class Encoder:
    """Encodes rows by the options. Raises ValueError where the options and the tokenizer do not fit together."""

    def __init__(self, tokenizer, options: TemplateOptions, stage: Stage, columns: dict[str, str]):
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer has no fast version (tokenizer.json), which finds the tokens of a turn")
        if stage == "sft" and options.truncation_strategy == "split":
            raise ValueError("--truncation_strategy split cuts plain text (megatron pt); take delete, left or right")
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
        texts: list[tuple[int, str, str, Any]] = []  # number, place, text, turns
        for number, place, row in rows:
            try:
                texts.append((number, place, *self._text(row)))
            except UnusableRow as reason:
                refusals.add(str(reason), place)
        backend = self.tokenizer.backend_tokenizer
        # Plain text needs no offsets, and is faster without.
        encode_batch = backend.encode_batch if self.chat else backend.encode_batch_fast
        encodings = encode_batch([text for _, _, text, _ in texts], add_special_tokens=self.chat is None)
        documents = []
        for (number, place, _, turns), encoding in zip(texts, encodings, strict=True):
            try:
                documents += [(number, ids, runs) for ids, runs in self._cut(*self._weigh(encoding, turns))]
            except UnusableRow as reason:
                refusals.add(str(reason), place)
        return documents, refusals

    def _text(self, row: dict[str, Any]) -> tuple[str, list[tuple[int, int, float]]]:
        """The text of a row and its turns: start, end, loss weight."""
        row = {self.columns.get(column, column): value for column, value in row.items()}
        if self.chat is None:
            text = to_text(row)
            if not text:
                raise UnusableRow("it is empty")
            return text, []
        conversation = to_conversation(row)
        if self.system and conversation.messages[0]["role"] != "system":
            conversation.messages.insert(0, {"role": "system", "content": self.system})
            conversation.weights.insert(0, None)
        text, turns = self.chat.turns(conversation)
        return text, [(*turn, weight) for turn, weight in zip(turns, self._turn_weights(conversation), strict=True)]

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

    def _weigh(self, encoding, turns: list[tuple[int, int, float]]) -> tuple[list[int], Runs]:
        ids = encoding.ids
        if self.chat is None:
            eos = self.tokenizer.eos_token_id
            ids = ids if ids[-1:] == [eos] else [*ids, eos]
            return ids, [(len(ids), 1.0)]
        elsewhere = float(self.options.loss_scale == "all")
        runs, done = [], 0
        for start, end, weight in turns:
            first, after = _tokens(encoding, start, end)
            first = max(first, done)
            if after > first:
                runs += [(first - done, elsewhere), (after - first, weight)]
                done = after
        return ids, _joined([*runs, (len(ids) - done, elsewhere)])

    def _cut(self, ids: list[int], runs: Runs) -> list[tuple[list[int], Runs]]:
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


def _tokens(encoding, start: int, end: int) -> tuple[int, int]:
    """The tokens [first, after) that hold a character of [start, end)."""
    first = next((t for i in range(start, end) if (t := encoding.char_to_token(i)) is not None), None)
    last = next((t for i in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(i)) is not None), None)
    if first is None or last is None:
        return 0, 0
    # A character may be spread over several tokens.
    while last + 1 < len(encoding.ids) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < end:
        last += 1
    return first, last + 1


def _joined(runs: Runs) -> Runs:
    """The same weights in as few runs as possible."""
    return [
        (sum(tokens for tokens, _ in group), weight)
        for weight, group in ((weight, list(group)) for weight, group in groupby(runs, key=lambda run: run[1]))
        if any(tokens for tokens, _ in group)
    ]


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """The runs of the tokens [start, stop)."""
    cut, at = [], 0
    for tokens, weight in runs:
        inside = min(at + tokens, stop) - max(at, start)
        if inside > 0:
            cut.append((inside, weight))
        at += tokens
    return cut
