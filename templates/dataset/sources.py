"""Resolution of --dataset: files, folders, datasets saved to disk by `datasets`, and hub datasets."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.dataset_names import EXTENSIONS, check_exists, expand_user, extension, split_count
from ..formats.schemas import ArrowRow
from .files import Arrow, Concatenation, Csv, File, GzipLineFile, JsonArray, LineFile, Parquet, RowSource
from .tokenize import Row

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

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

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number, row in zip(numbers.tolist(), _rows(self.dataset[numbers.tolist()]), strict=True):
            yield number, f"{self.name} row {number + 1}", row

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Iterator[Row]:
        """Yield the rows of a shard. Downloads only its files if their number is a multiple of `shards`."""
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        dataset = self.dataset.to_iterable_dataset() if isinstance(self.dataset, Dataset) else self.dataset
        # `iter`, because plain iteration would divide the rows among the loader's workers a second time.
        batches = split_dataset_by_node(dataset, shard, shards).iter(batch_size=100)
        rows = (row for batch in batches for row in _rows(batch))
        for number, row in enumerate(islice(rows, start, None), start):
            number = number * shards + shard
            yield number, f"{self.name} row {number + 1}", row


def _rows(columns: dict[str, list]) -> Iterator[ArrowRow]:
    for values in zip(*columns.values(), strict=True):
        yield ArrowRow(zip(columns, values, strict=True))


def open_source(name: str, *, use_hf: bool = False, hub_token: str | None = None, streaming: bool = False) -> RowSource:
    """Open a dataset by its name in --dataset, without `#rows`. Raises ValueError with the fix."""
    check_exists(name)
    path = expand_user(name)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    return HubDataset(name, _load_from_hub(name, use_hf, hub_token, streaming))


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


def _folder(path: Path) -> RowSource:
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):  # written by datasets' save_to_disk
        import datasets

        saved = datasets.load_from_disk(str(path))
        return HubDataset(str(path), _train_split(str(path), saved) if isinstance(saved, dict) else saved)
    files = [file for file in sorted(path.rglob("*")) if extension(file) in EXTENSIONS and file.is_file()]
    files = [file for file in files if file.name not in METADATA]
    # `datasets` caches the results of map and filter beside the data.
    files = [file for file in files if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{path}: the folder has no data file. Use one with {' '.join(EXTENSIONS)}.")
    return Concatenation(str(path), [_file(file) for file in files])


def _load_from_hub(name: str, use_hf: bool, token: str | None, streaming: bool):
    """Load the training split of `id` or `id:subset`: `hf::id` from Hugging Face, `ms::id` from ModelScope."""
    hub, _, dataset_id = name.rpartition("::")
    repository, _, subset = dataset_id.partition(":")
    if hub == "hf" or (use_hf and hub != "ms"):
        return _train_split(name, _load_from_hugging_face(name, repository, subset or None, token, streaming))
    try:
        from modelscope import MsDataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"{name}: no such file or folder, and ModelScope ids need the package modelscope. Fix the path, run "
            "`pip install modelscope`, or set --use_hf true to load it from Hugging Face."
        ) from error
    try:
        dataset = MsDataset.load(repository, subset_name=subset or "default", split="train", use_streaming=streaming)
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


def _train_split(name: str, splits):
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise ValueError(f"{name}: no split `train`, only {', '.join(splits)}. Save one of them to a file.")


def open_sources(
    flag: str, names: Iterable[str], *, use_hf: bool = False, hub_token: str | None = None, streaming: bool = False
) -> list[tuple[RowSource, int | None]]:
    """Open the datasets of a flag, each with the number of rows to take (None: all)."""
    opened = []
    for name in names:
        try:
            path, count = split_count(name)
            opened.append((open_source(path, use_hf=use_hf, hub_token=hub_token, streaming=streaming), count))
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error
    return opened
