"""Arrow schema of token files, and the conversion of samples to it."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ..formats.medium import MediaKind
from .placed_media import PlacedMedium, concatenated_media
from .samples import EncodedSample

FORMAT = 6  # part of every cache key: increase it when the stored data changes

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),  # of all documents of the sample
        "run_lengths": pa.list_(pa.int32()),  # loss weights, run-length encoded
        "run_weights": pa.list_(pa.float32()),
        "document_lengths": pa.list_(pa.int32()),
        "label": pa.list_(pa.float32()),
        "columns": pa.list_(pa.uint8()),  # prompts: columns of the row, as JSON; sft, pt: the row's channel, as text
        "length": pa.int32(),
        "weight": pa.float64(),  # first document: sum of the loss weights without its first token's
        "trained": pa.int32(),  # first document: trained tokens except the first token, which is not predicted
        "row": pa.int64(),  # number of the sample's row in the source
        "shared": pa.int32(),  # EncodedSample.shared; entries of earlier versions lack it
    }
)
LIST_COLUMNS = [field.name for field in SCHEMA if pa.types.is_list(field.type)]
# Further columns of entries made with a vision processor: the media of a sample's documents.
# `input_ids` and the runs have one placeholder for each medium; `length` and `document_lengths` count all its tokens.
MEDIA_FIELDS = [
    pa.field("media_kinds", pa.list_(pa.uint8())),  # index in MEDIA_KINDS
    pa.field("media_places", pa.list_(pa.int32())),  # of the placeholder in input_ids
    pa.field("media_numbers", pa.list_(pa.int32())),  # among the media of the row
    pa.field("media_tokens", pa.list_(pa.int32())),  # those with features
    pa.field("media_time_steps", pa.list_(pa.int32())),
    pa.field("media_grids", pa.list_(pa.int32())),  # three numbers of each medium
    pa.field("expansion_lengths", pa.list_(pa.int32())),  # 0: as many placeholders as visual tokens
    pa.field("expansions", pa.list_(pa.int32())),  # ids that replace placeholders
]
MEDIA_SCHEMA = pa.schema([*SCHEMA, *MEDIA_FIELDS])
MEDIA_COLUMNS = [field.name for field in MEDIA_FIELDS]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
NUMPY_TYPES = {
    pa.uint8(): np.uint8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64
}  # fmt: skip


def record_batch(samples: list[EncodedSample], *, has_vision: bool = False) -> pa.RecordBatch:
    """Convert samples to Arrow, with the columns of media if `has_vision`."""
    first_runs = [sample.documents[0][1] for sample in samples]
    lengths = [[len(ids) for ids, _ in sample.documents] for sample in samples]
    for sample, documents in zip(samples, lengths, strict=True):
        for number, media in enumerate(sample.media):
            documents[number] += sum(medium.plan.length - 1 for medium in media)
    lists = {
        "input_ids": [_concatenate([ids for ids, _ in sample.documents]) for sample in samples],
        "run_lengths": [[tokens for _, runs in sample.documents for tokens, _ in runs] for sample in samples],
        "run_weights": [[weight for _, runs in sample.documents for _, weight in runs] for sample in samples],
        "document_lengths": lengths,
        "label": [sample.label for sample in samples],
        "columns": [np.frombuffer(sample.columns, np.uint8) for sample in samples],
    }
    scalars = {
        "length": [sum(documents) for documents in lengths],
        "weight": [sum(tokens * weight for tokens, weight in runs) - runs[0][1] for runs in first_runs],
        "trained": [sum(tokens for tokens, weight in runs if weight) - (runs[0][1] > 0) for runs in first_runs],
        "row": [sample.row for sample in samples],
        "shared": [sample.shared for sample in samples],
    }
    columns: list[pa.Array] = [_lists(lists[name], SCHEMA.field(name).type) for name in LIST_COLUMNS]
    columns += [_to_arrow(values, SCHEMA.field(name).type) for name, values in scalars.items()]
    if not has_vision:
        return pa.record_batch(columns, schema=SCHEMA)
    media_lists = [
        _media_lists(concatenated_media((len(ids) for ids, _ in sample.documents), sample.media)) for sample in samples
    ]
    for field_ in MEDIA_FIELDS:
        columns.append(_lists([lists[field_.name] for lists in media_lists], field_.type))
    return pa.record_batch(columns, schema=MEDIA_SCHEMA)


def _media_lists(media: list[PlacedMedium]) -> dict[str, np.ndarray]:
    plans = [medium.plan for medium in media]
    expansions = [plan.expansion for plan in plans if plan.expansion is not None]
    numbers = {
        "media_kinds": [MEDIA_KINDS.index(plan.kind) for plan in plans],
        "media_places": [medium.place for medium in media],
        "media_numbers": [medium.number for medium in media],
        "media_tokens": [plan.tokens for plan in plans],
        "media_time_steps": [plan.time_step for plan in plans],
        "media_grids": [size for plan in plans for size in plan.grid],
        "expansion_lengths": [0 if plan.expansion is None else len(plan.expansion) for plan in plans],
        "expansions": np.concatenate([np.empty(0, np.int32), *expansions]),
    }
    return {name: np.array(values, np.uint8 if name == "media_kinds" else np.int32) for name, values in numbers.items()}


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _lists(lists: Sequence[Sequence | np.ndarray], kind: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0] + [len(values) for values in lists], dtype=np.int32)
    dtype = NUMPY_TYPES[kind.value_type]
    values = _to_arrow(np.concatenate([np.empty(0, dtype), *lists], dtype=dtype), kind.value_type)
    return pa.ListArray.from_buffers(kind, len(lists), [None, pa.py_buffer(offsets)], children=[values])


# pyarrow's conversions from and to NumPy import pandas, which takes longer than everything else here.
def _to_arrow(values: Sequence | np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.asarray(values, NUMPY_TYPES[kind]))])


def to_numpy(values: pa.Array) -> np.ndarray:
    """Return a view of an Arrow array."""
    start, dtype = values.offset, NUMPY_TYPES[values.type]
    return np.frombuffer(values.buffers()[1] or b"", dtype)[start : start + len(values)]


def flat_lists(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and values of a list column, as views."""
    return to_numpy(column.offsets), to_numpy(column.values)
