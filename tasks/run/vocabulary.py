"""Whether models and tokenizers belong together."""

from pathlib import Path
from typing import Any

from ...bridge.checkpoint.pretrained import load_tokenizer


def check_vocabulary(tokenizer: Any, folder: Path, given: str) -> None:
    """Raise ValueError where a token means something else to the model in `folder`, which the flag `given` names."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    theirs, ours = load_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
    if theirs == ours:
        return
    other = next(word for word in theirs.keys() | ours.keys() if theirs.get(word) != ours.get(word))
    raise ValueError(
        f"{given} has another vocabulary than the model that is trained: {other!r} is token {theirs.get(other)} there "
        f"and {ours.get(other)} here. Give one that has the same tokenizer"
    )


def check_tokens(highest: int, size: int) -> None:
    """Raise ValueError where an embedding of `size` rows does not have a token."""
    if highest >= size:
        raise ValueError(
            f"the tokenizer gives token {highest}, and the model's embedding has {size} rows by its vocab_size. "
            "Do they belong together? Give a model whose embedding was resized for the tokens that were added"
        )
