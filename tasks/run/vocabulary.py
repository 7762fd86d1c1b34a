"""Checks that a model and a tokenizer belong together."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...bridge.checkpoint.pretrained import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", folder: Path, flag: str) -> None:
    """Raise ValueError, naming `flag`, if the vocabulary in `folder` differs from the tokenizer's."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    compare_vocabularies(load_tokenizer(folder).get_vocab(), tokenizer.get_vocab(), flag)


def compare_vocabularies(vocabulary: dict[str, int], trained: dict[str, int], flag: str) -> None:
    """Raise ValueError, naming `flag`, if a vocabulary differs from that of the trained model."""
    if vocabulary == trained:
        return
    word = next(word for word in vocabulary.keys() | trained.keys() if vocabulary.get(word) != trained.get(word))
    raise vocabulary_error(flag, word, vocabulary.get(word), trained.get(word))


def vocabulary_error(flag: str, word: str, token: object, trained: object) -> ValueError:
    """Return the error for a word with another token than in the trained model."""
    return ValueError(
        f"{flag} has another vocabulary than the trained model: {word!r} is token {token} there and {trained} in the "
        "trained model. Use one that has the same tokenizer"
    )


def check_tokens(highest: int, size: int) -> None:
    """Raise ValueError if the highest token id exceeds an embedding of `size` rows."""
    if highest >= size:
        raise ValueError(
            f"the tokenizer has token {highest}, and the model's embedding has {size} rows by its vocab_size. Use a "
            "model whose embedding was resized for the added tokens"
        )
