"""Prompts of embeddings and rerankers, as published with Qwen3-Reranker, Qwen3-VL-Embedding and Qwen3-VL-Reranker.

Zhang et al. 2025 (arXiv:2506.05176), Li et al. 2026 (arXiv:2601.04720).
"""

import unicodedata

from ..json_types import JsonObject

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
VISION_INSTRUCT = "Given a search query, retrieve relevant candidates that answer the query."
REPRESENT = "Represent the user's input."


def reranker_request(query: str, document: str, instruct: str, *, has_vision: bool) -> str:
    """Return the message of the user to a reranker. instruct: "" for the published one."""
    if has_vision:
        return f"<Instruct>: {instruct or VISION_INSTRUCT}<Query>:{query}\n<Document>:{document}"
    return f"<Instruct>: {instruct or INSTRUCT}\n<Query>: {query}\n<Document>: {document}"


def judge_messages(request: str) -> list[JsonObject]:
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": request}]


def embedding_messages(text: str, instruct: str) -> list[JsonObject]:
    """Return the messages of Qwen3-VL-Embedding. instruct: "" for the published one; others get a point at the end."""
    instruct = instruct.strip()
    if instruct and not unicodedata.category(instruct[-1]).startswith("P"):
        instruct += "."
    return [{"role": "system", "content": instruct or REPRESENT}, {"role": "user", "content": text}]
