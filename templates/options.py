"""Flags of the data: sources of rows, tokenization and packing. Imports no torch."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

# Options that caches and checkpoints of earlier versions lack. Each is false or empty by default.
ADDED = ("model_author", "model_name", "add_non_thinking_prefix", "enable_channel_loss")


@dataclass
class DataOptions:
    """Data"""

    dataset: Annotated[
        list[str],
        "Training data: files (.jsonl .json .csv .tsv .txt, also as .gz; .parquet .arrow), folders, hub ids; "
        "`path#500` takes 500 rows.",
    ] = field(default_factory=list)
    val_dataset: Annotated[list[str], "Evaluation data, named as in --dataset."] = field(default_factory=list)
    cached_dataset: Annotated[
        list[str], "Further training data, as --dataset; rows may be tokens: input_ids, labels, loss_scale."
    ] = field(default_factory=list)
    cached_val_dataset: Annotated[list[str], "The same for --val_dataset."] = field(default_factory=list)
    interleave_prob: Annotated[
        list[float], "Probability of each --dataset, from which rows are drawn in turn. Default: all rows.", "[0, 1]"
    ] = field(default_factory=list)
    stopping_strategy: Annotated[
        Literal["first_exhausted", "all_exhausted"],
        "interleave_prob: end with the first dataset that is used up, or repeat it until all are.",
    ] = "first_exhausted"
    split_dataset_ratio: Annotated[float, "Share of the rows of --dataset set aside for evaluation.", "[0, 1)"] = 0.0
    dataset_shuffle: Annotated[bool, "Shuffle the rows when they are read; `#500` then takes random rows."] = True
    val_dataset_shuffle: Annotated[bool, "The same for --val_dataset."] = False
    train_dataloader_shuffle: Annotated[bool, "Shuffle the training samples anew in every epoch."] = True
    group_by_length: Annotated[
        bool, "Shuffle so that the samples of a step are of similar length: even work for all ranks."
    ] = False
    data_seed: Annotated[int, "Seed of every shuffle and of the split.", "[0, inf)"] = 42
    columns: Annotated[
        dict[str, str],
        'Columns to rename, as JSON: \'{"old": "new"}\'. A dotted name is a value of a nested column.',
    ] = field(default_factory=dict)
    strict: Annotated[bool, "Stop at the first unusable row, instead of dropping and reporting it."] = False
    dataset_num_proc: Annotated[int, "Number of tokenizing processes.", "(0, inf)"] = 1
    load_from_cache_file: Annotated[
        bool, "Use the token cache of an earlier run on the same data; false: rebuild it."
    ] = True
    streaming: Annotated[bool, "Tokenize while training, without a token cache; needs --train_iters."] = False
    shuffle_buffer_size: Annotated[int, "streaming: size of the shuffle buffer, in rows.", "(0, inf)"] = 1000
    dataloader_num_workers: Annotated[
        int, "Worker processes per rank that prepare batches; 0: the rank itself does.", "[0, inf)"
    ] = 4


@dataclass
class TemplateOptions:
    """Template"""

    max_length: Annotated[int | None, "Longest sample in tokens. Default: no limit.", "(0, inf)"] = None
    truncation_strategy: Annotated[
        Literal["delete", "left", "right", "split"],
        "What to do with a sample longer than --max_length: drop it, truncate its left or right side "
        "(prompts: left only), or split it (pt only).",
    ] = "delete"
    system: Annotated[str | None, "System prompt, or a .txt or .md file with it, for rows without one."] = None
    enable_thinking: Annotated[
        bool | None, "Passed to the chat template. Default: the template's; false for rerankers."
    ] = None
    loss_scale: Annotated[
        str,
        "Train on all assistant messages (default), on those after the last user message (last_round), or on every "
        "token (all); and presets of weights for parts of answers: ignore_empty_think, ignore_think_prefix, hermes, "
        "react, qwen, alpha_umi, agentflan. Several are joined by +.",
    ] = "default"
    add_non_thinking_prefix: Annotated[
        bool, "Put the template's empty thought before answers to the last question that have none."
    ] = False
    model_author: Annotated[
        list[str], "Author that replaces {{AUTHOR}} in rows: one, or the Chinese and the English one."
    ] = field(default_factory=list)
    model_name: Annotated[
        list[str], "Name that replaces {{NAME}} in rows: one, or the Chinese and the English one."
    ] = field(default_factory=list)
    enable_channel_loss: Annotated[
        bool, "sft, pt: log the mean loss of each channel, the text in a row's column `channel`, as loss_<channel>."
    ] = False

    def set_additions(self) -> dict[str, object]:
        """Return the options of ADDED that are set. Left out elsewhere, older caches and checkpoints stay valid."""
        return {name: value for name in ADDED if (value := getattr(self, name))}

    def first_options(self) -> dict[str, object]:
        """Return the options that determine tokens, except ADDED."""
        return {f.name: getattr(self, f.name) for f in fields(TemplateOptions) if f.name not in ADDED}


@dataclass
class PackingOptions:
    """Packing"""

    packing: Annotated[bool, "Pack samples into rows of one length, without attention between them."] = False
    packing_length: Annotated[
        int | None,
        "Length of a pack in tokens; packs of completions have at most this x --micro_batch_size. Default: "
        "--max_length.",
        "(0, inf)",
    ] = None
    padding_free: Annotated[bool, "Concatenate the samples of a micro batch; false: pad them to the longest."] = True


@dataclass
class MediaOptions:
    """Images and videos"""

    max_pixels: Annotated[
        int | None,
        "Most pixels of an image; larger ones are made smaller. Default: the checkpoint's limit.",
        "(0, inf)",
    ] = None
    norm_bbox: Annotated[
        Literal["norm1000", "none"] | None,
        "Boxes of `objects` from 0 to 1000 (norm1000), or in pixels of the resized image (none). Default: the model's.",
    ] = None
    model_kwargs: Annotated[
        dict[str, Any], "Limits of images and videos as JSON, named as in the environment: '{\"fps_max_frames\": 12}'."
    ] = field(default_factory=dict)
    allow_private_media_urls: Annotated[bool, "Download media of rows from private networks too."] = False


@dataclass
class PrepareOptions(DataOptions, TemplateOptions, PackingOptions, MediaOptions):
    """Everything that `templates.prepare` reads."""
