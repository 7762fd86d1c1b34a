"""ROLL's pipelines: each sets its flags in the order in which they depend on each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .keys import Keys, general
from .roll_data import set_columns, set_data, set_evaluation, set_teacher_model
from .roll_rewards import ignore_domains, set_domains, set_rewards
from .roll_rl import (
    RolloutSteps,
    set_algorithm,
    set_estimator,
    set_generation,
    set_length,
    set_lengths,
    set_sampling,
)
from .roll_roles import set_critic, set_engine, set_frozen, set_placement, set_step, set_trained
from .roll_task_rows import REWARDS
from .translation import Translation, find_row

OBJECTIVES = {"forward_kl": 0.0, "js_divergence": 0.5, "reverse_kl": 1.0}  # kd_objective -> --beta
ONE_STEP = RolloutSteps(1, 1)
# Settings of the policy loss, which distillation on the student's completions does not have, with neutral values.
POLICY_LOSS: dict[str, tuple[Any, ...]] = {
    "whiten_advantages": (False,), "advantage_clip": (), "reward_clip": (), "max_len_mask": (False,),
    "difficulty_mask": (False,), "dual_clip_loss": (False,), "entropy_loss_coef": (0,), "use_kl_loss": (),
}  # fmt: skip
OVERWRITTEN = (  # by ROLL, or read with the settings above alone
    "adv_estimator", "gamma", "lambd", "critic_warmup", "use_kl_loss", "kl_loss_coef", "add_token_level_kl",
    "init_kl_coef", "target_kl", "kl_horizon", "kl_penalty", "value_clip", "norm_mean_type", "norm_std_type",
    "difficulty_low_threshold", "difficulty_high_threshold", "pg_clip", "pg_clip_low", "pg_clip_high",
    "use_pg_clip_range", "loss_agg_mode", "reward_pretrain", "async_generation_ratio", "rollout_dump_dir",
)  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of ROLL."""

    trained: str  # role whose settings are those of the run
    engine: str | None
    translate: Callable[[Keys, Translation, "Pipeline"], None]


def set_model(keys: Keys, translation: Translation, role: str, pretrain: str) -> None:
    role_key = f"{role}.model_args.model_name_or_path"
    key = role_key if role_key in keys else pretrain
    model = keys.take(key)
    keys.take(role_key)
    keys.take(pretrain)
    if model is None:
        translation.refused.append(f"{pretrain}: missing. Set it to the model to train")
    else:
        translation.set("model", model, keys.source(key))


def translate_rlvr(keys: Keys, translation: Translation, pipeline: Pipeline) -> None:
    """Translate reinforcement learning with verifiable rewards."""
    role, engine = pipeline.trained, pipeline.engine or "actor_infer"
    set_model(keys, translation, role, "pretrain")
    set_estimator(keys, translation)
    has_critic = translation.flags["rlhf_type"] == "ppo"
    has_teacher = keys.boolean("use_opd", False)
    placement = set_placement(
        keys, translation, role, engine=engine, beside=("critic", "reference", "teacher"), trains=has_critic
    )  # fmt: skip
    step = set_step(keys, translation, role, placement.processes)
    set_trained(keys, translation, role)
    lengths = set_lengths(keys, translation)
    generation = set_generation(keys, translation, step)
    set_algorithm(keys, translation, generation)
    set_sampling(keys, translation, engine, generation.completions, lengths[1])
    set_engine(keys, translation, engine, role, placement, lengths)
    _set_reference(keys, translation, role)
    set_critic(keys, translation, role, step, is_used=has_critic)
    if "reward_pretrain" in keys and not has_critic:
        translation.ignore(keys, "reward_pretrain", "rules need no model")
    _set_teacher(keys, translation, role, is_used=has_teacher)
    domains = set_rewards(keys, translation)
    set_data(keys, translation, role)
    set_domains(keys, translation, role, domains)
    set_columns(keys, translation, {})
    set_evaluation(keys, translation, generation, completion_length=lengths[1])
    _set_generation_switches(keys, translation, placement.mode)
    _note_epochs(keys, translation, role)


def _set_reference(keys: Keys, translation: Translation, role: str) -> None:
    is_used = bool(translation.flags.get("beta"))
    set_frozen(keys, translation, "reference", role, is_used=is_used, has_flags=True)
    key = "reference.model_args.model_name_or_path"
    if key in keys and is_used and keys.peek(key) != translation.flags.get("model"):
        translation.set("ref_model", keys.take(key), keys.source(key))
    elif key in keys:
        translation.ignore(keys, key, "the initial model is the reference" if is_used else "there is no reference")


def _set_teacher(keys: Keys, translation: Translation, role: str, *, is_used: bool) -> None:
    set_frozen(keys, translation, "teacher", role, is_used=is_used, has_flags=True)
    key = "teacher.opd_kl_coef"
    if is_used:
        set_teacher_model(keys, translation)
        translation.set("teacher_kl_coef", keys.number(key, 1.0), translation.source(keys, key))
        return
    for key in ("teacher.opd_kl_coef", "teacher.model_args.model_name_or_path"):
        if key in keys:
            translation.ignore(keys, key, "read with use_opd alone")


def _set_generation_switches(keys: Keys, translation: Translation, mode: str) -> None:
    if keys.take("rollout_dump_dir") is not None:
        translation.set("log_completions", True, keys.source("rollout_dump_dir"))
    key = "async_generation_ratio"
    ratio = keys.number(key, 0.0)
    if ratio == 0:
        if key in keys:
            translation.ignore(keys, key, "completions are drawn by the newest weights")
        return
    if ratio != 1:
        translation.refuse(keys, key, "at most one generation is drawn ahead. Set 1, or 0")
    elif mode == "colocate":
        text = "needs engines apart: give actor_infer.device_mapping GPUs that do not train, or set 0"
        translation.refuse(keys, key, text)
    else:
        translation.set("async_generate", True, keys.source(key))


def translate_sft(keys: Keys, translation: Translation, pipeline: Pipeline) -> None:
    """Translate supervised fine-tuning."""
    role = pipeline.trained
    translation.command = "sft"
    set_model(keys, translation, role, "pretrain")
    placement = set_placement(keys, translation, role, engine=None, beside=("validation",), trains=False)
    set_step(keys, translation, role, placement.processes)
    set_trained(keys, translation, role)
    _set_sequence_length(keys, translation)
    _set_epochs(keys, translation, role)
    set_data(keys, translation, role)
    ignore_domains(keys, translation, role)
    for flag in ("dataset_shuffle", "train_dataloader_shuffle"):
        translation.set(flag, False, "ROLL's SFT pipeline does not shuffle")
    names = {"system_key": "system", "prompt_key": "instruction", "query_key": "input", "response_key": "output"}
    set_columns(keys, translation, names)
    set_evaluation(keys, translation, ONE_STEP)


def translate_dpo(keys: Keys, translation: Translation, pipeline: Pipeline) -> None:
    """Translate direct preference optimization."""
    role = pipeline.trained
    translation.set("rlhf_type", "dpo", "the roles actor_train and reference alone")
    set_model(keys, translation, role, "pretrain")
    placement = set_placement(keys, translation, role, engine=None, beside=("reference",), trains=False)
    set_step(keys, translation, role, placement.processes)
    set_trained(keys, translation, role)
    translation.set("beta", keys.number("beta", 0.1), translation.source(keys, "beta"))
    smoothing = keys.number("label_smoothing", 0.0)
    translation.set("label_smoothing", smoothing, translation.source(keys, "label_smoothing"))
    set_frozen(keys, translation, "reference", role, is_used=True, has_flags=False)
    key = "reference.model_args.model_name_or_path"
    if key in keys:
        translation.set("ref_model", keys.take(key), keys.source(key))
    _set_sequence_length(keys, translation)
    set_length(keys, translation, ONE_STEP)
    _note_epochs(keys, translation, role)
    set_data(keys, translation, role)
    ignore_domains(keys, translation, role)
    set_columns(keys, translation, {"chosen_key": "chosen", "rejected_key": "rejected"}, {"instruction": "prompt"})
    set_evaluation(keys, translation, ONE_STEP)


def translate_distillation(keys: Keys, translation: Translation, pipeline: Pipeline) -> None:
    """Translate distillation on the answers of the data."""
    role = pipeline.trained
    source = "the role student: the data's answers"
    translation.set("rlhf_type", "gkd", source)
    translation.set("lmbda", 0.0, source)
    set_model(keys, translation, role, "student_pretrain")
    set_teacher_model(keys, translation)
    placement = set_placement(keys, translation, role, engine=None, beside=("teacher",), trains=False)
    set_step(keys, translation, role, placement.processes)
    set_trained(keys, translation, role)
    set_frozen(keys, translation, "teacher", role, is_used=True, has_flags=True)
    _set_sequence_length(keys, translation)
    translation.set("truncation_strategy", "right", "ROLL cuts off what is beyond sequence_length")
    _set_epochs(keys, translation, role)
    _set_divergence(keys, translation)
    set_data(keys, translation, role)
    ignore_domains(keys, translation, role)
    set_columns(keys, translation, {"question_key": "question", "answer_key": "answer"})
    set_evaluation(keys, translation, ONE_STEP)


def _set_divergence(keys: Keys, translation: Translation) -> None:
    objective = keys.text("kd_objective", "forward_kl")
    if objective in OBJECTIVES:
        translation.set("beta", OBJECTIVES[objective], translation.source(keys, "kd_objective"))
    else:
        translation.refuse(keys, "kd_objective", f"choose one of {', '.join(OBJECTIVES)}")
    top = keys.integer("logits_topk", 64)
    if top:
        translation.set("gkd_logits_topk", top, translation.source(keys, "logits_topk"))
    else:
        translation.ignore(keys, "logits_topk", "all tokens, as by default")
    temperatures = [keys.number(name, 1.0) for name in ("kd_temperature", "teacher_temperature")]
    translation.set("temperature", temperatures[0], translation.source(keys, "kd_temperature"))
    if temperatures[0] != temperatures[1]:
        text = "teacher and student have one temperature. Set teacher_temperature to the same"
        translation.refuse(keys, "teacher_temperature", text)
    key = "distill_loss_weight"
    weight = keys.number(key, 0.5)
    if not 0 < weight <= 1:
        translation.refuse(keys, key, "must be above 0, and at most 1. Use the SFT pipeline for 0")
        return
    if weight < 1:
        translation.set("sft_alpha", (1 - weight) / weight, f"{translation.source(keys, key)} w: (1 - w) / w")
        text = f"the loss is ROLL's divided by {weight:g}, and --clip_grad is, too: with Adam the same steps"
        if key in keys:
            translation.note(keys, key, text)
    clip = keys.number("max_grad_norm", 0.0)
    source = f"{translation.source(keys, 'max_grad_norm')} / distill_loss_weight {weight:g}"
    translation.set("clip_grad", clip / weight, source)


def translate_on_policy_distillation(keys: Keys, translation: Translation, pipeline: Pipeline) -> None:
    """Translate distillation on the student's completions."""
    role, engine = pipeline.trained, pipeline.engine or "student_infer"
    source = "the role student_train: the student's completions, and the reverse KL divergence"
    for flag, value in (("rlhf_type", "gkd"), ("lmbda", 1.0), ("beta", 1.0)):
        translation.set(flag, value, source)
    if keys.boolean("is_pure_opd", True) is False:
        translation.refuse(keys, "is_pure_opd", "student_train asks for it. Set true")
    elif "is_pure_opd" in keys:
        translation.ignore(keys, "is_pure_opd", "as student_train says")
    set_model(keys, translation, role, "pretrain")
    set_teacher_model(keys, translation)
    placement = set_placement(keys, translation, role, engine=engine, beside=("teacher",), trains=False)
    step = set_step(keys, translation, role, placement.processes)
    set_trained(keys, translation, role)
    lengths = set_lengths(keys, translation)
    generation = set_generation(keys, translation, step)
    set_sampling(keys, translation, engine, generation.completions, lengths[1])
    set_engine(keys, translation, engine, role, placement, lengths)
    set_frozen(keys, translation, "teacher", role, is_used=True, has_flags=True)
    if generation.steps > 1:
        text = f"a generation has {generation.steps} steps, and distillation draws for each. Set them to 1"
        translation.refuse(keys, "rollout_batch_size", text)
    if generation.completions > 1:
        text = f"one completion of each of {step.batch} prompts is drawn for a step, as many completions as there"
        translation.note(keys, "num_return_sequences_in_group", text)
    key = "teacher.opd_kl_coef"
    if keys.number(key, 1.0) != 1:
        translation.refuse(keys, key, "the divergence is the whole loss. Set 1")
    elif key in keys:
        translation.ignore(keys, key, "the divergence is the whole loss")
    _ignore_policy_loss(keys, translation)
    set_data(keys, translation, role)
    set_domains(keys, translation, role, [])
    set_columns(keys, translation, {})
    set_evaluation(keys, translation, generation)
    _note_epochs(keys, translation, role)


def _ignore_policy_loss(keys: Keys, translation: Translation) -> None:
    why = "the loss is the divergence from the teacher"
    for key in OVERWRITTEN:
        if key in keys:
            translation.ignore(keys, key, why)
    for key, neutral in POLICY_LOSS.items():
        if key not in keys or key in OVERWRITTEN:
            continue
        if keys.peek(key) in neutral:
            translation.ignore(keys, key, why)
        else:
            translation.refuse(keys, key, f"{why}, which has none. Remove it")
    rows = {row.key: row for row in REWARDS}
    for key in keys.under("rewards"):
        if find_row(general(key), rows):
            translation.ignore(keys, key, "pure distillation logs rewards, and learns nothing from them")


def _note_epochs(keys: Keys, translation: Translation, role: str) -> None:
    key = f"{role}.training_args.num_train_epochs"
    if key in keys:
        translation.note(keys, key, f"max_steps {keys.peek('max_steps') or 500} ends the run")


def _set_sequence_length(keys: Keys, translation: Translation) -> None:
    length = keys.integer("sequence_length")
    if length is None:
        translation.refused.append("sequence_length: missing. Set the longest sample in tokens")
    else:
        translation.set("max_length", length, keys.source("sequence_length"))


def _set_epochs(keys: Keys, translation: Translation, role: str) -> None:
    """Set the epochs of a pipeline that does not read max_steps."""
    key = f"{role}.training_args.num_train_epochs"
    translation.set("num_train_epochs", keys.number(key, 1.0), translation.source(keys, key))
    steps = keys.integer("save_steps", 50)
    translation.set("save_steps", steps, translation.source(keys, "save_steps"))
    if "max_steps" in keys:
        translation.ignore(keys, "max_steps", "ROLL trains for num_train_epochs here")
