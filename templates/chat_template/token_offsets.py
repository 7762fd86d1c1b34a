"""Where in the text each token is.

A tokenizer tells when asked, and takes a fifth longer for it. The tokens of a byte-level BPE (Qwen's, Llama 3's) are
the bytes of the text, so that their lengths tell as well; whether they add up to the text is checked for each one.
"""

import json
from unicodedata import is_normalized

import numpy as np

Span = tuple[int, int]


class Offsets:
    """Tokenizes texts, and finds the tokens of a span of characters."""

    def __init__(self, backend):
        """`backend` is a tokenizers.Tokenizer."""
        self.backend = backend
        config = json.loads(backend.to_str())
        self._lengths = None  # bytes of each token, where these are known
        keeps_text = config["normalizer"] is None or config["normalizer"]["type"] == "NFC"
        if keeps_text and config["decoder"] and config["decoder"]["type"] == "ByteLevel":
            lengths = np.zeros(max(backend.get_vocab().values()) + 1, np.int64)
            for token, number in backend.get_vocab().items():
                lengths[number] = len(token)  # one character stands for one byte
            for number, token in backend.get_added_tokens_decoder().items():
                lengths[number] = len(token.content.encode())
            self._lengths = lengths

    def tokenize(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, list[Span]]]:
        """Of each text: its token ids [tokens] int32, and for each span of characters the tokens [first, after) that
        hold any of them; (0, 0) where no token does."""
        lengths = self._lengths
        if lengths is None:
            encodings = self.backend.encode_batch(texts, add_special_tokens=False)
            return [_located(encoding, places) for encoding, places in zip(encodings, spans, strict=True)]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [
            self._by_bytes(text, np.array(encoding.ids, np.int32), places, lengths)
            for text, encoding, places in zip(texts, encodings, spans, strict=True)
        ]

    def _by_bytes(
        self, text: str, ids: np.ndarray, spans: list[Span], lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span]]:
        ends = np.cumsum(lengths[ids])  # byte at which each token ends
        ascii = text.isascii()
        size = len(text) if ascii else len(text.encode())
        if not len(ids) or ends[-1] != size or not (ascii or is_normalized("NFC", text)):
            return _located(self.backend.encode(text, add_special_tokens=False), spans)
        places = [place if ascii else len(text[:place].encode()) for span in spans for place in span]
        firsts = np.searchsorted(ends, places[::2], side="right").tolist()
        lasts = np.searchsorted(ends, places[1::2], side="left").tolist()
        found = zip(spans, firsts, lasts, strict=True)
        return ids, [(first, last + 1) if start < end else (0, 0) for (start, end), first, last in found]


def _located(encoding, spans: list[Span]) -> tuple[np.ndarray, list[Span]]:
    return np.array(encoding.ids, np.int32), [_tokens(encoding, *span) for span in spans]


def _tokens(encoding, start: int, end: int) -> Span:
    first = next((t for i in range(start, end) if (t := encoding.char_to_token(i)) is not None), None)
    last = next((t for i in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(i)) is not None), None)
    if first is None or last is None:
        return 0, 0
    # A character may be spread over several tokens.
    while last + 1 < len(encoding.ids) and (chars := encoding.token_to_chars(last + 1)) and chars[0] < end:
        last += 1
    return first, last + 1
