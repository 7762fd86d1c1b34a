"""What saving and resuming cannot be, as far as the options tell."""

import os
from collections.abc import Iterator
from pathlib import Path

from ...tasks.options import SftOptions
from ...tasks.run.resume import requested_checkpoint
from ..flags import UsageError

NEWEST = ("latest", "auto")  # of --resume_from_checkpoint: no folders
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
LOG_PROBS = ("logps/chosen", "logps/rejected")
METRICS = {  # of evaluations
    "causal_lm": ("loss", "mtp_loss"),
    "dpo": ("loss", *REWARDS, "rewards/accuracies", *LOG_PROBS, "nll_loss"),
    "kto": ("loss", *REWARDS, *LOG_PROBS, "kl"),
    "rm": ("loss", *REWARDS, "rewards/accuracies"),
    "grpo": ("reward", "completions/mean_length", "completions/clipped_ratio"),
    "gkd": ("loss", "jsd", "nll_loss"),
    "seq_cls": ("loss", "accuracy", "mse"),
    "embedding": ("loss", "accuracy"),
    "reranker": ("loss", "accuracy", "mrr"),
    "generative_reranker": ("loss", "accuracy", "mrr"),
}
GO_ON = ("no_load_optim", "no_load_rng", "ignore_data_skip")  # without something of a checkpoint


def check_resume(options: SftOptions) -> Iterator[str]:
    """Raise UsageError for what cannot be; notes for the user."""
    wanted, flag = requested_checkpoint(options), "--resume_from_checkpoint"
    if not options.finetune:
        flag = "--finetune false, which resumes from"
        if not wanted:
            given = "--mcore_adapter or --adapters" if options.tuner_type == "lora" else "--mcore_model or --model"
            raise UsageError(f"--finetune false needs {given}: the checkpoint whose run is to go on.")
        if options.resume_from_checkpoint not in (None, wanted):
            raise UsageError(
                f"--resume_from_checkpoint {options.resume_from_checkpoint} and --finetune false (which resumes from "
                f"{wanted}): leave one out."
            )
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # the run itself may have replaced it since
    if wanted is not None and wanted not in NEWEST and not again and not Path(wanted).expanduser().is_dir():
        raise UsageError(
            f"{flag} {wanted}: no such folder. Give a checkpoint's folder, latest (the newest under "
            "--output_dir), or auto (the same, or a new run where there is none)."
        )
    if wanted is None:
        for name in GO_ON:
            if getattr(options, name):
                yield f"--{name} true is not needed: nothing is resumed."
    if options.async_save and not options.save_safetensors:
        raise UsageError(
            "--async_save true cannot be with --save_safetensors false: megatron-core's format is written at once. "
            "Leave one out."
        )
    known = METRICS[getattr(options, "rlhf_type", None) or getattr(options, "task_type", "causal_lm")]
    if (metric := (options.metric_for_best_model or options.usual_metric).removeprefix("eval_")) not in known:
        raise UsageError(f"--metric_for_best_model {metric}: evaluations have {', '.join(known)}. Give one of them.")
    evaluates = (bool(options.val_dataset) or options.split_dataset_ratio > 0) and options.eval_iters != 0
    for name in ("metric_for_best_model", "greater_is_better"):
        if getattr(options, name) is not None and not evaluates:
            raise UsageError(
                f"--{name}: nothing is evaluated. Give --val_dataset or --split_dataset_ratio, or leave it out."
            )
