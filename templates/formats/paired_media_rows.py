"""Rows of several documents with images and videos, or with a label.

`images` and `videos` are those of the prompt, the conversation, the anchor or the query. Further columns:
- preference: `rejected_images` and `rejected_videos`, those of the rejected conversation where they differ
- embedding, reranker: `positive_images`, `negative_images` and the like: a list for each text, or (images) one for all
  if there is one text
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from ..json_types import Json, JsonObject
from .media_rows import COLUMNS, MediaRow, split_media, to_media_conversation, to_media_text
from .medium import MediaKind, Medium
from .paired_rows import ContrastiveRow, Passage, to_answer, to_answered, to_contrastive, to_pair
from .schemas import (
    UNGROUPED,
    Conversation,
    Stage,
    UnusableRow,
    to_open_conversation,
    to_prompt,
    without_answer,
)


def to_media_pair(row: JsonObject) -> tuple[tuple[Conversation, Conversation], JsonObject | None]:
    """Return the conversations with the chosen and the rejected answer, with their media, and the row's objects."""
    media_row = split_media(row, ("rejected",))
    chosen, rejected = to_pair(media_row.row, shares_texts=bool(media_row.sides["rejected"]))
    media_row.place_in(chosen)
    media_row.place_in(rejected, "rejected")
    return (chosen, rejected), media_row.objects


def to_media_answer(row: JsonObject) -> tuple[Conversation, JsonObject | None]:
    """Return a conversation that ends with an answer, with its media, and the row's objects."""
    media_row = split_media(row)
    conversation = to_answer(media_row.row)
    media_row.place_in(conversation)
    return conversation, media_row.objects


def to_media_prompt(row: JsonObject, *, needs_answer: bool) -> tuple[Conversation, bool, JsonObject | None]:
    """Return a conversation that ends with an answer or with a question, whether with an answer, and the objects."""
    media_row = split_media(row)
    answered = to_answered(media_row.row, is_required=needs_answer)
    conversation = answered or to_prompt(media_row.row)
    media_row.place_in(conversation)
    return conversation, answered is not None, media_row.objects


def to_media_question(row: JsonObject) -> tuple[Conversation, JsonObject | None]:
    """Return the conversation of a row without its final answer, with its media, and the row's objects."""
    media_row = split_media(row)
    conversation = to_open_conversation(media_row.row)
    media_row.place_in(conversation)
    return without_answer(conversation), media_row.objects


def to_media_contrastive(row: JsonObject) -> ContrastiveRow:
    """Return the texts of a row for embeddings or rerankers, with their media."""
    media_row = split_media(row, ("positive", "negative"))
    if media_row.objects:
        raise UnusableRow("it has objects, which are for conversations")
    contrastive = to_contrastive(media_row.row)
    return ContrastiveRow(
        _placed(media_row, contrastive.anchor, media_row.columns),
        _placed_side(media_row, contrastive.positives, "positive"),
        _placed_side(media_row, contrastive.negatives, "negative"),
    )


def media_of(row: JsonObject, stage: Stage) -> list[Medium]:
    """Return the media of a row, in the order by which its samples number them.

    A medium of several documents, or several times in one, is counted once, except in sft and pt.
    """
    match stage:
        case "pt":
            return to_media_text(row)[1]
        case "preference":
            media = [conversation.media for conversation in to_media_pair(row)[0]]
        case "kto":
            media = [to_media_answer(row)[0].media]
        case "prompts":
            media = [to_media_question(row)[0].media]
        case "seq_cls":
            media = [to_classified(row)[1]]
        case "embedding" | "reranker":
            contrastive = to_media_contrastive(row)
            passages = contrastive.anchor, *contrastive.positives, *contrastive.negatives
            media = [passage.media for passage in passages]
        case _:
            media = [to_media_conversation(row, answered=stage in UNGROUPED)[0].media]
    media = list(chain.from_iterable(media))
    if stage in UNGROUPED:
        return media
    distinct: list[Medium] = []
    for medium in media:
        if find_medium(distinct, medium) is None:
            distinct.append(medium)
    return distinct


def find_medium(media: Iterable[Medium], medium: Medium) -> int | None:
    """Return the index of the same medium among others, or None."""
    return next((index for index, other in enumerate(media) if _is_same(medium, other)), None)


def to_classified(row: JsonObject) -> tuple[Conversation | str, Sequence[Medium], JsonObject | None]:
    """Return the conversation of a row to classify, or its text, with its media and objects."""
    if row.get("text") is not None and row.get("messages") is None:
        text, media = to_media_text(row)
        return text, media, None
    conversation, objects = to_media_conversation(row, answered=False)
    return conversation, conversation.media, objects


def _is_same(medium: Medium, other: Medium) -> bool:
    first, second = medium.source, other.source
    # Equal pictures of PIL would be compared pixel by pixel.
    is_same = first is second or (isinstance(first, str | list | dict | bytes) and first == second)
    return is_same and (medium.kind, medium.limits) == (other.kind, other.limits)


def _placed(media_row: MediaRow, passage: Passage, columns: dict[MediaKind, Sequence[Json]]) -> Passage:
    (system, text), media = media_row.place([passage.system, passage.text], 1, columns)
    return Passage(system, text, media)


def _placed_side(media_row: MediaRow, passages: Sequence[Passage], side: str) -> list[Passage]:
    """Return the positive or negative passages of a row with their media."""
    columns: list[dict[MediaKind, Sequence[Json]]] = [{kind: [] for kind in COLUMNS} for _ in passages]
    for kind, value in media_row.sides[side].items():
        is_nested = all(isinstance(sources, list) for sources in value)
        lists = value if is_nested else [value]
        if len(lists) != len(passages):
            raise UnusableRow(
                f"its {side}_{kind}s are not one list for each {side} text: it has {len(passages)} of these, and "
                f"{len(lists)} of those"
            )
        for by_kind, sources in zip(columns, lists, strict=True):
            assert isinstance(sources, list)
            by_kind[kind] = sources
    return [_placed(media_row, passage, by_kind) for passage, by_kind in zip(passages, columns, strict=True)]
