"""The flags of the data: where rows come from, how they become tokens, how tokens become batches. Free of torch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal


@dataclass
class DataOptions:
    """Data"""

    dataset: Annotated[
        list[str],
        "Training data: files (.jsonl .json .csv .tsv .txt, also as .gz; .parquet .arrow), folders, hub ids; "
        "`path#500` takes 500 rows.",
    ] = field(default_factory=list)
    val_dataset: Annotated[list[str], "Evaluation data, named as in --dataset."] = field(default_factory=list)
    split_dataset_ratio: Annotated[float, "Share of the rows of --dataset set aside for evaluation.", "[0, 1)"] = 0.0
    dataset_shuffle: Annotated[bool, "Shuffle the rows when they are read; `#500` then takes random rows."] = True
    val_dataset_shuffle: Annotated[bool, "The same for --val_dataset."] = False
    train_dataloader_shuffle: Annotated[bool, "Shuffle the training samples anew in every epoch."] = True
    data_seed: Annotated[int, "Seed of every shuffle and of the split.", "[0, inf)"] = 42
    columns: Annotated[dict[str, str], 'Columns to rename, as JSON: \'{"old": "new"}\'.'] = field(default_factory=dict)
    strict: Annotated[bool, "Stop at the first row that cannot be used; else it is dropped, and the log says so."] = (
        False
    )
    dataset_num_proc: Annotated[int, "Processes that tokenise.", "(0, inf)"] = 1
    load_from_cache_file: Annotated[bool, "Use the tokens of an earlier run on the same data; false: build anew."] = (
        True
    )
    streaming: Annotated[bool, "Tokenise while training, for data that fits nowhere; needs --train_iters."] = False
    shuffle_buffer_size: Annotated[int, "Rows among which --streaming shuffles.", "(0, inf)"] = 1000
    dataloader_num_workers: Annotated[
        int, "Processes per rank that lay out batches ahead; 0 does it in the rank.", "[0, inf)"
    ] = 4


@dataclass
class TemplateOptions:
    """Template"""

    max_length: Annotated[int | None, "Longest sample in tokens; none: no bound.", "(0, inf)"] = None
    truncation_strategy: Annotated[
        Literal["delete", "left", "right", "split"],
        "A sample beyond --max_length: drop it, cut its left or right end (of what is to be answered the left "
        "alone), or cut it into pieces (pt only).",
    ] = "delete"
    system: Annotated[str | None, "System prompt (or a .txt or .md file of it) for the rows that have none."] = None
    enable_thinking: Annotated[
        bool | None, "Given to the chat template; none: its own default, for rerankers false."
    ] = None
    loss_scale: Annotated[
        Literal["default", "last_round", "all"],
        "Train on all that the assistant says, on its answers to the last user message, or on every token.",
    ] = "default"


@dataclass
class PackingOptions:
    """Packing"""

    packing: Annotated[bool, "Pack samples into rows of one length; they do not see each other."] = False
    packing_length: Annotated[int | None, "Length of a pack in tokens; none: --max_length.", "(0, inf)"] = None
    padding_free: Annotated[bool, "Lay the samples of a micro batch end to end; false pads them to the longest."] = True


@dataclass
class PrepareOptions(DataOptions, TemplateOptions, PackingOptions):
    """Everything that `templates.prepare` reads."""
