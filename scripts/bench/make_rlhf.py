"""Rows of `megatron rlhf` in even lengths: pieces of real text, whatever it says."""

# pyright: reportMissingImports=false

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from row import Rlhf

ROWS_OF_DATA = 512
MOST_TOKENS = 2_000_000  # of the text: later rows begin anew


def rows_name(task: Rlhf) -> str:
    """Return the name of the rows of a task."""
    if task.generates:
        return f"prompts-{task.prompt}"
    return f"{'answers' if task.kind == 'gkd' else 'pairs'}-{task.prompt}-{task.answer}"


def write_rows(data: Path, text: Path, checkpoint: Path, task: Rlhf) -> None:
    """Write prompts, for GKD with an answer and for DPO with two, by the tokenizer of the checkpoint."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids: list[int] = []
    for line in text.read_text().splitlines():
        ids += tokenizer(json.loads(line)["messages"][-1]["content"])["input_ids"]
        if len(ids) > MOST_TOKENS:
            break
    take = pieces(ids, tokenizer.decode)
    data.write_text("".join(json.dumps(row_of(task, take)) + "\n" for _ in range(ROWS_OF_DATA)))


def pieces(ids: list[int], decode: Callable[[list[int]], str]) -> Callable[[int], str]:
    """Return a function that returns the next piece of so many tokens, and begins anew at the end."""
    at = 0

    def take(tokens: int) -> str:
        nonlocal at
        if at + tokens > len(ids):
            at = 0
        at += tokens
        return decode(ids[at - tokens : at])

    return take


def row_of(task: Rlhf, take: Callable[[int], str]) -> dict[str, Any]:
    question = {"role": "user", "content": take(task.prompt)}
    if task.generates:
        return {"messages": [question]}
    answer = {"role": "assistant", "content": take(task.answer)}
    if task.kind == "gkd":
        return {"messages": [question, answer]}
    return {"messages": [question, answer], "rejected_response": take(task.answer)}
