"""Checks of saving and resuming."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...bridge.option_groups import flag_value
from ...tasks.options import CheckpointOptions, SftOptions
from ...tasks.run.resume import requested_checkpoint
from ..flags import UsageError

NEWEST = ("latest", "auto")  # values of --resume_from_checkpoint that are not folders
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
LOG_PROBS = ("logps/chosen", "logps/rejected")
METRICS = {  # metrics of evaluations, by task
    "causal_lm": ("loss", "mtp_loss"),
    "dpo": ("loss", *REWARDS, "rewards/accuracies", *LOG_PROBS, "nll_loss"),
    "orpo": ("loss", *REWARDS, "rewards/accuracies", *LOG_PROBS, "nll_loss", "log_odds_chosen", "log_odds_ratio"),
    "simpo": ("loss", *REWARDS, "rewards/accuracies", *LOG_PROBS, "nll_loss"),
    "cpo": ("loss", *REWARDS, "rewards/accuracies", *LOG_PROBS, "nll_loss"),
    "kto": ("loss", *REWARDS, *LOG_PROBS, "kl"),
    "rm": ("loss", *REWARDS, "rewards/accuracies"),
    "grpo": ("reward", "completions/mean_length", "completions/clipped_ratio"),
    "ppo": ("reward", "completions/mean_length", "completions/clipped_ratio"),
    "gkd": ("loss", "jsd", "nll_loss"),
    "seq_cls": ("loss", "accuracy", "mse"),
    "embedding": ("loss", "accuracy"),
    "reranker": ("loss", "accuracy", "mrr"),
    "generative_reranker": ("loss", "accuracy", "mrr"),
}
SHELL = re.compile(r"[|&;]+|\d?[<>]+(&\d)?|[<>].*")  # operators between words of a command line
PARTIAL_FLAGS = ("no_load_optim", "no_load_rng", "ignore_data_skip")  # options that resume from a part of a checkpoint


def check_resume(options: SftOptions) -> Iterator[str]:
    """Raise UsageError for unusable options of saving and resuming. Yield notes for the user."""
    requested, flag = requested_checkpoint(options), "--resume_from_checkpoint"
    if not options.resume.finetune:
        flag = "--finetune false, which resumes from"
        if not requested:
            flags = "--mcore_adapter or --adapters" if options.tuner.has_adapters else "--mcore_model or --model"
            raise UsageError(f"--finetune false: no checkpoint to resume from. Set {flags}.")
        if options.resume.resume_from_checkpoint not in (None, requested):
            raise UsageError(
                f"--resume_from_checkpoint {options.resume.resume_from_checkpoint}: differs from {requested}, which "
                "--finetune false resumes from. Remove one of them."
            )
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # the run may have replaced the folder
    if (
        requested is not None
        and requested not in NEWEST
        and not is_restart
        and not Path(requested).expanduser().is_dir()
    ):
        raise UsageError(
            f"{flag} {requested}: no such folder. Set a checkpoint's folder, latest (the newest under "
            "--output_dir), or auto (the same, or a new run if there is none)."
        )
    if requested is None:
        for name in PARTIAL_FLAGS:
            if getattr(options.resume, name):
                yield f"--{name} true is not needed: nothing is resumed."
    if options.checkpoint.async_save and not options.checkpoint.save_safetensors:
        raise UsageError(
            "--async_save true cannot be used with --save_safetensors false: megatron-core's format is written "
            "synchronously. Remove one of them."
        )
    if options.training.eval_on_start and not evaluates(options):
        raise UsageError(
            "--eval_on_start true: nothing is evaluated. Set --val_dataset or --split_dataset_ratio, or remove it."
        )
    metrics = METRICS[flag_value(options, "rlhf_type", None) or flag_value(options, "task_type", "causal_lm")]
    if options.checkpoint.metric_for_best_model == "":
        raise UsageError(f"--metric_for_best_model: is empty. Set {options.usual_metric}, or remove it.")
    metric = (options.checkpoint.metric_for_best_model or options.usual_metric).removeprefix("eval_")
    if options.checkpoint.eval_command is not None:
        _check_eval_command(options.checkpoint.eval_command)
        return  # the metric may be the command's
    if options.checkpoint.eval_command_timeout != CheckpointOptions.eval_command_timeout:
        yield "--eval_command_timeout is not needed: there is no --eval_command."
    if metric not in metrics:
        raise UsageError(f"--metric_for_best_model {metric}: evaluations have {', '.join(metrics)}. Set one of them.")
    for name in ("metric_for_best_model", "greater_is_better"):
        if getattr(options.checkpoint, name) is not None and not evaluates(options):
            raise UsageError(
                f"--{name}: nothing is evaluated. Set --val_dataset or --split_dataset_ratio, or remove it."
            )


def evaluates(options: SftOptions) -> bool:
    """Return whether the run evaluates."""
    data = options.data
    has_data = bool(data.val_dataset or data.cached_val_dataset) or data.split_dataset_ratio > 0
    return has_data and options.training.eval_iters != 0


def _check_eval_command(command: str) -> None:
    """Raise UsageError for a command that cannot start, or that only a shell understands."""
    flag, fix = f"--eval_command {command}", "Put it into a script, or give it to a shell: bash -c '...'."
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}. Close the quotation.") from None
    if not words:
        raise UsageError('--eval_command "": is empty. Set a command, or remove it.')
    if operators := [word for word in words if SHELL.fullmatch(word)]:
        raise UsageError(f"{flag}: no shell runs it, so {operators[0]} would be one of its arguments. {fix}")
    if "=" in words[0] and "/" not in words[0].partition("=")[0]:
        raise UsageError(f"{flag}: no shell runs it, so {words[0]} sets no variable. {fix}")
    if "{checkpoint}" not in words[0] and shutil.which(words[0]) is None:
        raise UsageError(f"{flag}: there is no program {words[0]}. Set one that is on PATH, or its path.")
