"""Data, evaluation and logs of verl's tree."""

from typing import Any

from ..flags import Scalar
from .keys import Keys
from .translation import Translation
from .verl_batches import NEVER, Generation

ROLLOUT = "actor_rollout_ref.rollout"
LOGGERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
NAMES = {"project_name": "project", "experiment_name": "exp_name"}  # of a run -> end of a reporter's flag


def set_lengths(keys: Keys, translation: Translation) -> tuple[int, int]:
    """Set the longest prompt and completion, and return them."""
    lengths = []
    for name, again, flag in (
        ("max_prompt_length", "prompt_length", "max_length"),
        ("max_response_length", "response_length", "max_completion_length"),
    ):
        key, repeated = f"data.{name}", f"{ROLLOUT}.{again}"
        length = keys.integer(key, 512)
        translation.set(flag, length, translation.source(keys, key))
        if repeated in keys and keys.integer(repeated) != length:
            translation.refuse(keys, repeated, f"is not {key} {length}. Remove it")
        elif repeated in keys:
            translation.ignore(keys, repeated, f"as {key}")
        lengths.append(length)
    return lengths[0], lengths[1]


def set_data(keys: Keys, translation: Translation) -> bool:
    """Set the data. Return whether there are any for evaluations."""
    data = keys.view("data")
    _set_truncation(data, translation)
    if "shuffle" in data:
        is_shuffled = data.boolean("shuffle", True)
        for flag in ("train_dataloader_shuffle", "dataset_shuffle"):
            translation.set(flag, is_shuffled, data.source("shuffle"))
    columns = {}
    for name, column in (("prompt_key", "prompt"), ("reward_fn_key", "data_source")):
        if data.text(name, column) != column:
            columns[data.peek(name)] = column
    if columns:
        translation.set(
            "columns", columns, ", ".join(data.source(n) for n in ("prompt_key", "reward_fn_key") if n in data)
        )
    _set_mixture(data, translation)
    has_validation = False
    for name, samples, flag in (
        ("train_files", "train_max_samples", "dataset"),
        ("val_files", "val_max_samples", "val_dataset"),
    ):
        paths = [str(path).strip() for item in data.items(name) for path in _paths(item or "")]
        files: list[Scalar] = [path for path in paths if path]
        count = data.integer(samples, -1)
        source = data.source(name)
        if count >= 0 and len(files) > 1:
            translation.refuse(data, samples, f"counts all files together. Write FILE#{count} in data.{name}")
        elif count >= 0:
            files = [f"{path}#{count}" for path in files]
            source += f", {data.source(samples)}"
        if files:
            translation.set(flag, files, source)
        has_validation = bool(files)
    return has_validation


def _paths(item: Any) -> list[Any]:
    return item.split(",") if isinstance(item, str) else [item]


def _set_truncation(data: Keys, translation: Translation) -> None:
    names = ("filter_overlong_prompts", "filter_overlong_prompt")
    name = next((name for name in names if name in data), names[0])
    switches = [data.boolean(key, False) for key in names]
    is_filtered = any(switches)
    truncation = data.text("truncation", "error")
    if is_filtered:
        translation.set("truncation_strategy", "delete", data.source(name))
        if "truncation" in data:
            translation.ignore(data, "truncation", f"{name} leaves longer prompts out")
    elif truncation == "error":
        translation.set("truncation_strategy", "delete", translation.source(data, "truncation"))
        translation.set("strict", True, translation.source(data, "truncation"))
    elif truncation == "left":
        translation.set("truncation_strategy", "left", data.source("truncation"))
    else:
        translation.refuse(data, "truncation", "would cut off a part of the question. Set left or error")


def _set_mixture(data: Keys, translation: Translation) -> None:
    strategies = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}
    strategy = data.text("mix_strategy", "concat")
    if strategy not in ("concat", *strategies):
        translation.refuse(data, "mix_strategy", f"choose one of concat, {', '.join(strategies)}")
    try:
        probabilities: list[Scalar] = [float(part) for item in data.items("interleave_probs") for part in _paths(item)]
    except (TypeError, ValueError):
        translation.refuse(data, "interleave_probs", "numbers are needed")
        return
    if strategy in strategies and probabilities:
        translation.set("interleave_prob", probabilities, data.source("interleave_probs"))
        translation.set("stopping_strategy", strategies[strategy], data.source("mix_strategy"))
    elif strategy in strategies:
        translation.refuse(data, "mix_strategy", "needs data.interleave_probs. Set them, or concat")
    elif probabilities:
        translation.refuse(data, "interleave_probs", "needs a mix_strategy of interleave_under or interleave_over")


def set_evaluation(keys: Keys, translation: Translation, generation: Generation, *, has_data: bool) -> None:
    """Set when evaluations are made, and their sampling. Without data or times there are none."""
    every, starts = keys.integer("trainer.test_freq", -1), keys.boolean("trainer.val_before_train", True)
    sampling = keys.view(f"{ROLLOUT}.val_kwargs")
    names = ("do_sample", "temperature", "top_p", "top_k", "n")
    if not has_data or not (every > 0 or starts):
        reason = "nothing is evaluated" if has_data else "there are no data.val_files"
        if every > 0:
            translation.set("eval_steps", every * generation.steps, generation.times(keys, "trainer.test_freq"))
        if "trainer.val_before_train" in keys:
            translation.ignore(keys, "trainer.val_before_train", reason)
        for name in names:
            if name in sampling:
                translation.ignore(sampling, name, reason)
        if has_data:
            translation.flags.pop("val_dataset")
            translation.sources.pop("val_dataset")
            translation.ignore(keys, "data.val_files", "trainer.test_freq and val_before_train ask for no evaluation")
        return
    if every > 0:
        translation.set("eval_steps", every * generation.steps, generation.times(keys, "trainer.test_freq"))
    else:
        source = translation.source(keys, "trainer.test_freq")
        translation.set("eval_steps", NEVER, f"{source} -1: before the first step alone")
    translation.set("eval_on_start", starts, translation.source(keys, "trainer.val_before_train"))
    translation.set("num_generations_eval", sampling.integer("n", 1), translation.source(sampling, "n"))
    if not sampling.boolean("do_sample", False):
        translation.set("eval_temperature", 0.0, f"{translation.source(sampling, 'do_sample')} false: greedy")
        for name in names[1:4]:
            if name in sampling and float(sampling.number(name, 0)) not in (0.0, 1.0, -1.0):
                translation.note(sampling, name, "evaluations are greedy without do_sample true")
            elif name in sampling:
                translation.ignore(sampling, name, "read with do_sample true alone")
        return
    translation.set(
        "eval_temperature", sampling.number("temperature", 0.0), translation.source(sampling, "temperature")
    )
    translation.set("eval_top_p", sampling.number("top_p", 1.0), translation.source(sampling, "top_p"))
    translation.set("eval_top_k", sampling.integer("top_k", -1), translation.source(sampling, "top_k"))


def set_run(keys: Keys, translation: Translation) -> None:
    """Set reporters, names of the run, logs of completions, resuming and the contents of checkpoints."""
    trainer = keys.view("trainer")
    loggers = [str(name) for name in trainer.items("logger")]
    reporters: list[Scalar] = [name for name in loggers if name != "console"]
    unknown = [name for name in loggers if name not in ("console", *LOGGERS)]
    if unknown:
        translation.refuse(
            trainer, "logger", f"no reporter {', '.join(unknown)}. Choose of console, {', '.join(LOGGERS)}"
        )
    elif "logger" in trainer:
        translation.set("report_to", reporters or ["none"], trainer.source("logger"))
    for key, end in NAMES.items():
        if key in trainer:
            prefix = "swanlab" if "swanlab" in reporters and "wandb" not in reporters else "wandb"
            translation.set(f"{prefix}_{end}", trainer.take(key), trainer.source(key))
    if "swanlab" in reporters and "wandb" in reporters:
        for key, end in NAMES.items():
            if key in trainer:
                translation.set(f"swanlab_{end}", trainer.peek(key), trainer.source(key))
    for key, is_asked in (
        ("rollout_data_dir", trainer.text("rollout_data_dir") is not None),
        ("log_val_generations", trainer.integer("log_val_generations", 0) > 0),
    ):
        if is_asked:
            translation.set("log_completions", True, trainer.source(key))
    _set_resuming(trainer, translation)
    seed = trainer.integer("seed")
    if seed is not None and "actor_rollout_ref.actor.megatron.seed" in keys:
        translation.ignore(trainer, "seed", "actor.megatron.seed is set")
    elif seed is not None:
        translation.set("seed", seed, trainer.source("seed"))
    saved = keys.view("actor_rollout_ref.actor.checkpoint")
    for name in ("save_contents", "contents"):
        if name in saved and "optimizer" not in saved.items(name):
            translation.set("no_save_optim", True, saved.source(name))


def _set_resuming(trainer: Keys, translation: Translation) -> None:
    mode, path = trainer.take("resume_mode", "auto"), trainer.take("resume_from_path")
    if path and mode == "resume_path":
        translation.set("resume_from_checkpoint", path, trainer.source("resume_from_path"))
    elif mode == "auto":
        translation.set("resume_from_checkpoint", "auto", translation.source(trainer, "resume_mode"))
        if path:
            translation.ignore(trainer, "resume_from_path", "read with resume_mode resume_path alone")
    elif mode == "resume_path":
        translation.refuse(trainer, "resume_mode", "needs trainer.resume_from_path. Set it, or auto")
    elif mode not in (False, "off", "disable"):
        translation.refuse(trainer, "resume_mode", "choose one of auto, disable, resume_path")
    elif path:
        translation.ignore(trainer, "resume_from_path", "read with resume_mode resume_path alone")
