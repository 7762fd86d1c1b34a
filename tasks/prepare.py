"""`swift prepare`: public datasets in the columns that rewards by source read.

    swift prepare gsm8k --local_dir data/gsm8k
    swift prepare deepscaler --local_dir data/deepscaler --local_dataset_path deepscaler.json

The rows are those of verl's and siiRL's own scripts (templates/formats/recipes.py).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..templates.dataset.sources import PresetSource, open_source
from ..templates.formats.dataset_names import expand_user
from ..templates.formats.recipes import RECIPES, Recipe
from ..templates.json_types import JsonObject
from ..templates.plural import plural
from .options import RecipeOptions

SPLITS = ("train", "test")


def run(options: RecipeOptions, sources: dict[str, str]) -> int:
    """Write train.parquet and test.parquet, and return the exit code."""
    recipe = RECIPES[options.recipe or ""]
    tables = {split: list(rows) for split, rows in prepare_rows(recipe, options).items()}
    folder = expand_user(options.local_dir or "")
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        _write(folder / f"{split}.parquet", rows)
        print(f"{folder / split}.parquet: {plural(len(rows), 'row')}")
    first, train_file = tables["train"][0], folder / "train.parquet"
    print(f"The first prompt: {first['prompt'][0]['content']}")
    print(f"The first ground truth: {first['reward_model']['ground_truth']}")
    print(f"Train with: megatron rlhf --rlhf_type grpo --reward_funcs by_source --dataset {train_file} ...")
    return 0


def prepare_rows(recipe: Recipe, options: RecipeOptions) -> dict[str, Iterator[JsonObject]]:
    """Return the rows of each split of a recipe's result."""
    if recipe.test_share is None:
        return {split: _convert(recipe, split, _rows(recipe, split, options)) for split in SPLITS}
    rows = list(_rows(recipe, None, options))
    parts = zip(SPLITS, split_as_datasets(len(rows), recipe.test_share, recipe.seed), strict=True)
    return {split: _convert(recipe, split, [rows[number] for number in numbers]) for split, numbers in parts}


def split_as_datasets(count: int, test_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that `datasets.Dataset.train_test_split` gives to train and test."""
    from datasets import Dataset

    parts = Dataset.from_dict({"number": np.arange(count)}).train_test_split(test_size=test_share, seed=seed)
    return parts["train"]["number"][:], parts["test"]["number"][:]


def _convert(recipe: Recipe, split: str, rows: "Iterator[JsonObject] | list[JsonObject]") -> Iterator[JsonObject]:
    """Yield the rows of a split. Raises ValueError with the row that has another form."""
    for index, row in enumerate(rows):
        try:
            yield recipe(row, split, index)
        except (KeyError, TypeError) as error:
            problem = f"lacks the column {error}" if isinstance(error, KeyError) else "has a column that is no text"
            raise ValueError(
                f"{recipe.dataset} {split} row {index + 1}: {problem}; it has {', '.join(row)}. Set "
                "--local_dataset_path to a copy of the dataset itself."
            ) from None
        except ValueError as error:
            raise ValueError(f"{recipe.dataset} {split} row {index + 1}: {error}. Fix the dataset.") from None


def _rows(recipe: Recipe, split: str | None, options: RecipeOptions) -> Iterator[JsonObject]:
    """Yield the rows of a dataset, as they are there."""
    name = _dataset_name(recipe, options.local_dataset_path) + (f"@{split}" if split else "")
    try:
        source = open_source(name, use_hf=options.use_hf, hub_token=options.hub_token)
        if isinstance(source, PresetSource):
            source = source.source
        for _, _, row in source.stream():
            yield row
    except ValueError as error:
        flag = f"--local_dataset_path {options.local_dataset_path}" if options.local_dataset_path else "swift prepare"
        fix = "" if options.local_dataset_path else " Where no hub is reached, set --local_dataset_path to a copy."
        raise ValueError(f"{flag}: {str(error).rstrip('.')}.{fix}") from error


def _dataset_name(recipe: Recipe, local_path: str | None) -> str:
    """Return the dataset as --dataset names it, with its subset where one must be chosen."""
    if local_path is None:
        return f"{recipe.dataset}:{recipe.subset}" if recipe.subset else recipe.dataset
    has_subset = recipe.subset and (expand_user(local_path) / recipe.subset).is_dir()
    return f"{local_path}:{recipe.subset}" if has_subset else local_path


def _write(path: Path, rows: list[JsonObject]) -> None:
    """Write a Parquet file, complete or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(rows), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
