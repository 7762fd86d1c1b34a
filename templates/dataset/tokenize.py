"""Tokenization of rows, with the loss weight of each token."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from ..chat_template.render import Renderer, Text
from ..chat_template.token_offsets import Offsets, Span
from ..formats.medium import Medium
from ..formats.paired_media_rows import find_medium, media_of
from ..formats.presets import rename_columns
from ..formats.schemas import POOLED, PROMPTED, UNGROUPED, Stage, UnusableRow, row_errors
from ..formats.self_cognition import SelfCognition
from ..formats.token_rows import tokens_of
from ..json_types import JsonObject
from ..media.processor import VisionProcessor
from ..options import TemplateOptions
from ..tokenizer import Tokenizer
from .dropped_rows import DroppedRows
from .placed_media import PlacedMedium
from .samples import EncodedSample, Runs, decode_runs
from .shared_beginning import shared_beginning
from .token_format import FORMAT

Row = tuple[int, str, JsonObject]  # number, location for messages, columns

GROUP_CHARACTERS = 1 << 20  # characters tokenized at a time, because the tokenizer's result is a hundred times as large


@dataclass(frozen=True)
class _RenderedSample:
    row: int
    location: str
    texts: list[Text]
    label: list[float]
    columns: bytes
    tokens: "_Document | None" = None  # of a row that holds tokens instead of texts
    row_media: Sequence[Medium] = ()  # grouped stages: media of the row, by whose indices they are numbered


class _Document(NamedTuple):
    ids: np.ndarray  # int32 [tokens]
    runs: Runs
    body: Span  # tokens that may be truncated
    prompt: int = 0  # preference, kto, answered: tokens before the answer
    media: tuple[PlacedMedium, ...] = ()  # each of which `ids` have a placeholder for

    @property
    def length(self) -> int:
        """Number of tokens, with those of its media."""
        return len(self.ids) + sum(medium.plan.length - 1 for medium in self.media)


class Encoder:
    """Encoder of rows to tokens. Raises ValueError if options and tokenizer do not fit together.

    columns: columns to rename, as in --columns
    sample_length: most tokens of a sample's documents together; None: unlimited
    tools: tools for prompts without tools in their row
    vision: processor of images and videos; None: rows with such are refused
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: TemplateOptions,
        stage: Stage,
        columns: dict[str, str],
        sample_length: int | None = None,
        tools: list[JsonObject] | None = None,
        vision: VisionProcessor | None = None,
    ):
        if not tokenizer.is_fast:
            raise ValueError(
                "the tokenizer has no fast version (tokenizer.json), which locates a turn's tokens. Add one."
            )
        if stage != "pt" and options.truncation_strategy == "split":
            raise ValueError("--truncation_strategy split: for plain text (megatron pt). Set delete, left or right.")
        if stage == "pt" and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token, which ends each document of pre-training. Add one to its config."
            )
        self.tokenizer, self.options, self.columns = tokenizer, options, columns
        self.stage: Stage = stage
        # KTO's two documents are in separate rows.
        self.sample_length = None if stage in (*UNGROUPED, "kto") else sample_length
        self.vision = vision
        self.renderer = Renderer(tokenizer, options, stage, tools, vision)
        self.self_cognition = SelfCognition(options.model_name, options.model_author)
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        self.offsets = Offsets(backend)

    @property
    def fingerprint(self) -> str:
        """Hash of all that determines the tokens of a row."""
        import tokenizers
        import transformers

        options = [*self.options.first_options().values(), *self.options.set_additions().items()]
        tokenizer = self.tokenizer
        parts = [
            FORMAT, self.stage, options, self.renderer.system, self.renderer.tools, self.columns, self.sample_length,
            tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map,
            transformers.__version__, tokenizers.__version__,
        ]  # fmt: skip
        if self.stage == "preference":
            parts.append("shared beginnings of pairs")  # earlier versions did not store their lengths
        if self.vision:
            parts.append([self.vision.fingerprint, os.environ.get("ROOT_IMAGE_DIR")])
            if self.stage not in UNGROUPED:
                parts.append("media of several documents")  # earlier versions dropped such rows
            if self.stage == "prompts":
                parts.append("images and videos of prompts")  # likewise
            if self.stage in ("answered", "asked"):
                parts.append("media of answers")  # likewise
            if self.renderer.has_vision_prompts and self.stage in ("embedding", "reranker"):
                parts.append("prompts of Qwen3-VL-Embedding and Qwen3-VL-Reranker")  # earlier versions had others
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()

    def encode(self, rows: Iterable[Row]) -> tuple[list[EncodedSample], DroppedRows]:
        """Return the samples of rows in order, and the dropped rows.

        kto: each prompt is paired with the answer of another row among these.
        """
        dropped = DroppedRows()
        rendered: list[_RenderedSample] = []
        for number, location, row in rows:
            try:
                rendered += self._render(number, location, rename_columns(row, self.columns))
            except UnusableRow as reason:
                dropped.add(reason, location)
        samples: list[tuple[_RenderedSample, list[_Document]]] = []
        tokenized = self._tokenize([text for sample in rendered for text in sample.texts])
        for sample in rendered:
            documents = [sample.tokens] if sample.tokens else list(islice(tokenized, len(sample.texts)))
            try:
                if self.vision:
                    media = [text.media for text in sample.texts] or [()]
                    documents = [
                        self._with_media(document, document_media, sample.row_media)
                        for document, document_media in zip(documents, media, strict=True)
                    ]
                samples += [(sample, truncated) for truncated in self._truncate_sample(documents)]
            except UnusableRow as reason:
                dropped.add(reason, sample.location)
        if self.stage == "kto":
            first_documents = [documents[0] for _, documents in samples]
            for number, (_, documents) in enumerate(samples):
                documents.append(self._mismatched(documents[0], first_documents[number - 1]))
        encoded = [
            EncodedSample(
                sample.row,
                [(document.ids, document.runs) for document in documents],
                sample.label,
                sample.columns,
                [document.media for document in documents],
                self._shared(documents),
            )
            for sample, documents in samples
        ]
        return encoded, dropped

    def _shared(self, documents: list[_Document]) -> int:
        """Return the tokens that the documents of a pair may share; 0 with images or videos."""
        if self.stage != "preference" or any(document.media for document in documents):
            return 0
        return shared_beginning([(document.ids, decode_runs(document.runs)) for document in documents])

    @property
    def placeholders(self) -> list[int]:
        """Tokens that stand for media."""
        return self.vision.placeholder_ids if self.vision else []

    def media_of(self, row: JsonObject) -> list[Medium]:
        """Return the media of a usable row, in the order of their numbers in its samples."""
        return media_of(rename_columns(row, self.columns), self.stage)

    def _render(self, number: int, location: str, row: JsonObject) -> list[_RenderedSample]:
        if self.stage in UNGROUPED and row.get("input_ids") is not None:
            with row_errors():
                document = _Document(*tokens_of(row, self._vocabulary_size), (0, len(row["input_ids"])))
            return [_RenderedSample(number, location, [], [], self._channel(row), document)]
        if self.stage not in ("pt", *POOLED):
            try:
                row = self.self_cognition.fill(row)
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from None
        with row_errors():
            columns = self.renderer.columns(row) if self.stage in PROMPTED else self._channel(row)
            samples = self.renderer(row)
            media = [medium for texts, _ in samples for text in texts for medium in text.media]
            for text in (text.text for texts, _ in samples for text in texts):
                if not text.isascii():  # ASCII is always valid; the check avoids a copy
                    text.encode()
            row_media: Sequence[Medium] = ()
            if self.stage not in UNGROUPED and media:
                row_media = media_of(row, self.stage)
        return [_RenderedSample(number, location, *sample, columns, row_media=row_media) for sample in samples]

    def _channel(self, row: JsonObject) -> bytes:
        """Return the channel of a row as stored, empty without one: --enable_channel_loss."""
        channel = row.get("channel") if self.options.enable_channel_loss else None
        return b"" if channel is None else str(channel).encode()

    def _tokenize(self, texts: list[Text]) -> Iterator[_Document]:
        for group in _groups(texts):
            with_special, with_turns = ([text for text in group if _is_whole(text) is whole] for whole in (True, False))
            encodings = iter(self.tokenizer.backend_tokenizer.encode_batch_fast([text.text for text in with_special]))
            spans = [[*text.turns, *(span for span in (text.answer, text.body) if span)] for text in with_turns]
            located = iter(self.offsets.tokenize([text.text for text in with_turns], spans))
            for text in group:
                yield (
                    self._document_with_special_tokens(next(encodings).ids)
                    if _is_whole(text)
                    else self._document_with_turns(text, *next(located))
                )

    def _document_with_special_tokens(self, ids: list[int]) -> _Document:
        """Return a text tokenized with special tokens; pt also appends eos."""
        if self.stage == "pt":
            eos = self.tokenizer.eos_token_id
            assert eos is not None
            ids = ids if ids[-1:] == [eos] else [*ids, eos]
            return _Document(np.array(ids, np.int32), [(len(ids), 1.0)], (0, len(ids)))
        before, after = map(len, self._special_tokens)
        return _Document(np.array(ids, np.int32), [(len(ids), 1.0)], (before, len(ids) - after))

    @cached_property
    def _vocabulary_size(self) -> int:
        return self.tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer adds before and after a text."""
        encoding = self.tokenizer.backend_tokenizer.encode("a")
        mask = encoding.special_tokens_mask
        return encoding.ids[: mask.index(0)], encoding.ids[len(mask) - mask[::-1].index(0) :]

    def _document_with_turns(self, text: Text, ids: np.ndarray, spans: list[Span]) -> _Document:
        turns, other_spans = spans[: len(text.turns)], spans[len(text.turns) :]
        if text.special:  # an embedding's prompt
            before, after = self._special_tokens
            start, end = other_spans[0]
            ids = np.concatenate([before, ids, after]).astype(np.int32)
            return _Document(ids, [(len(ids), 1.0)], (start + len(before), end + len(before)))
        runs = _runs(len(ids), turns, text.weights, text.base_weight)
        return _Document(
            ids,
            runs,
            body=other_spans[0] if text.body else (0, len(ids)),
            prompt=other_spans[0][0] if text.answer else 0,
        )

    def _with_media(self, document: _Document, media: Sequence[Medium], row_media: Sequence[Medium]) -> _Document:
        """Return a document with the sizes of its media, which have no loss. Raises UnusableRow.

        row_media: those of the row, by whose indices they are numbered; empty: by their order in the document
        """
        assert self.vision is not None
        ids = document.ids
        placed = place_media(ids, media, self.vision)
        if not placed:
            return document
        if row_media:
            numbers = [find_medium(row_media, medium) for medium in media]
            placed = tuple(
                medium._replace(number=number) for medium in placed if (number := numbers[medium.number]) is not None
            )
        runs = document.runs
        for medium in placed:
            start, stop = self._span(ids, medium.place)
            runs = [*_slice(runs, 0, start), (stop - start, 0.0), *_slice(runs, stop, len(ids))]
        return document._replace(runs=runs, media=placed)

    def _span(self, ids: np.ndarray, place: int) -> Span:
        """Return the tokens of a medium before it is expanded: its placeholder, and the tokens that enclose it."""
        assert self.vision is not None
        start, stop = place, place + 1
        if self.vision.sound:  # a video's placeholder, and its sound's
            video, audio = self.vision.placeholder_id("video"), self.vision.placeholder_id("audio")
            if ids[place] == audio and place and ids[place - 1] == video:
                place = start = place - 1
            elif ids[place] == video:
                stop = place + 2
        before, behind = self.vision.enclosing(int(ids[place]))
        for token in reversed(before):  # the outer ones may be merged with text around them
            if start == 0 or ids[start - 1] != token:
                break
            start -= 1
        for token in behind:
            if stop == len(ids) or ids[stop] != token:
                break
            stop += 1
        return start, stop

    def _truncate_sample(self, documents: list[_Document]) -> list[list[_Document]]:
        """Return the documents of a sample within --max_length. A split document becomes several samples."""
        if self.stage in UNGROUPED:
            samples = [[piece] for piece in self._pieces(documents[0]) if _is_trained(piece)]
            if not samples:
                raise UnusableRow("none of its tokens is trained on")
            return samples
        documents = [self._truncate(document) for document in documents]
        if not all(len(document.ids) for document in documents):
            raise UnusableRow("one of its texts has no token")
        if self.stage not in POOLED:
            self._check_answers(documents[self.stage in PROMPTED :])
        if self.sample_length and sum(document.length for document in documents) > self.sample_length:
            raise UnusableRow(f"its documents are together longer than --packing_length {self.sample_length}")
        return [documents]

    def _pieces(self, document: _Document) -> list[_Document]:
        if self.options.truncation_strategy != "split":
            return [self._truncate(document)]
        if document.media:
            return self._pieces_with_media(document)
        limit = self.options.max_length or len(document.ids)
        pieces = [document.ids[start : start + limit] for start in range(0, len(document.ids), limit)]
        return [_Document(ids, [(len(ids), 1.0)], (0, len(ids))) for ids in pieces]

    def _pieces_with_media(self, document: _Document) -> list[_Document]:
        """Divide a document into pieces of at most --max_length tokens. No piece ends within a medium."""
        ids, limit = document.ids, self.options.max_length or document.length
        sizes = np.ones(len(ids), np.int64)
        starts = np.ones(len(ids), bool)  # whether a piece may start at a token
        for medium in document.media:
            start, stop = self._span(ids, medium.place)
            sizes[medium.place] = medium.plan.length
            starts[start + 1 : stop] = False
        ends, cuts = np.concatenate([[0], np.cumsum(sizes)]), [0]
        while ends[-1] - ends[cuts[-1]] > limit:
            after = int(np.searchsorted(ends, ends[cuts[-1]] + limit, side="right")) - 1
            while after > cuts[-1] and not starts[after]:
                after -= 1
            if after == cuts[-1]:
                raise UnusableRow(f"an image or video has more tokens than --max_length {limit}")
            cuts.append(after)
        return [
            _Document(
                ids[first:last],
                _slice(document.runs, first, last),
                (0, last - first),
                media=tuple(
                    medium._replace(place=medium.place - first)
                    for medium in document.media
                    if first <= medium.place < last
                ),
            )
            for first, last in pairwise([*cuts, len(ids)])
        ]

    def _truncate(self, document: _Document) -> _Document:
        ids, runs, (start, end), prompt, media = document
        limit = self.options.max_length
        if limit is None or (excess := document.length - limit) <= 0:
            return document
        if self.options.truncation_strategy == "delete":
            raise UnusableRow(f"longer than --max_length {limit}", tokens=document.length)
        if excess >= end - start:
            raise UnusableRow(
                f"longer than --max_length {limit} even without all text that may be truncated", tokens=document.length
            )
        left = self.options.truncation_strategy == "left"
        cut = start if left else end - excess
        for medium in media:
            first, after = self._span(ids, medium.place)
            if cut < after and first < cut + excess:
                raise UnusableRow(
                    f"longer than --max_length {limit}, and truncation would cut an image or video",
                    tokens=document.length,
                )
        media = tuple(medium._replace(place=medium.place - excess * (medium.place >= cut)) for medium in media)
        ids = np.concatenate([ids[:cut], ids[cut + excess :]])
        runs = _slice(runs, 0, cut) + _slice(runs, cut + excess, len(ids) + excess)
        return _Document(ids, runs, (start, end - excess), max(prompt - excess, 0) if left else prompt, media)

    def _check_answers(self, documents: list[_Document]) -> None:
        for document in documents:
            if document.prompt >= len(document.ids):
                limit = self.options.max_length
                raise UnusableRow(f"its prompt leaves no room for an answer within --max_length {limit}")
            if not _is_trained(document):
                raise UnusableRow("none of its tokens is trained on")
            if self.stage == "kto" and any(medium.place >= document.prompt for medium in document.media):
                raise UnusableRow("its answer has an image or video, and KTO pairs answers with other rows' prompts")
        if len(documents) == 2 and np.array_equal(documents[0].ids, documents[1].ids):
            first, second = ([medium.number for medium in document.media] for document in documents)
            if first == second:
                raise UnusableRow("its chosen and rejected answers are the same")

    def _mismatched(self, document: _Document, other: _Document) -> _Document:
        """Return the prompt of a document with the answer of another one (kto)."""
        ids = np.concatenate([document.ids[: document.prompt], other.ids[other.prompt :]])
        runs = _slice(document.runs, 0, document.prompt) + _slice(other.runs, other.prompt, len(other.ids))
        # Media lie in the prompt, which leaves room within the limit.
        limit = len(ids)
        if self.options.max_length is not None:
            limit = self.options.max_length - (document.length - len(document.ids))
        return _Document(ids[:limit], _slice(runs, 0, limit), (0, limit), media=document.media)


def place_media(ids: np.ndarray, media: Sequence[Medium], vision: VisionProcessor) -> tuple[PlacedMedium, ...]:
    """Return the media of a document at their placeholders in its ids. Raises UnusableRow."""
    places = np.flatnonzero(np.isin(ids, vision.reserved_ids)).tolist()
    numbered = [
        (number, part)
        for number, medium in enumerate(media)
        for part in ((medium, medium.sound) if vision.sound and medium.kind == "video" else (medium,))
    ]
    if ids[places].tolist() != [vision.placeholder_id(medium.kind) for _, medium in numbered]:
        literals = [part.repeated for kind in vision.placeholders if (part := vision.family.placeholder(kind))]
        raise UnusableRow(
            "its text has other placeholders than its media: the chat template omits one of these, or "
            f"a message contains the literal {' or '.join(literals)}"
        )
    return tuple(
        PlacedMedium(place, number, vision.plan(medium), medium)
        for place, (number, medium) in zip(places, numbered, strict=True)
    )


def _is_trained(document: _Document) -> bool:
    """Return whether any token is trained on, except the first, which is not predicted."""
    return any(weight for _, weight in _slice(document.runs, 1, len(document.ids)))


def _runs(length: int, spans: list[Span], weights: Sequence[float], base_weight: float) -> Runs:
    """Return the loss weights of a document: those of its turns, and `base_weight` elsewhere."""
    runs, position = [], 0
    for (first, after), weight in zip(spans, weights, strict=True):
        first = max(first, position)
        if after > first:
            runs += [(first - position, base_weight), (after - first, weight)]
            position = after
    return [run for run in (*runs, (length - position, base_weight)) if run[0]]


def _is_whole(text: Text) -> bool:
    """Return whether the tokenizer adds its special tokens to a text without parts to locate."""
    return text.special and text.body is None


def _groups(texts: list[Text]) -> Iterator[list[Text]]:
    """Yield the texts in order, in groups of about GROUP characters."""
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text.text)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _slice(runs: Runs, start: int, stop: int) -> Runs:
    """Return the runs of the tokens [start, stop)."""
    sliced, position = [], 0
    for tokens, weight in runs:
        overlap = min(position + tokens, stop) - max(position, start)
        if overlap > 0:
            sliced.append((overlap, weight))
        position += tokens
    return sliced
