"""ROLL's configs: a table of each role (`actor_train`, `actor_infer`, `reference`, ...), and keys of its pipelines.

- roll_rows.py, roll_task_rows.py: the rows
- placement.py: GPUs of the roles as processes
- roll_roles.py: models, layouts, batches and engines
- roll_rl.py, roll_rewards.py, roll_data.py: parts of pipelines
- roll_tasks.py: the pipelines
"""

from .keys import Keys
from .roll_task_rows import AGENTIC_KEYS, AGENTIC_TABLES, AGENTIC_TEXT, ROWS
from .roll_tasks import (
    Pipeline,
    translate_distillation,
    translate_dpo,
    translate_on_policy_distillation,
    translate_rlvr,
    translate_sft,
)
from .translation import Default, Dialect, Translation

PIPELINES = {  # by the trained role
    "sft_train": Pipeline("sft_train", None, translate_sft),
    "student": Pipeline("student", None, translate_distillation),
    "student_train": Pipeline("student_train", "student_infer", translate_on_policy_distillation),
    "actor_train": Pipeline("actor_train", "actor_infer", translate_rlvr),
}
PREFERENCES = Pipeline("actor_train", None, translate_dpo)
GENERATES = ("actor_infer", "rewards", "rollout_batch_size")  # keys of the one pipeline with actor_train that generates
TRACKERS = {"wandb": "wandb", "swanlab": "swanlab"}  # track_with -> beginning of flags


def _compute(keys: Keys, translation: Translation) -> None:
    is_agentic = _refuse_environments(keys, translation)
    pipeline = next((pipeline for role, pipeline in PIPELINES.items() if keys.under(role)), PREFERENCES)
    if pipeline.trained == "actor_train" and not any(keys.under(name) for name in GENERATES):
        pipeline = PREFERENCES
    refused = list(translation.refused)
    pipeline.translate(keys, translation, pipeline)
    if is_agentic:
        translation.refused = refused  # without environments the other errors are of no use
    _set_run(keys, translation)
    _set_tracking(keys, translation)


def _refuse_environments(keys: Keys, translation: Translation) -> bool:
    """Refuse an agentic pipeline, one line for each key of the root. Return whether it is one."""
    for name in AGENTIC_TABLES:
        leaves = keys.under(name)
        if leaves:
            translation.refuse(keys, leaves[0], f"{AGENTIC_TEXT}, or remove {name}")
            keys.drop(name)
    for name in AGENTIC_KEYS:
        if name in keys:
            translation.refuse(keys, name, f"{AGENTIC_TEXT}, or remove it")
    return bool(translation.refused)


def _set_run(keys: Keys, translation: Translation) -> None:
    for item in keys.items("defaults"):
        name = str(item).partition("@")[0]
        if name != "_self_":
            translation.refuse(
                keys, "defaults", f"{name}: there is no such file beside {keys.file}. Write its keys here"
            )
    upload = "checkpoint_config.output_dir"
    if upload in keys:
        translation.set("output_dir", keys.take(upload), keys.source(upload))
        if "output_dir" in keys:
            translation.note(keys, "output_dir", f"everything is in {upload}")
    else:
        folder = keys.take("output_dir", "./output")
        translation.set("output_dir", folder, translation.source(keys, "output_dir"))
    key = "system_envs.USE_MODELSCOPE"
    if key in keys:
        translation.set("use_hf", str(keys.take(key)) in ("0", "false", "False"), keys.source(key))
    kept = keys.integer("max_ckpt_to_keep", 0)
    if kept > 0:
        translation.set("save_total_limit", kept, keys.source("max_ckpt_to_keep"))
    elif "max_ckpt_to_keep" in keys:
        translation.ignore(keys, "max_ckpt_to_keep", "all are kept")
    key = "resume_from_checkpoint"
    checkpoint = keys.take(key)
    if checkpoint is True or str(checkpoint).lower() == "true":
        translation.set(key, "auto", keys.source(key))
    elif checkpoint is False or str(checkpoint).lower() == "false":
        translation.ignore(keys, key, "a new run")
    elif checkpoint is not None:
        translation.set(key, checkpoint, keys.source(key))


def _set_tracking(keys: Keys, translation: Translation) -> None:
    tracker = str(keys.peek("track_with") or "tensorboard")
    view, prefix = keys.view("tracker_kwargs"), TRACKERS.get(tracker)
    if "log_dir" in view and tracker == "tensorboard":
        translation.set("tensorboard_dir", view.take("log_dir"), view.source("log_dir"))
    if prefix and "project" in view:
        translation.set(f"{prefix}_project", view.take("project"), view.source("project"))
    key = "tracker_kwargs.name" if "name" in view else "exp_name"
    if prefix and key in keys:
        translation.set(f"{prefix}_exp_name", keys.take(key), keys.source(key))
    for key in ("exp_name", "tracker_kwargs.log_dir", "tracker_kwargs.project", "tracker_kwargs.name"):
        if key in keys and key in keys.untaken():
            translation.ignore(keys, key, f"not read with track_with {tracker}")


DEFAULTS = {
    "use_hf": Default(True, "model_download_type"),
    "lr": Default(5e-5, "training_args.learning_rate"),
    "lr_decay_style": Default("linear", "training_args.lr_scheduler_type"),
    "weight_decay": Default(0.0, "training_args.weight_decay"),
    "adam_beta1": Default(0.9, "training_args.adam_beta1"),
    "adam_beta2": Default(0.999, "training_args.adam_beta2"),
    "clip_grad": Default(1.0, "max_grad_norm"),
    "logging_steps": Default(1, "logging_steps"),
}
ROLL = Dialect("ROLL", ROWS, _compute, DEFAULTS)
