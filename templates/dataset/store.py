"""Tokens of samples on disk: readers that map the files into memory.

token_format.py has their schema. The folder of a file has `tokens.arrow` (an Arrow file, one row per sample) and
`manifest.json` (its size and checksum, and the dropped rows with their reasons). `cache_entry` writes it.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from ..formats.medium import MediaKind, Medium
from ..formats.schemas import Stage
from ..json_types import JsonObject
from ..media.processor import MediaPlan
from .dropped_rows import DroppedRows
from .packing import round_up
from .placed_media import Document, PlacedMedium, expand
from .token_format import LIST_COLUMNS, MEDIA_COLUMNS, MEDIA_KINDS, NUMPY_TYPES, SCHEMA, flat_lists, to_numpy

CHECKSUM = "xxh3_128"  # key in the manifest: hexadecimal hash of tokens.arrow
BLOCK = 8 * 2**20  # bytes read at a time
ReadMedia = Callable[[int], list[Medium]]  # from the number of a row to its media, in the order of their numbers


class TokenFile:
    """Memory-mapped cache entry. Raises OSError, ValueError or KeyError if it is damaged.

    verify: compare the checksum, which reads the entire file; entries of version 0.1 have none
    """

    def __init__(self, folder: Path, *, verify: bool = False):
        self.folder = folder
        manifest = json.loads((folder / "manifest.json").read_text())
        path = folder / "tokens.arrow"
        if path.stat().st_size != manifest["bytes"]:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, not {manifest['bytes']}")
        if verify and manifest.get(CHECKSUM, checksum := _checksum(path)) != checksum:
            raise ValueError(f"{path} does not match its checksum")
        self.dropped = DroppedRows(**manifest["refusals"])
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._lists = [tuple(flat_lists(batch.column(i)) for i in range(len(LIST_COLUMNS))) for batch in self._batches]
        self.has_vision = "media_kinds" in reader.schema.names  # whether made with a vision processor
        self._media = [
            {name: flat_lists(batch.column(name)) for name in MEDIA_COLUMNS} if self.has_vision else {}
            for batch in self._batches
        ]
        self.lengths = self._column("length").astype(np.int64)
        self.weights = self._column("weight")
        self.trained = self._column("trained")
        self.rows = self._column("row")
        has_shared = "shared" in reader.schema.names  # absent in entries of earlier versions, which have no pairs
        self.shared = self._column("shared").astype(np.int64) if has_shared else np.zeros(len(self.rows), np.int64)

    def __reduce__(self):
        return TokenFile, (self.folder,)  # another process maps the same pages

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> list[Document]:
        """Return the documents of sample i: token ids int32 [length], loss weights float32 [length].

        Placeholders are expanded to all tokens of their image or video.
        """
        ids, runs, weights, lengths, *_ = self._row(i)
        weights = np.repeat(weights, runs)
        if media := self._placed(i):
            (ids, weights), _ = expand(ids, weights, media)
        if len(lengths) == 1:
            return [(ids, weights)]
        ends = np.cumsum(lengths)[:-1]
        return list(zip(np.split(ids, ends), np.split(weights, ends), strict=True))

    def media(self, i: int) -> list[PlacedMedium]:
        """Return the media of sample i, placed in the concatenation of its documents as `row` returns them."""
        if not (media := self._placed(i)):
            return []
        ids, runs, weights, *_ = self._row(i)
        return expand(ids, np.repeat(weights, runs), media)[1]

    @property
    def media_counts(self) -> dict[MediaKind, np.ndarray]:
        """Number of images and of videos of each sample, of which one in several documents counts once.

        int64 [samples]
        """
        counts = {}
        for number, kind in enumerate(MEDIA_KINDS):
            counts[kind] = self._per_sample(
                lambda lists, number=number: (lists["media_kinds"][1] == number) & _is_first(lists)
            )
        return counts

    def media_uses(self, kind: MediaKind) -> np.ndarray:
        """Return the number of images or videos of each sample, where one in several places counts as several.

        int64 [samples]
        """
        return self._per_sample(lambda lists: lists["media_kinds"][1] == MEDIA_KINDS.index(kind))

    @property
    def visual_tokens(self) -> np.ndarray:
        """Number of visual tokens of each sample: int64 [samples]."""
        return self._per_sample(lambda lists: lists["media_tokens"][1])

    def _per_sample(self, values: Callable[[dict], np.ndarray]) -> np.ndarray:
        """Return the sum over each sample's media of `values`, a function of a batch's columns of media."""
        if not self.has_vision:
            return np.zeros(len(self), np.int64)
        sums = [np.empty(0, np.int64)]
        for lists in self._media:
            offsets, _ = lists["media_kinds"]
            ends = np.concatenate([[0], np.cumsum(values(lists), dtype=np.int64)])
            sums.append(ends[offsets[1:]] - ends[offsets[:-1]])
        return np.concatenate(sums)

    def _placed(self, i: int) -> list[PlacedMedium]:
        """Return the media of sample i, placed in its ids as stored."""
        if not self.has_vision:
            return []
        batch = int(np.searchsorted(self._starts, i, side="right")) - 1
        row, lists = i - self._starts[batch], self._media[batch]
        offsets = lists["media_kinds"][0]
        if offsets[row] == offsets[row + 1]:
            return []
        of = {name: values[offsets[row] : offsets[row + 1]].tolist() for name, (offsets, values) in lists.items()}
        ends = np.cumsum([0, *of["expansion_lengths"]]).tolist()
        return [
            PlacedMedium(
                of["media_places"][number],
                of["media_numbers"][number],
                MediaPlan(
                    MEDIA_KINDS[kind],
                    tuple(of["media_grids"][3 * number : 3 * number + 3]),
                    of["media_tokens"][number],
                    of["media_time_steps"][number],
                    np.array(of["expansions"][ends[number] : ends[number + 1]], np.int32)
                    if of["expansion_lengths"][number]
                    else None,
                ),
            )
            for number, kind in enumerate(of["media_kinds"])
        ]

    def label(self, i: int) -> np.ndarray:
        """Return the label of sample i: float32 [numbers]."""
        return self._row(i)[LIST_COLUMNS.index("label")]

    def columns(self, i: int) -> JsonObject:
        """Return the columns of the row of prompt i."""
        return json.loads(self._row(i)[LIST_COLUMNS.index("columns")].tobytes())

    @cached_property
    def column_masks(self) -> dict[str, np.ndarray]:
        """Columns of the prompts' rows, with whether each sample's row has them: bool [samples]. Reads all rows."""
        column_masks: dict[str, np.ndarray] = {}
        sample = 0
        for offsets, values in self._batches_of("columns"):
            for start, stop in pairwise(offsets.tolist()):
                for name in json.loads(values[start:stop].tobytes()):
                    column_masks.setdefault(name, np.zeros(len(self), bool))[sample] = True
                sample += 1
        return column_masks

    def channels(self) -> np.ndarray:
        """Return the channel of each sample's row, "" without one: str [samples]. Reads all rows."""
        names = [
            values[start:stop].tobytes().decode()
            for offsets, values in self._batches_of("columns")
            for start, stop in pairwise(offsets.tolist())
        ]
        return np.array(names, np.str_)

    def padded_lengths(self, multiple: int, separate_rows: bool) -> np.ndarray:
        """Return lengths as TokenStore.padded_lengths does."""
        combine = np.maximum if separate_rows else np.add
        documents = self._batches_of("document_lengths")
        padded = [
            combine.reduceat(round_up(lengths.astype(np.int64), multiple), offsets[:-1])
            for offsets, lengths in documents
        ]
        return np.concatenate([np.empty(0, np.int64), *padded])

    def sizes(self, name: str) -> np.ndarray:
        """Return the number of values of each sample in a list column: int32 [samples]."""
        sizes = [np.diff(offsets) for offsets, _ in self._batches_of(name)]
        return np.concatenate([np.empty(0, np.int32), *sizes])

    def labels(self, width: int) -> np.ndarray:
        """Return the first `width` numbers of each label, NaN for missing ones: float32 [samples, width]."""
        sizes = self.sizes("label")
        values = np.concatenate([np.empty(0, np.float32), *(values for _, values in self._batches_of("label"))])
        starts, labels = np.cumsum(sizes) - sizes, np.full((len(self), width), np.nan, np.float32)
        for column in range(width):
            labels[sizes > column, column] = values[starts[sizes > column] + column]
        return labels

    def _row(self, i: int) -> list[np.ndarray]:
        """Return the values of sample i in each list column."""
        batch = int(np.searchsorted(self._starts, i, side="right")) - 1
        row = i - self._starts[batch]
        return [values[offsets[row] : offsets[row + 1]] for offsets, values in self._lists[batch]]

    def _batches_of(self, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return offsets and values of a list column for each batch."""
        return [lists[LIST_COLUMNS.index(name)] for lists in self._lists]

    def _column(self, name: str) -> np.ndarray:
        columns = [to_numpy(batch.column(name)) for batch in self._batches]
        return np.concatenate([np.empty(0, NUMPY_TYPES[SCHEMA.field(name).type]), *columns])


def _is_first(lists: dict) -> np.ndarray:
    """Return whether each medium of samples is the first of its kind with its number in its sample: bool [media]."""
    (offsets, numbers), (_, kinds) = lists["media_numbers"], lists["media_kinds"]
    samples = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    keys = np.stack([samples, kinds[: len(samples)], numbers[: len(samples)]])
    _, first = np.unique(keys, axis=1, return_index=True)
    is_first = np.zeros(len(numbers), bool)
    is_first[first] = True
    return is_first


class TokenStore:
    """Selection of samples from several token files, in a given order."""

    def __init__(
        self,
        files: list[TokenFile],
        samples: np.ndarray,
        stage: Stage,
        names: list[str] | None = None,
        read_media: Sequence[ReadMedia] = (),
    ):
        """Arguments:
        samples: numbers in the concatenation of the files; a number may occur more than once
        names: names of the files' sources, for messages
        read_media: for each file, a function from the number of a row to its media
        """
        self._read_media = read_media
        self.files, self.samples, self._names = files, samples, names or [""] * len(files)
        self.stage: Stage = stage
        self._starts = np.cumsum([0] + [len(file) for file in files])
        self.lengths = self._selected([file.lengths for file in files])  # int64 [samples]
        self.weights = self._selected([file.weights for file in files])  # float64 [samples]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def trained_tokens(self) -> int:
        """Tokens of first documents with a loss weight above 0."""
        return int(self._selected([file.trained for file in self.files]).sum())

    @cached_property
    def document_counts(self) -> np.ndarray:
        """Number of documents of each sample: int32 [samples]."""
        return self._selected([file.sizes("document_lengths") for file in self.files])

    @cached_property
    def label_width(self) -> int:
        """Length of the longest label."""
        return int(self._selected([file.sizes("label") for file in self.files]).max(initial=0))

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels, NaN for missing numbers: float32 [samples, label_width]."""
        return self._selected([file.labels(self.label_width) for file in self.files])

    def padded_lengths(self, multiple: int, separate_rows: bool) -> np.ndarray:
        """Return the tokens of each sample with its documents padded to a multiple: int64 [samples].

        The sum over its documents or, if those are in separate rows, the maximum.
        """
        return self._selected([file.padded_lengths(multiple, separate_rows) for file in self.files])

    @cached_property
    def shared(self) -> np.ndarray:
        """Tokens that the documents of each sample begin with and may share: int64 [samples]."""
        return self._selected([file.shared for file in self.files])

    def row(self, i: int) -> list[Document]:
        """Return the documents of sample i: token ids int32 [length], loss weights float32 [length].

        Placeholders are expanded to all tokens of their image or video.
        """
        file, number = self._locate(i)
        return self.files[file].row(number)

    @cached_property
    def has_media(self) -> bool:
        """Whether any sample has images or videos."""
        return bool(self.visual_tokens.any())

    @cached_property
    def visual_tokens(self) -> np.ndarray:
        """Visual tokens of each sample: int64 [samples]."""
        return self._selected([file.visual_tokens for file in self.files])

    def most(self, kind: MediaKind) -> int:
        """Return the largest number of images or videos of a sample."""
        return int(self._selected([file.media_uses(kind) for file in self.files]).max(initial=0))

    def media_counts(self) -> dict[MediaKind, int]:
        """Return the number of images and of videos of all samples."""
        counts = [file.media_counts for file in self.files]
        return {kind: int(self._selected([count[kind] for count in counts]).sum()) for kind in MEDIA_KINDS}

    def media(self, i: int) -> list[PlacedMedium]:
        """Return the media of sample i, placed in its documents' concatenation, with their sources."""
        file, number = self._locate(i)
        media = self.files[file].media(number)
        if not media or not self._read_media:
            return media
        sources = self._read_media[file](int(self.files[file].rows[number]))
        return [
            medium._replace(medium=sources[medium.number].sound if medium.plan.is_sound else sources[medium.number])
            for medium in media
        ]

    def label(self, i: int) -> np.ndarray:
        """Return the label of sample i: float32 [numbers]."""
        file, number = self._locate(i)
        return self.files[file].label(number)

    def columns(self, i: int) -> JsonObject:
        """Return the columns of the row of prompt i."""
        file, number = self._locate(i)
        return self.files[file].columns(number)

    @cached_property
    def channels(self) -> np.ndarray:
        """Channel of each sample's row (--enable_channel_loss), "" without one: str [samples]."""
        return self._selected([file.channels() for file in self.files])

    def has(self, column: str) -> np.ndarray:
        """Return whether the row of each prompt has a value in a column: bool [samples]."""
        return self._selected([file.column_masks.get(column, np.zeros(len(file), bool)) for file in self.files])

    def source_row(self, i: int) -> str:
        """Return the name of the row of sample i, for messages."""
        file, number = self._locate(i)
        return f"row {self.files[file].rows[number] + 1} of {self._names[file]}"

    def _locate(self, i: int) -> tuple[int, int]:
        """Return the number of a sample's file, and its number in the file."""
        sample = self.samples[i]
        file = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return file, int(sample - self._starts[file])

    def _selected(self, columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(columns)[self.samples]


def _checksum(path: Path) -> str:
    checksum = xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            checksum.update(block)
    return checksum.hexdigest()
