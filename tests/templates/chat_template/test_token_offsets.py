"""Tokens of character spans, against the tokenizer's offsets."""

import random

import pytest
from megaswift.templates.chat_template.token_offsets import Offsets
from tokenizers import Tokenizer, normalizers, pre_tokenizers

PIECES = [
    "is ",
    "better",
    " \n\n",
    "é",
    "e\u0301",
    "漢字",
    "🎈",
    "<|im_end|>",
    "<|im_start|>user\n",
    "Ünïcode ",
    "\u0958",
    "e\u0301e\u0301e\u0301 is \u0958",  # NFC makes it as long again: places in it move, its end does not
]


@pytest.mark.parametrize("kind", ["byte level", "NFC", "lower case", "prefix space", "by words"])
def test_beside_the_tokenizers_own_offsets(backend, kind):
    tokenizer = Tokenizer.from_str(backend)
    match kind:
        case "NFC":
            tokenizer.normalizer = normalizers.NFC()
        case "lower case":
            tokenizer.normalizer = normalizers.Lowercase()
        case "prefix space":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "by words":  # leaves out the spaces, so that some spans hold no token
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
    choose = random.Random(0)
    texts, spans = [""], [[(0, 0)]]
    for _ in range(60):
        texts.append("".join(choose.choices(PIECES, k=choose.randint(1, 12))))
        spans.append([tuple(sorted(choose.choices(range(len(texts[-1]) + 1), k=2))) for _ in range(4)])
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    found = Offsets(tokenizer).tokenize(texts, spans)
    for encoding, places, (ids, tokens) in zip(encodings, spans, found, strict=True):
        assert ids.tolist() == encoding.ids
        for (start, end), (first, after) in zip(places, tokens, strict=True):
            holding = [
                t for t, (left, right) in enumerate(encoding.offsets) if left < end and right > start and start < end
            ]
            assert list(range(first, after)) == holding
