"""Prompts of `swift infer`: rows of `--val_dataset`, or the evaluation data of the run that saved the checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ..bridge.checkpoint.hub import adapter_folder, model_folder
from ..templates.dataset.files import RowSource
from ..templates.dataset.selection import select_rows, split_rows
from ..templates.dataset.sources import open_sources
from ..templates.formats.dataset_names import resolve_text
from ..templates.formats.media_rows import to_media_conversation
from ..templates.formats.presets import rename_columns
from ..templates.formats.schemas import Conversation, UnusableRow, row_errors, to_conversation
from ..templates.formats.self_cognition import SelfCognition
from ..templates.json_types import JsonObject
from ..templates.media.grounding import name_objects
from ..templates.media.processor import VisionProcessor
from ..templates.options import MediaOptions, PrepareOptions
from .infer_media import check_readable, count_media
from .options import InferOptions

# Options that the user may set instead.
TAKEN = ("columns", "system", "enable_thinking", "use_hf", *(field.name for field in fields(MediaOptions)))


@dataclass
class InferPrompt:
    """Prompt to complete. `label`: the row's own last response, if any. `name`: the place of its row."""

    conversation: Conversation
    label: str | None
    name: str = ""


@dataclass(frozen=True)
class RunData:
    """Data options of a run, from the args.json of its checkpoint."""

    path: Path  # of args.json
    values: JsonObject

    @classmethod
    def of(cls, options: InferOptions) -> "RunData":
        """Read the args.json of the checkpoint to run. Raises FileNotFoundError or ValueError."""
        folder = adapter_folder(options, options.adapters) or model_folder(options)
        path = next((path for path in (folder / "args.json", folder.parent / "args.json") if path.is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"--load_data_args true: {folder} has no args.json. Set the checkpoint-N of a run, or --val_dataset."
            )
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            values = {name: entry["value"] for name, entry in table["options"].items()} if "options" in table else table
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--load_data_args true: {path} cannot be read ({error!r}). Set --val_dataset") from None
        return cls(path, values)

    @property
    def prepare(self) -> PrepareOptions:
        names = {field.name for field in fields(PrepareOptions)}
        return PrepareOptions(
            **{name: value for name, value in self.values.items() if name in names and value is not None}
        )

    def complete(self, options: InferOptions) -> InferOptions:
        """Return `options` with those of the run that are not set."""
        unset = {name: self.values.get(name) for name in TAKEN if getattr(options, name) in (None, False, {})}
        return replace(options, **{name: value for name, value in unset.items() if value is not None})

    def sources(self, options: InferOptions) -> Iterator[tuple[RowSource, np.ndarray]]:
        """Yield the run's evaluation data: its `--val_dataset`, or the rows that it set aside. Raises ValueError."""
        data = self.prepare
        if not data.val_dataset and not data.split_dataset_ratio:
            raise ValueError(
                f"--load_data_args true: by {self.path} the run evaluated nothing (--val_dataset, "
                "--split_dataset_ratio). Set --val_dataset"
            )
        flag, names, shuffle = "--dataset", data.dataset, data.dataset_shuffle
        if data.val_dataset:
            flag, names, shuffle = "--val_dataset", data.val_dataset, data.val_dataset_shuffle
        random = np.random.default_rng(data.data_seed)
        for source, count in open_sources(flag, names, **_hub(options)):
            rows = select_rows(len(source), count or len(source), shuffle=shuffle, seed=data.data_seed)
            if not data.val_dataset:
                _, rows = split_rows(rows, data.split_dataset_ratio, random)
            yield source, rows


def read_prompts(
    options: InferOptions, run_data: RunData | None = None, vision: VisionProcessor | None = None
) -> Iterator[InferPrompt]:
    """Yield the rows of `--val_dataset`, or of the run. `--system` is added to rows without a system prompt.

    vision: processor of images and videos; None: rows with such are refused
    """
    system = resolve_text("--system", options.system)
    self_cognition = None
    if run_data:
        self_cognition = SelfCognition(run_data.prepare.model_name, run_data.prepare.model_author)
    sources = run_data.sources(options) if run_data and not options.val_dataset else _sources(options)
    for source, rows in sources:
        for _, row_name, row in source.rows(rows):
            try:
                with row_errors():
                    row = rename_columns(row, options.columns)
                    row = self_cognition.fill(row) if self_cognition else row
                    conversation = _conversation(row, vision)
            except UnusableRow as error:
                raise ValueError(f"--val_dataset: {row_name}: {error}") from error
            messages = conversation.messages
            label = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
            del conversation.media[count_media(messages) :]
            if not messages:
                raise ValueError(f"--val_dataset: {row_name}: it has a response but no prompt")
            if system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            yield InferPrompt(conversation, label, row_name)


def _conversation(row: JsonObject, vision: VisionProcessor | None) -> Conversation:
    """Return the conversation of a row, whose media can be read."""
    if vision is None:
        return to_conversation(row, answered=False, strict=False)
    conversation, objects = to_media_conversation(row, answered=False, strict=False)
    check_readable(conversation.media, vision)
    if objects:
        name_objects(conversation, objects, vision)
    return conversation


def _sources(options: InferOptions) -> Iterator[tuple[RowSource, np.ndarray]]:
    for source, count in open_sources("--val_dataset", options.val_dataset, **_hub(options)):
        if not len(source):
            raise ValueError(f"--val_dataset {source.name}: it has no rows. Set another one")
        yield source, np.arange(min(count or len(source), len(source)))


def _hub(options: InferOptions) -> JsonObject:
    return {"use_hf": options.use_hf, "hub_token": options.hub_token, "columns": options.columns}
