"""What --dataset means: a file, a folder, what `datasets` saved to disk, or a hub's dataset."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..formats.dataset_names import EXTENSIONS, check_there, expanded, extension, split_count
from ..formats.schemas import ArrowRow
from .files import Arrow, CompressedLines, Csv, File, Joined, JsonArray, Lines, Parquet, Source
from .tokenize import Row

ABOUT = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")  # what `datasets` writes of data


class HubDataset(Source):
    """A datasets.Dataset, or (for `stream` alone) a datasets.IterableDataset."""

    def __init__(self, name: str, dataset):
        self.name, self.dataset = name, dataset

    @property
    def fingerprint(self) -> str:
        return self.dataset._fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number, row in zip(numbers.tolist(), _rows(self.dataset[numbers.tolist()]), strict=True):
            yield number, f"{self.name} row {number + 1}", row

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Iterator[Row]:
        """Of a dataset of many files whose number the shares divide, each share downloads its own files alone."""
        from datasets import Dataset
        from datasets.distributed import split_dataset_by_node

        dataset = self.dataset.to_iterable_dataset() if isinstance(self.dataset, Dataset) else self.dataset
        # By `iter`: plain iteration would divide the rows among the loader's workers once more.
        batches = split_dataset_by_node(dataset, share, shares).iter(batch_size=100)
        rows = (row for batch in batches for row in _rows(batch))
        for number, row in enumerate(islice(rows, start, None), start):
            number = number * shares + share
            yield number, f"{self.name} row {number + 1}", row


def _rows(columns: dict[str, list]) -> Iterator[ArrowRow]:
    for values in zip(*columns.values(), strict=True):
        yield ArrowRow(zip(columns, values, strict=True))


def open_source(name: str, *, use_hf: bool = False, hub_token: str | None = None, streaming: bool = False) -> Source:
    """The dataset that `name` (of --dataset, without its `#rows`) means. Raises ValueError naming the cure."""
    check_there(name)
    path = expanded(name)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    return HubDataset(name, _from_hub(name, use_hf, hub_token, streaming))


def _file(path: Path) -> File:
    kind = extension(path)
    lines = CompressedLines if kind.endswith(".gz") else Lines
    match kind.removesuffix(".gz"):
        case _ if kind not in EXTENSIONS:
            raise ValueError(f"{path}: unknown kind of file {kind!r}; known: {' '.join(EXTENSIONS)}")
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


def _folder(path: Path) -> Source:
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):  # written by datasets' save_to_disk
        import datasets

        saved = datasets.load_from_disk(str(path))
        return HubDataset(str(path), _train_split(str(path), saved) if isinstance(saved, dict) else saved)
    files = [file for file in sorted(path.rglob("*")) if extension(file) in EXTENSIONS and file.is_file()]
    files = [file for file in files if file.name not in ABOUT]
    # `datasets` keeps results of map and filter beside the data.
    files = [file for file in files if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{path}: the folder holds no data file ({' '.join(EXTENSIONS)})")
    return Joined(str(path), [_file(file) for file in files])


def _from_hub(name: str, use_hf: bool, token: str | None, streaming: bool):
    """The training split of `id` or `id:subset`, of Hugging Face (or hf::id) or of ModelScope (or ms::id)."""
    hub, _, rest = name.rpartition("::")
    repository, _, subset = rest.partition(":")
    if hub == "hf" or (use_hf and hub != "ms"):
        return _train_split(name, _from_hugging_face(name, repository, subset or None, token, streaming))
    try:
        from modelscope import MsDataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"{name}: there is no such file or folder, and to take it as a ModelScope id the package "
            "modelscope is needed: pip install modelscope, or give --use_hf true to take it from Hugging Face"
        ) from error
    try:
        dataset = MsDataset.load(repository, subset_name=subset or "default", split="train", use_streaming=streaming)
    except Exception as error:  # whatever the hub's client raises: the user needs the name and the reason
        raise ValueError(f"{name}: ModelScope did not give it: {error}") from error
    return dataset.to_hf_dataset() if hasattr(dataset, "to_hf_dataset") else dataset


def _from_hugging_face(name: str, repository: str, subset: str | None, token: str | None, streaming: bool):
    import datasets

    try:
        return datasets.load_dataset(repository, subset, token=token, streaming=streaming)
    except Exception as error:  # as above
        raise ValueError(
            f"{name}: there is no such file or folder, and Hugging Face did not give it: {error}"
        ) from error


def _train_split(name: str, splits):
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise ValueError(f"{name} has no split `train`, only {', '.join(splits)}: save one of them to a file")


def sources(flag: str, names: Iterable[str], **hub: Any) -> list[tuple[Source, int | None]]:
    """The datasets of a flag, each with the number of rows to take of it (None: all)."""
    opened = []
    for name in names:
        try:
            path, count = split_count(name)
            opened.append((open_source(path, **hub), count))
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error
    return opened
