"""Data and rewards of Oumi's configs: `data.train`, `data.validation`, `training.reward_functions`."""

import re

from ...templates.formats.dataset_names import EXTENSIONS, expand_user, extension
from ..flags import Scalar
from .keys import Keys
from .table import Row, computed, needless, refused, under
from .translation import Translation

# Names of Oumi's registry -> hub id.
REGISTERED = {"gsm8k": "openai/gsm8k", "countdown": "d1shs0ap/countdown", "letter_count": "oumi-ai/oumi-letter-count"}
PREPARED = {"openai/gsm8k": "openai/gsm8k:verl"}  # dataset -> the preset with Oumi's prompts for RL
REWARDS = {"openai/gsm8k": "gsm8k", "d1shs0ap/countdown": "countdown"}  # dataset -> its reward in Oumi
RULES = ("gsm8k", "countdown")
# Python functions in Oumi's registry of rewards.
FUNCTIONS = ("count_letters", "soft_20tokens_completions", "rubric", "rlvr_rubric")
SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[:(?P<rows>\d+)\])?")
PLUGIN = "Write it as a function in a file of --external_plugins, name it by --reward_funcs, and take this key away"

DATASET_ROWS = (
    computed("dataset_name", "dataset", text="name of Oumi's registry, or hub id"),
    computed("dataset_path", "dataset", text="goes before the name"),
    computed("subset", "dataset", text="NAME:subset"),
    computed("split", "dataset", text="train[:10] is NAME@train:10"),
    computed("sample_count", "dataset", text="NAME#count"),
    computed("shuffle", "dataset_shuffle", text="must be the same for all datasets"),
    computed("dataset_kwargs.hf_dataset_path", "dataset", text="goes before the name"),
    computed("dataset_kwargs.prompt_column", "columns", text="to query"),
    computed("dataset_kwargs.response_column", "columns", text="to response"),
    computed("dataset_kwargs.messages_column", "columns", text="to messages"),
    needless("dataset_kwargs.return_conversation", "rows are read by their columns"),
    needless("dataset_kwargs.return_conversations", "rows are read by their columns"),
    needless("dataset_kwargs.return_conversations_format", "rows are read by their columns"),
    needless("dataset_kwargs.return_tensors", "rows are read by their columns"),
    needless("trust_remote_code", "code from a hub is never run"),
    needless("shuffle_buffer_size", "--shuffle_buffer_size is of the whole stream"),
)
CLASS_ARGUMENT = "is an argument of a Python class of Oumi's. Use --columns, or write the rows anew"
SPLIT_ROWS = (
    *under("datasets[]", DATASET_ROWS),
    computed("collator_name", "loss_scale", text="text_completions_only_with_padding: default, else all"),
    needless("collator_kwargs.response_template", "the chat template says where answers begin"),
    needless("collator_kwargs.instruction_template", "the chat template says where answers begin"),
    needless("collator_kwargs.end_of_turn_template", "the chat template says where answers end"),
    refused("collator_kwargs.**", "is an argument of a Python class of Oumi's. Remove it"),
    needless("seed", "--data_seed is the seed of every shuffle"),
    needless("use_torchdata", "the loader is this project's own"),
    refused("target_col", "is deprecated in Oumi. Use --columns"),
)
TRAIN_ROWS = (
    computed("datasets[].mixture_proportion", "interleave_prob", text="set it for all datasets or for none"),
    computed("datasets[].seed", "data_seed", text="must be the same for all datasets"),
    computed("datasets[].transform_num_workers", "dataset_num_proc", text="auto: one"),
    computed("datasets[].dataset_kwargs.assistant_only", "loss_scale", text="true: default, else all"),
    refused("datasets[].dataset_kwargs.**", CLASS_ARGUMENT),
    computed("train_target", "loss_scale", text="all_assistant_turns: default, final_assistant_turn: last_round"),
    computed("pack", "packing", text="packs of model.model_max_length tokens"),
    computed("stream", "streaming", text="true: no cache of tokens"),
    computed("mixture_strategy", "stopping_strategy", text="with mixture_proportion"),
)
VALIDATION_ROWS = (
    needless("datasets[].mixture_proportion", "evaluation data are whole"),
    needless("datasets[].seed", "--data_seed is the seed of every shuffle"),
    needless("datasets[].transform_num_workers", "as of the training data"),
    needless("datasets[].dataset_kwargs.assistant_only", "as of the training data"),
    refused("datasets[].dataset_kwargs.**", CLASS_ARGUMENT),
    needless("train_target", "as of the training data"),
    needless("pack", "as of the training data"),
    needless("stream", "evaluation data are read whole"),
    needless("mixture_strategy", "evaluation data are whole"),
)
ROWS: tuple[Row, ...] = (
    *under("data.train", (*SPLIT_ROWS, *TRAIN_ROWS)),
    *under("data.validation", (*SPLIT_ROWS, *VALIDATION_ROWS)),
    needless("data.test.**", "Oumi does not use it in training"),
    computed("training.reward_functions", "reward_funcs", text="names, or that of the dataset"),
    computed("training.reward_function_kwargs.countdown.format_score", "countdown_format_score", text="0 by default"),
    refused("training.reward_function_kwargs.**", f"is an argument of a Python function of Oumi's. {PLUGIN}"),
)


def set_data(keys: Keys, translation: Translation, kind: str) -> list[str]:
    """Set the flags of the data. Return the hub ids or paths of the training data.

    kind: value of --rlhf_type; "" for sft
    """
    locations: list[str] = []
    columns: dict[str, str] = {}
    for split, flag in (("train", "dataset"), ("validation", "val_dataset")):
        tables = keys.names(f"data.{split}.datasets")
        names = []
        for table in tables:
            location, name = _name(keys, translation, table, kind)
            names.append(name)
            if split == "train":
                locations.append(location)
            for column, target in (("prompt", "query"), ("response", "response"), ("messages", "messages")):
                if (old := keys.text(f"{table}.dataset_kwargs.{column}_column")) and old != target:
                    columns[old] = target
        if names:
            translation.set(flag, names, keys.source(f"data.{split}.datasets"))
        prefix = "" if split == "train" else "val_"
        if tables:
            _set_order(keys, translation, split, tables, f"{prefix}dataset_shuffle")
    if columns:
        translation.set("columns", dict(sorted(columns.items())), keys.source("data.train.datasets[0].dataset_kwargs"))
    _set_mixture(keys, translation, keys.names("data.train.datasets"))
    if kind == "":
        _set_trained_tokens(keys, translation)
    for split in ("train", "validation"):
        _set_collator(keys, translation, f"data.{split}", kind)
    if keys.boolean("data.train.stream"):
        translation.set("streaming", True, keys.source("data.train.stream"))
    return locations


def _name(keys: Keys, translation: Translation, table: str, kind: str) -> tuple[str, str]:
    """Return the location of a dataset, and its name in --dataset."""
    name = keys.text(f"{table}.dataset_name", "")
    path, hub_path = keys.text(f"{table}.dataset_path"), keys.text(f"{table}.dataset_kwargs.hf_dataset_path")
    location = path or hub_path or REGISTERED.get(name, name)
    if not location:
        translation.refuse(keys, f"{table}.dataset_name", "has no value. Set it")
    subset, split = keys.text(f"{table}.subset"), keys.text(f"{table}.split")
    is_prepared = kind == "grpo" and location in PREPARED
    text = PREPARED[location] if is_prepared else f"{location}:{subset}" if subset else location
    if is_prepared and subset not in (None, "main"):
        translation.refuse(keys, f"{table}.subset", "only main has the columns of GSM8K. Remove it")
    rows = keys.integer(f"{table}.sample_count")
    is_file = extension(expand_user(location)) in EXTENSIONS
    if split and not (match := SPLIT.fullmatch(split)):
        translation.refuse(keys, f"{table}.split", "only NAME and NAME[:ROWS] are supported. Write one of them")
    elif split and not (is_file and split == "train"):
        if match["rows"] and rows:
            translation.refuse(keys, f"{table}.sample_count", f"{table}.split has a number of rows, too. Remove one")
        text += f"@{match['name']}" + (f":{match['rows']}" if match["rows"] else "")
    return location, text + (f"#{rows}" if rows else "")


def _set_order(keys: Keys, translation: Translation, split: str, tables: list[str], flag: str) -> None:
    """Set whether rows are shuffled before some of them are taken, and by which seed."""
    shuffles = {keys.boolean(f"{table}.shuffle", False) for table in tables}
    is_training = split == "train"
    seeds = {keys.integer(f"{table}.seed") for table in tables if is_training} - {None}
    for table in tables if is_training else ():
        workers = keys.take(f"{table}.transform_num_workers")
        if isinstance(workers, int):
            translation.set("dataset_num_proc", workers, keys.source(f"{table}.transform_num_workers"))
    if len(shuffles) > 1:
        translation.refuse(keys, f"{tables[0]}.shuffle", "--dataset_shuffle is one for all datasets. Make them alike")
        return
    source = f"{tables[0]}.shuffle"
    translation.set(flag, shuffles.pop(), keys.source(source) if source in keys else f"Oumi's default of {source}")
    if len(seeds) > 1:
        translation.refuse(keys, f"{tables[0]}.seed", "--data_seed is one for all datasets. Make them alike")
    elif seeds and "training.data_seed" not in keys:
        translation.set("data_seed", seeds.pop(), keys.source(f"{tables[0]}.seed"))


def _set_mixture(keys: Keys, translation: Translation, tables: list[str]) -> None:
    values = [keys.number(f"{table}.mixture_proportion") for table in tables]
    proportions: list[Scalar] = [value for value in values if value is not None]
    strategy = keys.text("data.train.mixture_strategy", "first_exhausted").lower()
    if len(tables) > 1 and len(proportions) == len(tables):
        translation.set("interleave_prob", proportions, keys.source(f"{tables[0]}.mixture_proportion"))
        translation.set("stopping_strategy", strategy, keys.source("data.train.mixture_strategy"))


def _set_trained_tokens(keys: Keys, translation: Translation) -> None:
    """Set which tokens sft trains on: all, as Oumi does by default, or answers."""
    tables = keys.names("data.train.datasets")
    by_class = {keys.boolean(f"{table}.dataset_kwargs.assistant_only", False) for table in tables}
    by_collator = keys.peek("data.train.collator_name") == "text_completions_only_with_padding"
    target = keys.text("data.train.train_target", "").lower()
    scale = (
        "last_round" if target == "final_assistant_turn" else "default" if by_collator or True in by_class else "all"
    )
    if scale == "all":
        translation.set("loss_scale", "all", "Oumi's default of data.train.collator_name: every token")
    else:
        translation.set("loss_scale", scale, keys.source("data.train.collator_name"))
    if len(by_class) > 1:
        key = f"{tables[0]}.dataset_kwargs.assistant_only"
        translation.refuse(keys, key, "--loss_scale is one for all datasets. Make them alike")


def _set_collator(keys: Keys, translation: Translation, table: str, kind: str) -> None:
    name = keys.text(f"{table}.collator_name")
    if name and "vision" in name:
        fix = "images are trained on by `megatron sft` with rows of its own form. See docs/data.md"
        translation.refuse(keys, f"{table}.collator_name", fix)
    if table == "data.train":
        keys.take("data.train.train_target")
        if keys.boolean("data.train.pack") and kind == "":
            translation.set("packing", True, keys.source("data.train.pack"))


def set_rewards(keys: Keys, translation: Translation, locations: list[str]) -> None:
    """Set the reward functions: those of the config, else that of Oumi's dataset."""
    key = "training.reward_functions"
    names = [str(name) for name in keys.items(key) if name]
    unknown = [name for name in names if name in FUNCTIONS]
    if unknown:
        translation.refuse(keys, key, f"{unknown[0]} is a Python function of Oumi's. {PLUGIN}: ~{key}")
    elif names:
        translation.set("reward_funcs", [*names], keys.source(key))
    elif implied := list(dict.fromkeys(REWARDS[location] for location in locations if location in REWARDS)):
        names = implied
        translation.set("reward_funcs", [*implied], f"Oumi's reward for {locations[0]}, for want of {key}")
    score = "training.reward_function_kwargs.countdown.format_score"
    if "countdown" in names:
        default = f"Oumi's default of {score}"
        translation.set(
            "countdown_format_score", keys.number(score, 0.0), keys.source(score) if score in keys else default
        )
