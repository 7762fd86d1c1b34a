"""Completions of a run (completions.jsonl), and replies of its checkpoints (`swift infer`), as samples for a page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ...templates.json_types import JsonObject

COMPLETIONS = "completions.jsonl"  # --log_completions
INFER_RESULT = "infer_result"  # folder of a run with the replies of its checkpoints
MAX_COMPLETIONS = 2000  # most completions of a page
MAX_CHARACTERS = 4_000_000  # most characters of a page's completions
RECURRENCES = 20  # most generations shown of one prompt
MAX_TEXT = 6000  # characters of a prompt or a completion; longer ones are shortened in the middle
BLOCKS, BLOCK_BYTES = 64, 2**18  # parts read of a file that is too large to be read whole
MAX_REPLIES = 100  # most replies of one checkpoint


def completions_of(folder: Path) -> JsonObject:
    """Return {"rows", "total"} of completions.jsonl: rows spread over the run.

    "total" is the number of rows in the file, None where it was not read whole.
    """
    file = folder / COMPLETIONS
    if not file.is_file():
        return {"rows": [], "total": 0}
    is_whole = file.stat().st_size <= BLOCKS * BLOCK_BYTES
    rows = [row for row in _json_lines(file, is_whole=is_whole) if isinstance(row.get("generation"), int)]
    return {"rows": [_completion(row) for row in _spread(rows)], "total": len(rows) if is_whole else None}


def _json_lines(file: Path, *, is_whole: bool) -> Iterator[JsonObject]:
    """Yield the rows of a file, or of blocks at equal distances. A line that is cut off is left out."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for block in range(1 if is_whole else BLOCKS):
            start = 0 if is_whole else block * (size - BLOCK_BYTES) // (BLOCKS - 1)
            end = size if is_whole else start + BLOCK_BYTES
            stream.seek(start)
            if start:
                stream.readline()  # the rest of a line that began before
            while stream.tell() < end and (line := stream.readline()):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row


def _spread(rows: list[JsonObject]) -> list[JsonObject]:
    """Return about MAX_COMPLETIONS rows within MAX_CHARACTERS, each with the others of its prompt.

    Up to a half are of prompts that recur, over the whole run; the rest are at equal distances.
    """
    size = sum(min(len(str(row.get("completion") or "")), MAX_TEXT) for row in rows)
    share = min(1.0, MAX_COMPLETIONS / max(len(rows), 1), MAX_CHARACTERS / max(size, 1))
    if share == 1.0:
        return rows
    groups: list[list[JsonObject]] = []  # completions of a prompt in a generation
    for row in rows:
        if groups and all(groups[-1][0].get(key) == row.get(key) for key in ("generation", "messages")):
            groups[-1].append(row)
        else:
            groups.append([row])
    count = max(1, int(len(groups) * share))
    kept = _recurring(groups, count // 2)
    others = [index for index in range(len(groups)) if index not in kept]
    rest = min(count - len(kept), len(others))
    kept |= {others[i * (len(others) - 1) // max(rest - 1, 1)] for i in range(rest)}
    return [row for index in sorted(kept) for row in groups[index]]


def _recurring(groups: list[list[JsonObject]], most: int) -> set[int]:
    """Return at most `most` groups, of the prompts that recur most often: RECURRENCES of each at equal distances."""
    places: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        places.setdefault(str(group[0].get("messages")), []).append(index)
    chosen: set[int] = set()
    for indices in sorted(places.values(), key=len, reverse=True):
        step = max(1, len(indices) // RECURRENCES)
        if len(indices) > 1 and len(chosen) + len(indices[::step]) <= most:
            chosen.update(indices[::step])
    return chosen


def _completion(row: JsonObject) -> JsonObject:
    numbers = ("generation", "reward", "advantage", "length", "finish_reason", "rewards")
    texts = {"prompt": _conversation(row.get("messages")), "completion": shorten(str(row.get("completion") or ""))}
    return texts | {name: row[name] for name in numbers if name in row}


def replies_of(folder: Path) -> list[JsonObject]:
    """Return the replies of `swift infer` for each checkpoint: {"step", "rows"}, by step.

    A later file of the same checkpoint replaces an earlier one.
    """
    files: dict[int, Path] = {}
    for file in sorted((folder / INFER_RESULT).glob("checkpoint-*.jsonl")):
        if match := re.match(r"checkpoint-(\d+)", file.name):
            files[int(match[1])] = file
    replies = []
    for step, file in sorted(files.items()):
        rows = [row for row in _json_lines(file, is_whole=True) if "response" in row][:MAX_REPLIES]
        replies.append({"step": step, "rows": [_reply(row) for row in rows]})
    return replies


def _reply(row: JsonObject) -> JsonObject:
    label = row.get("labels")
    return {
        "prompt": _conversation(row.get("messages"), has_answer=True),
        "response": shorten(str(row["response"])),
        "label": None if label is None else shorten(str(label)),
    }


def _conversation(messages: object, *, has_answer: bool = False) -> str:
    """Return messages as text: that of a single one, or all with their roles.

    has_answer: leave out a last message of the assistant
    """
    if not isinstance(messages, list):
        return ""
    parts = [(str(m.get("role")), _content(m.get("content"))) for m in messages if isinstance(m, dict)]
    if has_answer and parts and parts[-1][0] == "assistant":
        parts.pop()
    if len(parts) == 1:
        return shorten(parts[0][1])
    return shorten("\n".join(f"{role}: {content}" for role, content in parts))


def _content(content: object) -> str:
    """Return a message's content as text, which may be a list of parts."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def shorten(text: str) -> str:
    """Return a text without the middle of one that is too long, and without lone surrogates."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters ...\n{text[-half:]}"
