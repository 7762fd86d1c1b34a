"""Data and evaluations of ROLL's pipelines."""

from collections.abc import Mapping

from ..flags import Scalar
from .keys import Keys
from .roll_rl import RolloutSteps
from .translation import Translation

TEMPLATES = ("native", "qwen2_5", "qwen3")  # the tokenizer's own; qwen3 with enable_thinking
ROLES = (
    "actor_train", "student_train", "sft_train", "student", "actor_infer", "student_infer", "reference", "critic",
    "teacher",
)  # fmt: skip


def set_data(keys: Keys, translation: Translation, role: str) -> None:
    """Set the training data and the chat template."""
    key = f"{role}.data_args.file_name"
    files = [str(name) for name in keys.items(key) if name]
    if files:
        translation.set("dataset", list[Scalar](files), keys.source(key))
    else:
        translation.refused.append(f"{key}: missing. Set one or more files")
    template_key = f"{role}.data_args.template"
    key = "global_template" if "global_template" in keys else template_key
    template = keys.text(key, "native")
    if template not in TEMPLATES:
        text = "only the tokenizer's own chat template. Write it to the model's chat_template.jinja, and set native"
        translation.refuse(keys, key, text)
    elif template == "qwen3":
        translation.set("enable_thinking", True, keys.source(key))
    elif key in keys:
        translation.ignore(keys, key, "the chat template is the tokenizer's own")
    for other in (f"{name}.data_args.template" for name in ROLES):
        if other != key and other in keys:
            translation.ignore(keys, other, f"rows have the template of {key}")


def set_columns(
    keys: Keys, translation: Translation, names: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> None:
    """Set names of columns. names: key -> column here; renamed: columns of ROLL's without a key."""
    names = {
        **names,
        **{
            key: key.rpartition(".")[2]
            for role in ROLES
            for name in ("messages", "tag")
            if (key := f"{role}.data_args.{name}") in keys
        },
    }
    columns = dict(renamed or {})
    sources = []
    for key, column in names.items():
        if key not in keys:
            continue
        name = keys.text(key, column)
        if name == column:
            translation.ignore(keys, key, "the column has this name")
        else:
            columns[name] = column
            sources.append(keys.source(key))
    if columns:
        translation.set("columns", columns, ", ".join(sources) or f"{translation.dialect}'s columns")


def set_evaluation(
    keys: Keys, translation: Translation, generation: RolloutSteps, *, completion_length: int | None = None
) -> None:
    """Set evaluations. completion_length: of evaluations that draw completions."""
    view, files = keys.view("validation"), [str(name) for name in keys.items("validation.data_args.file_name") if name]
    steps = keys.integer("eval_steps", 10)
    stale = keys.integer("validation.eval_steps", steps)
    if stale != steps:
        translation.refuse(keys, "validation.eval_steps", f"ROLL reads eval_steps, {steps}. Set that, and remove this")
    elif "validation.eval_steps" in keys:
        translation.ignore(keys, "validation.eval_steps", "as eval_steps")
    names = ("temperature", "top_p", "top_k", "num_return_sequences", "do_sample", "max_new_tokens")
    sampling = [f"generating_args.{name}" for name in names]
    if not files:
        for key in ("eval_steps", *(f"validation.{name}" for name in sampling)):
            if key in keys:
                translation.ignore(keys, key, "there are no validation.data_args.file_name")
        return
    translation.set("val_dataset", list[Scalar](files), keys.source("validation.data_args.file_name"))
    source = generation.times(translation, keys, "eval_steps")
    translation.set("eval_steps", steps * generation.steps, source)
    translation.set("eval_on_start", True, f"{translation.source(keys, 'eval_steps')}: counted from step 0")
    if completion_length is None:
        for name in sampling:
            if name in view:
                translation.ignore(view, name, "evaluations have a loss")
        return
    _set_sampling(view.view("generating_args"), translation, completion_length)


def _set_sampling(view: Keys, translation: Translation, completion_length: int) -> None:
    if view.boolean("do_sample", True):
        temperature, source = view.number("temperature", 0.95), translation.source(view, "temperature")
    else:
        temperature, source = 0.0, f"{view.source('do_sample')}: greedy"
        view.take("temperature")
    translation.set("eval_temperature", temperature, source)
    translation.set("eval_top_p", view.number("top_p", 0.7), translation.source(view, "top_p"))
    translation.set("eval_top_k", view.integer("top_k", 50), translation.source(view, "top_k"))
    count = view.integer("num_return_sequences", 1)
    translation.set("num_generations_eval", count, translation.source(view, "num_return_sequences"))
    if "max_new_tokens" in view and view.integer("max_new_tokens") != completion_length:
        text = f"ROLL takes the completion length of training, {completion_length}. Set it to this, or remove it"
        translation.refuse(view, "max_new_tokens", text)
    elif "max_new_tokens" in view:
        translation.ignore(view, "max_new_tokens", "as in training")


def set_teacher_model(keys: Keys, translation: Translation) -> None:
    """Set the teacher."""
    teacher = "teacher.model_args.model_name_or_path"
    key = teacher if teacher in keys else "teacher_pretrain"
    model = keys.take(key)
    keys.take("teacher_pretrain")
    if model is None:
        translation.refused.append(f"{key}: missing. Set it to the teacher")
    else:
        translation.set("teacher_model", model, keys.source(key))
