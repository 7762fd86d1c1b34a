"""A model folder with further special tokens: its tokenizer, and rows of its embedding and output layer.

The folder links to the files of the model's, except those that change. It is made once, in a cache, and is then used as
the model's, so that nothing else knows of the tokens.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..families.internvl import CHAT_TEXT
from ..families.thinker import SPEECH, THINKER
from .pretrained import load_tokenizer

logger = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 128  # of a grown vocabulary, as in ms-swift
VOCABULARY_TENSOR = re.compile(r"(embed_tokens|embed_tokens_per_layer|lm_head|shared_head\.head)\.weight$")
REPLACED = {"config.json", "manifest.json"}  # a manifest holds the files' sizes


def read_tokens(values: list[str]) -> list[str]:
    """Return the tokens of --new_special_tokens: tokens, or names of .txt files with one per line."""
    tokens: list[str] = []
    for value in values:
        if not value.endswith(".txt"):
            tokens.append(value)
            continue
        try:
            lines = Path(value).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--new_special_tokens {value}: cannot be read ({error}). Fix the path.") from error
        tokens += [line.strip() for line in lines if line.strip()]
    if not tokens or not all(token.strip() for token in tokens):
        raise ValueError(f"--new_special_tokens {' '.join(values)}: holds no token. Set tokens, or a file of them.")
    return list(dict.fromkeys(tokens))


def extend_tokenizer(tokenizer: Any, tokens: list[str]) -> int:
    """Add special tokens that a tokenizer lacks. Return their number."""
    from transformers import AddedToken

    return tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True
    )


def with_tokens(folder: Path, tokens: list[str], cache: Path) -> Path:
    """Return a folder in `cache` that is the model of `folder` with these special tokens; `folder` if it has them all.

    Tokens take the free rows of the embedding. If there are too few, the vocabulary grows to a multiple of 128; a new
    row is the mean of the tokenizer's earlier rows. Raises ValueError if the weights are not those of config.json.
    """
    tokenizer = load_tokenizer(folder)
    known = len(tokenizer)
    if not extend_tokenizer(tokenizer, tokens):
        return folder
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = hashlib.blake2b(json.dumps([str(folder.resolve()), facts, tokens]).encode(), digest_size=16).hexdigest()
    target = cache / "new_tokens" / key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        _write(staged, folder, files, tokenizer, known)
        os.rename(staged, target)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        if not target.is_dir():  # else another node was faster
            raise
    logger.info("%d special tokens are added to %s", len(tokenizer) - known, folder)
    return target


def _write(staged: Path, folder: Path, files: list[Path], tokenizer: Any, known: int) -> None:
    tokenizer.save_pretrained(staged)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    outer = config.get(THINKER) or config
    text_config = outer if "vocab_size" in outer else outer.get("text_config") or outer[CHAT_TEXT]
    size = text_config["vocab_size"]
    needs_rows = len(tokenizer) > size
    new_size = math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE if needs_rows else size
    text_config["vocab_size"] = new_size
    if "vocab_size_per_layer_input" in text_config:  # Gemma 4 has a second table
        text_config["vocab_size_per_layer_input"] = new_size
    (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in files:
        if file.name in REPLACED or (staged / file.name).exists():
            continue
        if needs_rows and file.suffix == ".safetensors" and _grow_file(file, staged / file.name, size, new_size, known):
            continue
        (staged / file.name).symlink_to(file.resolve())


def _grow_file(file: Path, target: Path, size: int, new_size: int, known: int) -> bool:
    """Write a file of weights with grown tensors. Return False if it has none."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, "pt") as weights:
        names = [name for name in weights.keys() if VOCABULARY_TENSOR.search(name)]  # noqa: SIM118
        names = [name for name in names if not re.match(SPEECH, name)]
        if not names:
            return False
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
        metadata = weights.metadata()
    for name in names:
        rows = tensors[name]
        if rows.dim() != 2 or len(rows) != size:
            raise ValueError(
                f"--new_special_tokens: {name} of {file} has {len(rows)} rows, and config.json says {size}. Use a "
                "checkpoint whose config fits"
            )
        mean = rows[:known].float().mean(0).to(rows.dtype)
        tensors[name] = torch.cat([rows, mean.expand(new_size - size, -1)]).contiguous()
    save_file(tensors, target, metadata=metadata)
    return True
