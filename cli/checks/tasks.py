"""Checks of tasks: preferences, heads, embeddings, rerankers, distillation."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from ...bridge.families.sequence_classification import SUFFIX, count_labels
from ...bridge.option_groups import flag_value
from ...tasks.options import (
    CpoOptions,
    DpoOptions,
    EmbeddingOptions,
    GenerativeRerankerOptions,
    GkdOptions,
    GrpoOptions,
    InferOptions,
    KtoOptions,
    OrpoOptions,
    PpoOptions,
    PrecomputeOptions,
    RolloutOptions,
    SeqClsOptions,
    SftOptions,
)
from ...tasks.run.planning import SIZES, ProcessLayout, RoleName, role_layout
from ...templates.formats.schemas import POOLED, UNGROUPED
from ..flags import UsageError, flags_of, show
from ..legacy_flags import FLAG_OF_VARIABLE, VARIABLE_PREFIXES
from .advantages import check_advantages
from .extra_kwargs import check_engine_settings, check_quantization
from .generation import (
    REFERENCE_FLAGS,
    as_flag,
    check_generation,
    check_replay,
    has_teacher,
    is_set_by_user,
    unread_flags,
)
from .lora import adapter_config, adapter_flag, adapter_settings, check_base, check_fits
from .model import HfConfig, check_divisible, count_experts, supported_config
from .plugins import check_plugins
from .roles import check_role_layout, to_role_flags
from .teacher import check_teacher, check_token_advantages
from .vllm_lora import check_vllm_lora

SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")  # DPO losses that read --label_smoothing
DIFFERENCE_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm")
READ_LOSS_SCALE = DpoOptions | OrpoOptions | CpoOptions | KtoOptions | GkdOptions
CRITIC_MODELS = "critic_model", "mcore_critic_model"
WithReference = DpoOptions | KtoOptions | GrpoOptions
# flag -> (flag that selects it, values of that flag with which it is read)
ONLY_WITH = {
    "f_alpha_divergence_coef": ("f_divergence_type", ("alpha_divergence",)),
    "discopop_tau": ("loss_type", ("discopop",)),
    "infonce_temperature": ("loss_type", ("infonce",)),
    "infonce_use_batch": ("loss_type", ("infonce",)),
    "contrastive_margin": ("loss_type", ("contrastive", "online_contrastive")),
    "ref_model_mixup_alpha": ("sync_ref_model", (True,)),
    "ref_model_sync_steps": ("sync_ref_model", (True,)),
    "simpo_gamma": ("loss_type", ("simpo",)),
    "listwise_temperature": ("loss_type", ("listwise_reranker",)),
}


def check_task(
    options: SftOptions, layout: ProcessLayout, model: HfConfig | None, sources: Mapping[str, str]
) -> Iterator[str]:
    """Raise UsageError for unusable options of the task. Yield notes. model: config.json; None if not downloaded yet"""
    _check_head(options, model)
    yield from check_plugins(options)
    _check_channels(options)
    yield from _unneeded_flags(options, sources)
    if options.stage in ("sft", "pt"):
        return
    _check_data(options)
    _check_unread(options, sources)
    match options:
        case GrpoOptions():
            check_generation(options, sources)
            check_advantages(options, sources)
            check_engine_settings(options)
            check_quantization(options, model)
            check_vllm_lora(options, model)
            check_replay(options, model)
            yield from unread_flags(options, sources)
            if has_teacher(options):
                _check_teacher(options, layout)
            yield from _check_reference(options, layout, model)
            _check_reference_layout(options, layout)
            if isinstance(options, PpoOptions):
                _check_critic(options, layout, model)
        case GkdOptions():
            check_generation(options, sources)
            check_engine_settings(options)
            check_quantization(options, model)
            check_vllm_lora(options, model)
            _check_teacher(options, layout)
        case DpoOptions():
            yield from _check_reference(options, layout, model)
            _check_dpo(options)
        case CpoOptions():
            _check_cpo(options)
        case KtoOptions():
            yield from _check_reference(options, layout, model)
        case SeqClsOptions():
            _check_classes(options, model)
        case EmbeddingOptions():
            _check_dimensions(options, model)
        case GenerativeRerankerOptions():
            _check_tokens(options)


def task_flag(options: SftOptions) -> str:
    """Return the flag that selects the task, with its value: --rlhf_type dpo."""
    by = "rlhf_type" if flag_value(options, "rlhf_type", None) else "task_type"
    return f"--{by} {flag_value(options, by)}"


def count_outputs(options: SftOptions, model: HfConfig) -> int | None:
    """Return the number of outputs of the task's head; None without a head."""
    if isinstance(options, SeqClsOptions):
        return options.num_labels or count_labels(model)
    return 1 if options.scores_documents else None


def config_with_head(options: SftOptions, model: HfConfig | None) -> HfConfig | None:
    """Return the model's config.json with the score head that the task adds."""
    labels = None if model is None else count_outputs(options, model)
    if model is None or labels is None or count_labels(model) is not None:
        return model
    return model | {"architectures": [SUFFIX], "num_labels": labels, "id2label": None}


def _check_head(options: SftOptions, model: HfConfig | None) -> None:
    outputs = None if model is None else count_labels(model)
    if model is None or outputs is None:
        return
    flag = f"--mcore_model {options.mcore_model}" if options.mcore_model else f"--model {options.model}"
    expected = count_outputs(options, model)
    if expected is None:
        raise UsageError(
            f"{flag}: has a head of {outputs} outputs instead of an output layer. Set --task_type seq_cls, or use a "
            "causal language model."
        )
    if outputs != expected:
        task = (
            f"--num_labels {expected}" if isinstance(options, SeqClsOptions) else f"{task_flag(options)}, of 1 output"
        )
        raise UsageError(f"{flag}: has a head of {outputs} outputs, not that of {task}. Use a model without a head.")


def _check_critic_head(critic: HfConfig | None, flag: str) -> None:
    if critic is not None and (outputs := count_labels(critic)) not in (None, 1):
        raise UsageError(
            f"{flag}: has a head of {outputs} outputs, and a critic has 1. Use a reward model (--rlhf_type rm), or a "
            "language model."
        )


def check_generates(options: InferOptions | RolloutOptions, model: HfConfig | None) -> None:
    """Raise UsageError for a model or an adapter with a score head, which cannot generate."""
    scoring_flag = f"--model {options.model}" if model is not None and count_labels(model) is not None else ""
    if isinstance(options, InferOptions) and (adapter_config(options) or {}).get("task_type") == "SEQ_CLS":
        scoring_flag = adapter_flag(options)
    if scoring_flag:
        raise UsageError(
            f"{scoring_flag}: has a score head and cannot generate text. Load it with transformers' "
            "AutoModelForSequenceClassification."
        )


def _check_channels(options: SftOptions) -> None:
    if not options.data.enable_channel_loss:
        return
    if options.stage not in UNGROUPED:
        raise UsageError(f"--enable_channel_loss true: not for {task_flag(options)}. Remove it: it is of sft and pt.")
    if options.data.streaming:
        raise UsageError(
            "--enable_channel_loss true cannot be used with --streaming true: all channels must be known before. "
            "Remove one of them."
        )


def _check_data(options: SftOptions) -> None:
    kind = task_flag(options)
    if options.build.mtp_num_layers:
        raise UsageError(
            f"--mtp_num_layers {options.build.mtp_num_layers} cannot be used with {kind}: its loss has no multi-token "
            "prediction. Remove it."
        )
    if options.data.streaming and options.stage in ("kto", "embedding"):
        reason = "needs other rows' answers" if options.stage == "kto" else "needs other samples as negatives"
        raise UsageError(
            f"--streaming true cannot be used with {kind}, which {reason}. Remove it: tokens are on disk, not in "
            "memory."
        )


def _check_unread(options: SftOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for an option that the chosen loss or mode does not read."""
    for name, (mode, values) in ONLY_WITH.items():
        selected = flag_value(options, mode, None)
        selected = selected if isinstance(selected, list) else [selected]
        if name in flags_of(type(options)) and _is_changed(name, options, sources) and not {*selected} & {*values}:
            raise UsageError(
                f"{as_flag(name, options)}: only for --{mode} {' or '.join(map(show, values))}, not "
                f"{show(selected)}. Remove it."
            )


def _is_changed(name: str, options: SftOptions, sources: Mapping[str, str]) -> bool:
    """Return whether the user set an option to a value other than its default."""
    return is_set_by_user(name, sources) and flag_value(options, name) != flags_of(type(options))[name].default


def _unneeded_flags(options: SftOptions, sources: Mapping[str, str]) -> Iterator[str]:
    task = "megatron pt" if options.stage == "pt" else task_flag(options)
    reads_loss_scale = options.stage == "sft" or isinstance(options, READ_LOSS_SCALE)
    if not reads_loss_scale and _is_changed("loss_scale", options, sources):
        reasons = {"prompts": "trains on completions", "pt": "trains on whole texts"}
        reason = reasons.get(options.stage, "has no loss per token")
        yield f"--loss_scale {options.data.loss_scale} is not needed: {task} {reason}."
    if options.data.add_non_thinking_prefix and options.stage in ("pt", "prompts", *POOLED):
        yield f"--add_non_thinking_prefix true has no effect: {task} trains on no answers of the data."
    prefixes = VARIABLE_PREFIXES.get(options.stage, ())
    for variable in sorted(name for name in os.environ if name.startswith(prefixes)):
        flag = FLAG_OF_VARIABLE.get(variable)
        if flag is None or flag in flags_of(type(options)):
            fix = f"Set --{flag} {os.environ[variable]}" if flag else "Unset it"
            yield f"{variable}={os.environ[variable]}: environment variable is not read. {fix}."


def _check_dpo(options: DpoOptions) -> None:
    types, weights, smoothing = options.loss_type, options.loss_weights, options.label_smoothing
    flag = f"--loss_type {show(types)}"
    if not types or len({*types}) < len(types):
        raise UsageError(
            f"{flag}: a loss is missing or repeated. Set each once, as in --loss_type sigmoid sft --loss_weights 1 0.5."
        )
    if weights and len(weights) != len(types):
        raise UsageError(
            f"--loss_weights {show(weights)}: {len(weights)} weights for the {len(types)} of {flag}. Set one for each."
        )
    if "exo_pair" in types and not smoothing:
        raise UsageError("--loss_type exo_pair needs --label_smoothing above 0. Set it, as in --label_smoothing 1e-3.")
    if smoothing and not {*types} & {*SMOOTHED_LOSSES}:
        raise UsageError(
            f"--label_smoothing {smoothing}: only for --loss_type {', '.join(SMOOTHED_LOSSES)}, not {flag}. Remove it."
        )
    excluded = [name for name in types if name not in DIFFERENCE_LOSSES]
    if options.f_divergence_type != "reverse_kl" and excluded:
        raise UsageError(
            f"--f_divergence_type {options.f_divergence_type} cannot be used with --loss_type {excluded[0]}: it is for "
            f"losses of the difference of two answers, {', '.join(DIFFERENCE_LOSSES)}. Remove it."
        )


def _check_cpo(options: CpoOptions) -> None:
    smoothed = ("sigmoid", "simpo")
    if options.label_smoothing and options.loss_type not in smoothed:
        raise UsageError(
            f"--label_smoothing {options.label_smoothing}: only for --loss_type {' or '.join(smoothed)}, not "
            f"{options.loss_type}. Remove it."
        )


def _check_reference(options: WithReference, layout: ProcessLayout, model: HfConfig | None) -> Iterator[str]:
    reference = options.reference
    names = [field.name for field in fields(PrecomputeOptions) if flag_value(options, field.name, None)]
    names = [name for name in names if name not in ONLY_WITH]
    models = [as_flag(name, options) for name in names if name in REFERENCE_FLAGS]
    if isinstance(options, DpoOptions) and options.reference_free and names:
        raise UsageError(
            f"{as_flag(names[0], options)} cannot be used with --reference_free true, which has none. Remove one of "
            "them."
        )
    if len(models) > 1:
        raise UsageError(
            f"{models[0]} cannot be used with {models[1]}. Remove one of them. --ref_adapters apply to the trained "
            "model; merge them into another with `swift export --merge_lora true`."
        )
    precomputes = isinstance(reference, PrecomputeOptions) and reference.precompute_ref_log_probs
    if precomputes and options.data.streaming:
        raise UsageError(
            "--precompute_ref_log_probs true cannot be used with --streaming true: it passes over all data first. "
            "Remove one of them."
        )
    if reference.sync_ref_model:
        _check_sync(options, has_reference=bool(models), precomputes=precomputes)
    if reference.offload_ref_model:
        reason = "it is released before training" if precomputes else ""
        if options.tuner.has_adapters and not models:
            reason = "it is the model without its adapters"
        if reason:
            reference.offload_ref_model = False
            yield f"--offload_ref_model true is not needed: {reason}."
    if reference.ref_adapters:
        yield from _check_reference_adapter(options, model)
    elif models:
        _check_reference_model(options, layout, models[0])


def _check_sync(options: WithReference, *, has_reference: bool, precomputes: bool) -> None:
    if precomputes:
        raise UsageError(
            "--sync_ref_model true cannot be used with --precompute_ref_log_probs true, which releases the reference "
            "before training. Remove one of them."
        )
    if options.tuner.has_adapters and not has_reference:
        raise UsageError(
            "--sync_ref_model true cannot be used with --tuner_type lora without --ref_model: the reference is the "
            "frozen base model. Set --ref_model, or remove it."
        )


def _check_reference_adapter(options: WithReference, model: HfConfig | None) -> Iterator[str]:
    """Check the reference's adapter like the policy's, with --ref_adapters in messages."""
    reference_options = replace(options, adapters=options.reference.ref_adapters, mcore_adapter=None)
    try:
        for note in check_base(reference_options, reference_options, model):
            yield note.replace("--adapters", "--ref_adapters")
        settings = adapter_settings(reference_options)
        if settings is not None and model is not None:
            check_fits(settings, model, reference_options, adapter_flag(reference_options))
    except UsageError as error:
        raise UsageError(str(error).replace("--adapters", "--ref_adapters")) from None


def _check_reference_model(options: WithReference, layout: ProcessLayout, flag: str) -> None:
    _check_role_model(options, layout, "ref", flag, options.reference.ref_model, options.reference.mcore_ref_model)


def _check_reference_layout(options: GrpoOptions, layout: ProcessLayout) -> None:
    """Raise UsageError for a layout of a reference that has no weights of its own, or follows the policy's."""
    if role_layout(options, "ref") is None:
        return
    flags = [f"ref_{size}_parallel_size" for size in SIZES]
    flag = next(as_flag(name, options) for name in flags if flag_value(options, name) is not None)
    has_model, reason = bool(options.reference.ref_model or options.reference.mcore_ref_model), ""
    if not options.beta:
        reason = "--beta 0, which has no reference"
    elif options.reference.sync_ref_model:
        reason = "--sync_ref_model true, whose reference is updated shard by shard"
    elif options.tuner.has_adapters and not has_model:
        reason = f"--tuner_type {options.tuner.tuner_type} without --ref_model: the reference is the model itself"
    if reason:
        raise UsageError(f"{flag} cannot be used with {reason}. Remove one of them.")
    check_role_layout(options, "ref", layout.world)
    if not has_model:
        _check_role_model(options, layout, "ref", _model_flag(options), options.model, options.mcore_model)


def _check_critic(options: PpoOptions, layout: ProcessLayout, model: HfConfig | None) -> None:
    """Raise UsageError for options that PPO's advantages exclude, and for a critic that does not fit the policy."""
    check_token_advantages(options, "--rlhf_type ppo")
    check_role_layout(options, "critic", layout.world)
    critic = options.critic
    flags = [f"--{name} {value}" for name in CRITIC_MODELS if (value := getattr(critic, name))]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]}: set one of them.")
    if not flags:
        _check_role_model(options, layout, "critic", _model_flag(options), options.model, options.mcore_model)
        return
    config = _check_role_model(options, layout, "critic", flags[0], critic.critic_model, critic.mcore_critic_model)
    sizes = [(other.get("text_config") or other).get("vocab_size") for other in (config or {}, model or {})]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UsageError(
            f"{flags[0]}: has a vocabulary of {sizes[0]} tokens, and the policy one of {sizes[1]}. Use a critic with "
            "the policy's tokenizer."
        )


def _model_flag(options: SftOptions) -> str:
    return f"--mcore_model {options.mcore_model}" if options.mcore_model else f"--model {options.model}"


def _check_role_model(
    options: SftOptions, layout: ProcessLayout, role: RoleName, flag: str, model: str | None, mcore_model: str | None
) -> HfConfig | None:
    """Check the model of a role in its layout, and return its config.json; None if not downloaded yet."""
    parallel = role_layout(options, role)
    role_options = replace(parallel or options, model=model or "", mcore_model=mcore_model)
    if role == "teacher":  # --rope_scaling is the student's
        role_options = replace(role_options, rope_scaling={}, max_model_len=None)
    sizes = ProcessLayout.of(parallel.build, layout.world) if parallel else layout
    try:
        return _check_model(role_options, sizes, flag, role)
    except UsageError as error:
        raise UsageError(to_role_flags(str(error), role) if parallel else str(error)) from None


def _check_teacher(options: GkdOptions | GrpoOptions, layout: ProcessLayout) -> None:
    flag = check_teacher(options, layout.world)
    if flag is None:  # a server has it
        return
    _check_role_model(
        options, layout, "teacher", flag, options.teacher.teacher_model, options.teacher.mcore_teacher_model
    )


def _check_model(options: SftOptions, layout: ProcessLayout, flag: str, role: RoleName) -> HfConfig | None:
    """Check the model of a role like the policy, with the flags of the role in messages. Return its config.json."""
    try:
        config = supported_config(options)
        if role == "critic":
            _check_critic_head(config, flag)
        else:
            _check_head(options, config)
        if config is not None:
            sizes = layout if count_experts(config) else replace(layout, expert=1, expert_tensor=1)
            check_divisible(options.build, sizes, config)
        return config
    except UsageError as error:
        text = re.sub(
            r"--(mcore_)?(model|adapters)\b", lambda match: f"--{match[1] or ''}{role}_{match[2]}", str(error)
        )
        raise UsageError(text if text.startswith(flag) else f"{flag}: {text}") from None


def _check_classes(options: SeqClsOptions, model: HfConfig | None) -> None:
    labels, problem = options.num_labels, options.problem_type
    if labels is None and model is not None and count_labels(model) is None:
        raise UsageError(
            "--num_labels: missing, and the model has no head yet. Set the number of classes (or of numbers)."
        )
    has_type = labels == 1 or problem or model is None or model.get("problem_type")
    if options.data.streaming and not has_type:
        raise UsageError(
            "--streaming true needs --problem_type, because a stream's labels are unknown. Set it, as in "
            "--problem_type single_label_classification."
        )
    if labels == 1 and problem == "single_label_classification":
        raise UsageError(
            "--num_labels 1 cannot be used with --problem_type single_label_classification: there is one class. Set "
            "2 or more, or --problem_type regression."
        )


def _check_dimensions(options: EmbeddingOptions, model: HfConfig | None) -> None:
    dims, weights = options.mrl_dims, options.mrl_weights
    hidden = None if model is None else (model.get("text_config") or model).get("hidden_size")
    for size in dims:
        if hidden and size > hidden:
            raise UsageError(f"--mrl_dims {size}: the model's vectors have {hidden} dimensions. Set 1 to {hidden}.")
    if len({*dims}) < len(dims):
        raise UsageError(f"--mrl_dims {show(dims)}: a size is repeated. Set each once.")
    if weights and len(weights) != len(dims):
        raise UsageError(
            f"--mrl_weights {show(weights)}: {len(weights)} weights for {len(dims)} of --mrl_dims. Set one for each."
        )


def _check_tokens(options: GenerativeRerankerOptions) -> None:
    for name in ("positive_token", "negative_token"):
        if not getattr(options, name):
            raise UsageError(f'--{name} "": is empty. Set a token of the model, as in --{name} yes.')
    if options.positive_token == options.negative_token:
        raise UsageError(
            f"--positive_token, --negative_token {options.positive_token}: are equal. Set two different tokens."
        )
