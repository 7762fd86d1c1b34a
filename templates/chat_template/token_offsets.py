"""Tokens of character spans.

A tokenizer takes a fifth more time if it also returns offsets. The tokens of a byte-level BPE (Qwen's, Llama 3's) are
the bytes of the text, so their lengths give the offsets. Each text is checked to have the length of its tokens.
"""

import json
from typing import TYPE_CHECKING
from unicodedata import is_normalized

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Span = tuple[int, int]


class Offsets:
    """Tokenizer of texts that also locates the tokens of character spans."""

    def __init__(self, backend: "Tokenizer"):
        self.backend = backend
        config = json.loads(backend.to_str())
        self._lengths = None  # bytes of each token; None: not a byte-level BPE
        keeps_text = config["normalizer"] is None or config["normalizer"]["type"] == "NFC"
        if keeps_text and config["decoder"] and config["decoder"]["type"] == "ByteLevel":
            lengths = np.zeros(max(backend.get_vocab().values()) + 1, np.int64)
            for token, number in backend.get_vocab().items():
                lengths[number] = len(token)  # one character stands for one byte
            for number, token in backend.get_added_tokens_decoder().items():
                lengths[number] = len(token.content.encode())
            self._lengths = lengths

    def tokenize(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, list[Span]]]:
        """Return each text's token ids, int32 [tokens], and the tokens [first, end) that touch each span.

        (0, 0) for a span without any token.
        """
        lengths = self._lengths
        if lengths is None:
            encodings = self.backend.encode_batch(texts, add_special_tokens=False)
            return [_by_encoding(encoding, chars) for encoding, chars in zip(encodings, spans, strict=True)]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            self._by_bytes(text, np.array(encoding.ids, np.int32), chars, lengths)
            for text, encoding, chars in zip(texts, encodings, spans, strict=True)
        ]

    def _by_bytes(
        self, text: str, ids: np.ndarray, spans: list[Span], lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span]]:
        ends = np.cumsum(lengths[ids])  # byte at which each token ends
        is_ascii = text.isascii()
        size = len(text) if is_ascii else len(text.encode())
        if not len(ids) or ends[-1] != size or not (is_ascii or is_normalized("NFC", text)):
            return _by_encoding(self.backend.encode(text, add_special_tokens=False), spans)
        edges = [edge if is_ascii else len(text[:edge].encode()) for span in spans for edge in span]
        firsts = np.searchsorted(ends, edges[::2], side="right").tolist()
        lasts = np.searchsorted(ends, edges[1::2], side="left").tolist()
        tokens = zip(spans, firsts, lasts, strict=True)
        return ids, [(first, last + 1) if start < end else (0, 0) for (start, end), first, last in tokens]


def _by_encoding(encoding: "Encoding", spans: list[Span]) -> tuple[np.ndarray, list[Span]]:
    return np.array(encoding.ids, np.int32), [_tokens(encoding, *span) for span in spans]


def _tokens(encoding: "Encoding", start: int, end: int) -> Span:
    first = next((t for i in range(start, end) if (t := encoding.char_to_token(i)) is not None), None)
    last = next((t for i in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(i)) is not None), None)
    if first is None or last is None:
        return 0, 0
    # A character may be spread over several tokens.
    while last + 1 < len(encoding.ids) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < end:
        last += 1
    return first, last + 1
