"""Resolution of --dataset: files, folders, datasets saved to disk by `datasets`, and hub datasets."""

import json
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.dataset_names import EXTENSIONS, DatasetName, check_exists, expand_user, extension
from ..formats.presets import DatasetPreset, preset_of, preset_of_path
from ..formats.schemas import ArrowRow
from .files import Concatenation, Csv, File, GzipLineFile, JsonArray, LineFile, RowSource
from .folders import select_files
from .tables import Arrow, Parquet
from .tokenize import Row

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")  # files of `datasets`


class HubDataset(RowSource):
    """Dataset of the library `datasets`: a Dataset, or for `stream` only an IterableDataset."""

    def __init__(self, name: str, dataset: "Dataset | IterableDataset"):
        self.name = name
        self.dataset: Any = dataset  # an IterableDataset has neither a length nor rows by number

    @property
    def fingerprint(self) -> str:
        return self.dataset._fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def _decodes(self) -> bool:
        """Whether `datasets` would decode images, videos or audio of each row that is read."""
        return _has_decoding(self.dataset.features)

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        if self._decodes:
            selected = map(ArrowRow, self.dataset.with_format("arrow")[numbers.tolist()].to_pylist())
        else:
            selected = _rows(self.dataset[numbers.tolist()])
        for number, row in zip(numbers.tolist(), selected, strict=True):
            yield number, f"{self.name} row {number + 1}", row

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        """Yield the rows of a shard. Downloads only its files if their number is a multiple of `shards`."""
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        dataset = self.dataset.to_iterable_dataset() if isinstance(self.dataset, Dataset) else self.dataset
        dataset = dataset.decode(False) if self._decodes else dataset
        # `iter`, because plain iteration would divide the rows among the loader's workers a second time.
        batches = split_dataset_by_node(dataset, shard, shards).iter(batch_size=100)
        index = -1
        for index, row in enumerate(row for batch in batches for row in _rows(batch)):
            if index >= start:
                number = index * shards + shard
                yield number, f"{self.name} row {number + 1}", row
        return index + 1


class PresetSource(RowSource):
    """Source whose rows a preset converts.

    columns: columns to rename before, as in --columns
    """

    def __init__(self, source: RowSource, preset: DatasetPreset, columns: Mapping[str, str]):
        self.name, self.source, self.preset, self.columns = source.name, source, preset, columns

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} {self.preset.key}"

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number, location, row in self.source.rows(numbers):
            yield number, location, self.preset(row, self.columns)

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        rows = self.source.stream(shard, shards, start)
        while True:
            try:
                number, location, row = next(rows)
            except StopIteration as end:
                return end.value
            yield number, location, self.preset(row, self.columns)


def _has_decoding(feature: Any) -> bool:
    """Return whether a feature of `datasets` has images, videos or audio, which it decodes."""
    from datasets.features import Audio, Image, List, Video

    if isinstance(feature, dict | list):
        return any(map(_has_decoding, feature.values() if isinstance(feature, dict) else feature))
    if isinstance(feature, List):
        return _has_decoding(feature.feature)
    return isinstance(feature, Image | Video | Audio)


def _rows(columns: dict[str, list]) -> Iterator[ArrowRow]:
    for values in zip(*columns.values(), strict=True):
        yield ArrowRow(zip(columns, values, strict=True))


@dataclass(frozen=True)
class _Opener:
    """Opener of datasets. Arguments as in `open_source`."""

    use_hf: bool = False
    hub_token: str | None = None
    streaming: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    def open(self, name: DatasetName) -> RowSource:
        """Open a dataset, of all its subsets and splits. Raises ValueError with the fix."""
        check_exists(name.location)
        path = expand_user(name.location)
        preset = preset_of_path(path.parts) if name.is_local else preset_of(name.location)
        sources = []
        for subset in name.subsets or (None,):
            view = preset.view(subset) if preset and subset else None
            subset, chosen = (None, view) if view else (subset, preset)
            source = _open_local(path, name, subset, chosen) if name.is_local else self._open_hub(name, subset, chosen)
            if chosen and chosen.changes_rows:
                logger.info("%s: read by the preset of %s", name.text, chosen.modelscope)
                source = PresetSource(source, chosen, self.columns)
            sources.append(source)
        return sources[0] if len(sources) == 1 else Concatenation(name.text, sources)

    def _open_hub(self, name: DatasetName, subset: str | None, preset: DatasetPreset | None) -> RowSource:
        splits = (name.split,) if name.split else preset.splits if preset else ("train",)
        subset = subset or (preset.subset if preset else None)
        on_hugging_face = name.hub == "hf" or (self.use_hf and name.hub != "ms")
        repository = name.location
        if preset:  # the hubs have it by different ids
            repository = (preset.hugging_face if on_hugging_face else preset.modelscope) or repository
        if on_hugging_face:
            loaded = _load_from_hugging_face(name.text, repository, subset, self.hub_token, self.streaming)
            parts = _splits(name.text, loaded, splits, is_required=bool(name.split))
        else:
            parts = [_load_from_modelscope(name.text, repository, subset, split, self.streaming) for split in splits]
        return _join(name.text, [HubDataset(name.text, part) for part in parts])


def open_source(
    name: str,
    *,
    use_hf: bool = False,
    hub_token: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> RowSource:
    """Open a dataset by its name in --dataset. Raises ValueError with the fix.

    columns: columns to rename before a preset reads them
    """
    return _Opener(use_hf, hub_token, streaming, columns or {}).open(DatasetName.parse(name))


def _join(name: str, sources: list[HubDataset]) -> RowSource:
    return sources[0] if len(sources) == 1 else Concatenation(name, sources)


def _open_local(path: Path, name: DatasetName, subset: str | None, preset: DatasetPreset | None) -> RowSource:
    if path.is_dir():
        return _folder(path, name, subset, preset)
    if subset or name.split:
        raise ValueError(f"{name.text}: a file has neither subsets nor splits. Name the file alone.")
    return _file(path)


def _file(path: Path) -> File:
    kind = extension(path)
    lines = GzipLineFile if kind.endswith(".gz") else LineFile
    match kind.removesuffix(".gz"):
        case _ if kind not in EXTENSIONS:
            raise ValueError(f"{path}: unknown file format {kind!r}. Use one of {' '.join(EXTENSIONS)}.")
        case ".jsonl":
            return lines(path, json.loads)
        case ".json":
            array = JsonArray(path)
            return array if _first_character(array) == b"[" else lines(path, json.loads)
        case ".csv":
            return Csv(path)
        case ".tsv":
            return Csv(path, delimiter="\t")
        case ".parquet":
            return Parquet(path)
        case ".arrow":
            return Arrow(path)
        case _:
            return lines(path, lambda text: {"text": text.rstrip("\r\n")})


def _first_character(source: File) -> bytes:
    with source.open() as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _folder(path: Path, name: DatasetName, subset: str | None, preset: DatasetPreset | None) -> RowSource:
    splits = (name.split,) if name.split else preset.splits if preset else ()
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):  # written by datasets' save_to_disk
        import datasets

        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, dict):
            return HubDataset(str(path), saved)
        parts = _splits(str(path), saved, splits or ("train",), is_required=bool(name.split))
        return _join(str(path), [HubDataset(str(path), part) for part in parts])
    files = [file for file in sorted(path.rglob("*")) if extension(file) in EXTENSIONS and file.is_file()]
    files = [file for file in files if file.name not in METADATA]
    # `datasets` caches the results of map and filter beside the data.
    files = [file for file in files if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{path}: the folder has no data file. Use one with {' '.join(EXTENSIONS)}.")
    if subset or splits:
        required = bool(subset), bool(name.split)
        files = select_files(path, files, subset or (preset and preset.subset), splits, *required)
    return Concatenation(str(path), [_file(file) for file in files])


def _load_from_modelscope(name: str, repository: str, subset: str | None, split: str, streaming: bool):
    try:
        from modelscope import MsDataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"{name}: no such file or folder, and ModelScope ids need the package modelscope. Fix the path, run "
            "`pip install modelscope`, or set --use_hf true to load it from Hugging Face."
        ) from error
    try:
        dataset = MsDataset.load(repository, subset_name=subset or "default", split=split, use_streaming=streaming)
    except Exception as error:  # the hub's client raises many types
        raise ValueError(f"{name}: cannot be loaded from ModelScope: {error}") from error
    return dataset.to_hf_dataset() if hasattr(dataset, "to_hf_dataset") else dataset


def _load_from_hugging_face(name: str, repository: str, subset: str | None, token: str | None, streaming: bool):
    import datasets

    try:
        return datasets.load_dataset(repository, subset, token=token, streaming=streaming)
    except Exception as error:  # the hub's client raises many types
        raise ValueError(
            f"{name}: no such file or folder, and it cannot be loaded from Hugging Face: {error}"
        ) from error


def _splits(name: str, loaded: Mapping, splits: tuple[str, ...], *, is_required: bool) -> list:
    """Return the named splits that the data has, or its only one."""
    if parts := [loaded[split] for split in splits if split in loaded]:
        return parts
    if len(loaded) == 1 and not is_required:
        return list(loaded.values())
    problem = f"no split `{splits[0]}`, only {', '.join(loaded)}"
    raise ValueError(f"{name}: {problem}. Set one behind the name, as in @{next(iter(loaded), splits[0])}.")


def open_sources(
    flag: str,
    names: Iterable[str],
    *,
    use_hf: bool = False,
    hub_token: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> list[tuple[RowSource, int | None]]:
    """Open the datasets of a flag, each with the number of rows to take (None: all)."""
    opener, opened = _Opener(use_hf, hub_token, streaming, columns or {}), []
    for name in names:
        try:
            dataset = DatasetName.parse(name)
            opened.append((opener.open(dataset), dataset.rows))
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error
    return opened
