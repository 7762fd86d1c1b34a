"""What tasks other than the next token cannot be: preferences, heads, embeddings, rerankers."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from ...bridge.families.sequence_classification import SUFFIX, count_labels
from ...tasks.options import (
    CompletionOptions,
    DpoOptions,
    EmbeddingOptions,
    GenerativeRerankerOptions,
    GkdOptions,
    GrpoOptions,
    InferOptions,
    KtoOptions,
    PrecomputeOptions,
    RerankerOptions,
    RmOptions,
    RolloutOptions,
    SeqClsOptions,
    SftOptions,
)
from ...tasks.run.planning import ProcessLayout, teacher_layout
from ..flags import UsageError, flags_of, show
from ..legacy_flags import VARIABLES, VARIABLES_BEGIN
from .generation import check_generation, check_replay
from .lora import adapter_config, check_base, check_fits, settings_of, source_of
from .model import EXPERTS, check_divisible, known_model
from .teacher import check_teacher, of_teacher
from .vllm_lora import check_alone

SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")  # losses of DPO that read --label_smoothing
OF_DIFFERENCES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm")
WithReference = DpoOptions | KtoOptions | GrpoOptions
REFERENCES = ("ref_model", "mcore_ref_model", "ref_adapters")  # each another reference than the model as it begins
# flag -> the flag, and its values, that have it read
ONLY_WITH = {
    "f_alpha_divergence_coef": ("f_divergence_type", ("alpha_divergence",)),
    "discopop_tau": ("loss_type", ("discopop",)),
    "infonce_temperature": ("loss_type", ("infonce",)),
    "infonce_use_batch": ("loss_type", ("infonce",)),
    "contrastive_margin": ("loss_type", ("contrastive", "online_contrastive")),
    "ref_model_mixup_alpha": ("sync_ref_model", (True,)),
    "ref_model_sync_steps": ("sync_ref_model", (True,)),
    "listwise_temperature": ("loss_type", ("listwise_reranker",)),
}


def check_task(
    options: SftOptions, layout: ProcessLayout, model: dict[str, Any] | None, sources: Mapping[str, str]
) -> Iterator[str]:
    """Raise UsageError for what cannot be; notes for the user. `model`: its raw config.json; None: a hub's."""
    _head(options, model)
    if options.stage in ("sft", "pt"):
        return
    _documents(options)
    if isinstance(options, CompletionOptions):
        check_generation(options, sources)
        check_alone(options, sources, model)
    if isinstance(options, GrpoOptions):
        check_replay(options, model)
    if isinstance(options, GkdOptions):
        _teacher(options, layout)
    _unread(options, sources)
    yield from _needless(options, sources)
    if isinstance(options, WithReference):
        yield from _reference(options, layout, model)
    if isinstance(options, DpoOptions | KtoOptions) and options.beta <= 0:
        raise UsageError(f"--beta {options.beta}: must be above 0.")
    if isinstance(options, DpoOptions):
        _dpo(options)
    elif isinstance(options, SeqClsOptions):
        _classes(options, model)
    elif isinstance(options, EmbeddingOptions):
        _dimensions(options, model)
    elif isinstance(options, GenerativeRerankerOptions):
        _tokens(options)


def kind_of(options: SftOptions) -> str:
    """As one would type it: --rlhf_type dpo."""
    by = "rlhf_type" if hasattr(options, "rlhf_type") else "task_type"
    return f"--{by} {getattr(options, by)}"


def labels_of(options: SftOptions, model: dict[str, Any]) -> int | None:
    """How many outputs the head has that the task trains; None: it trains none."""
    if isinstance(options, SeqClsOptions):
        return options.num_labels or count_labels(model)
    if isinstance(options, RmOptions) or (
        isinstance(options, RerankerOptions) and not isinstance(options, GenerativeRerankerOptions)
    ):
        return 1
    return None


def with_its_head(options: SftOptions, model: dict[str, Any] | None) -> dict[str, Any] | None:
    """The model's raw config.json, as it is with the head that the task trains."""
    labels = None if model is None else labels_of(options, model)
    if model is None or labels is None or count_labels(model) is not None:
        return model
    return model | {"architectures": [SUFFIX], "num_labels": labels, "id2label": None}


def _head(options: SftOptions, model: dict[str, Any] | None) -> None:
    has = None if model is None else count_labels(model)
    if model is None or has is None:
        return
    given = f"--mcore_model {options.mcore_model}" if options.mcore_model else f"--model {options.model}"
    wanted = labels_of(options, model)
    if wanted is None:
        raise UsageError(
            f"{given}: has a head of {has} outputs in the place of its output layer. Give --task_type seq_cls, or a "
            "causal language model."
        )
    if has != wanted:
        asked = f"--num_labels {wanted}" if isinstance(options, SeqClsOptions) else f"{kind_of(options)}, of 1 output"
        raise UsageError(
            f"{given}: has a head of {has} outputs, which is not for {asked}. Give a model without a head."
        )


def check_speaks(options: InferOptions | RolloutOptions, model: dict[str, Any] | None) -> None:
    """Raise UsageError for a model, or an adapter, that scores texts and writes none."""
    scores = f"--model {options.model}" if model is not None and count_labels(model) is not None else ""
    if isinstance(options, InferOptions) and (adapter_config(options) or {}).get("task_type") == "SEQ_CLS":
        scores = source_of(options)
    if scores:
        raise UsageError(
            f"{scores}: has a head in the place of its output layer, so that it gives scores, and no text. Load it by "
            "transformers' AutoModelForSequenceClassification."
        )


def _documents(options: SftOptions) -> None:
    kind = kind_of(options)
    if not options.padding_free:
        raise UsageError(f"--padding_free false cannot be with {kind}: its documents lie end to end. Leave it out.")
    if options.mtp_num_layers:
        raise UsageError(
            f"--mtp_num_layers {options.mtp_num_layers} cannot be with {kind} in this version: layers that predict "
            "further tokens have no part in its loss. Leave it out."
        )
    if options.streaming and options.stage in ("kto", "embedding"):
        others = "prompts with others' answers" if options.stage == "kto" else "texts of other samples as negatives"
        raise UsageError(
            f"--streaming true cannot be with {kind}, which takes {others}. Leave it out: tokens are on the disk, not "
            "in memory."
        )


def _unread(options: SftOptions, sources: Mapping[str, str]) -> None:
    """A flag that was given and that nothing would read."""
    for name, (by, values) in ONLY_WITH.items():
        chosen = getattr(options, by, None)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if name in flags_of(type(options)) and _given(name, options, sources) and not {*chosen} & {*values}:
            raise UsageError(
                f"--{name} {show(getattr(options, name))} is for --{by} {' or '.join(map(show, values))}, not "
                f"{show(chosen)}. Leave it out."
            )


def _given(name: str, options: SftOptions, sources: Mapping[str, str]) -> bool:
    """Whether a flag was given with another value than it would have."""
    changed = getattr(options, name) != flags_of(type(options))[name].default
    return changed and sources.get(name, "default") not in ("default", "derived")


def _needless(options: SftOptions, sources: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(options, DpoOptions | KtoOptions | GkdOptions) and _given("loss_scale", options, sources):
        why = "trains on what it generates" if options.stage == "prompts" else "has no loss of tokens"
        yield f"--loss_scale {options.loss_scale} is not needed: {kind_of(options)} {why}."
    begins = VARIABLES_BEGIN.get(options.stage, ())
    for variable in sorted(name for name in os.environ if name.startswith(begins)):
        flag = VARIABLES.get(variable)
        if flag is None or flag in flags_of(type(options)):
            cure = f"give --{flag} {os.environ[variable]}" if flag else "there is no such flag"
            yield f"{variable}={os.environ[variable]} in the environment is not read: {cure}."


def _dpo(options: DpoOptions) -> None:
    types, weights, smoothing = options.loss_type, options.loss_weights, options.label_smoothing
    asked = f"--loss_type {show(types)}"
    if not types or len({*types}) < len(types):
        raise UsageError(f"{asked}: give each loss once, as in --loss_type sigmoid sft --loss_weights 1 0.5.")
    if weights and len(weights) != len(types):
        raise UsageError(
            f"--loss_weights {show(weights)}: {len(weights)} weights, and {asked} names {len(types)}. Give one for "
            "each."
        )
    if not 0 <= smoothing < 0.5:
        raise UsageError(f"--label_smoothing {smoothing}: must be at least 0 and below 0.5, where labels say nothing.")
    if "exo_pair" in types and not smoothing:
        raise UsageError("--loss_type exo_pair needs --label_smoothing above 0, as in --label_smoothing 1e-3.")
    if smoothing and not {*types} & {*SMOOTHED}:
        raise UsageError(f"--label_smoothing {smoothing} is for --loss_type {', '.join(SMOOTHED)}, not {asked}.")
    other = [name for name in types if name not in OF_DIFFERENCES]
    if options.f_divergence_type != "reverse_kl" and other:
        raise UsageError(
            f"--f_divergence_type {options.f_divergence_type} cannot be with --loss_type {other[0]}: it is for losses "
            f"of the difference of two answers, {', '.join(OF_DIFFERENCES)}. Leave it out."
        )


def _reference(options: WithReference, layout: ProcessLayout, model: dict[str, Any] | None) -> Iterator[str]:
    asked = [field.name for field in fields(PrecomputeOptions) if getattr(options, field.name, None)]
    asked = [name for name in asked if name not in ONLY_WITH]
    written = [f"--{name} {show(getattr(options, name))}" for name in asked]
    models = [text for name, text in zip(asked, written, strict=True) if name in REFERENCES]
    if isinstance(options, DpoOptions) and options.reference_free and asked:
        raise UsageError(f"{written[0]} cannot be with --reference_free true, which has none. Leave one out.")
    if len(models) > 1:
        raise UsageError(
            f"{models[0]} and {models[1]}: give one of them. --ref_adapters are put on the model that is trained; put "
            "them into another's weights by `swift export --merge_lora true`."
        )
    precomputes = getattr(options, "precompute_ref_log_probs", False)  # not of all
    if precomputes and options.streaming:
        raise UsageError(
            "--precompute_ref_log_probs true cannot be with --streaming true: it goes over all data first. Leave one "
            "out."
        )
    if options.sync_ref_model:
        _following(options, bool(models), precomputes=precomputes)
    if options.offload_ref_model:
        needless = "it is let go before training" if precomputes else ""
        if options.tuner_type == "lora" and not models:
            needless = "it is the model without its adapters"
        if needless:
            options.offload_ref_model = False
            yield f"--offload_ref_model true is not needed: {needless}."
    if options.ref_adapters:
        yield from _reference_adapter(options, model)
    elif models:
        _reference_model(options, layout, models[0])


def _following(options: WithReference, apart: bool, *, precomputes: bool) -> None:
    """`apart`: the reference is given."""
    if not 0 < options.ref_model_mixup_alpha <= 1:
        raise UsageError(f"--ref_model_mixup_alpha {options.ref_model_mixup_alpha}: must be above 0 and at most 1.")
    if options.ref_model_sync_steps < 1:
        raise UsageError(f"--ref_model_sync_steps {options.ref_model_sync_steps}: must be at least 1.")
    if precomputes:
        raise UsageError(
            "--sync_ref_model true cannot be with --precompute_ref_log_probs true, which lets the reference go before "
            "training. Leave one out."
        )
    if options.tuner_type == "lora" and not apart:
        raise UsageError(
            "--sync_ref_model true with --tuner_type lora: the reference is the model without its adapters, which does "
            "not change. Give one of its own, --ref_model, or leave it out."
        )


def _reference_adapter(options: WithReference, model: dict[str, Any] | None) -> Iterator[str]:
    """The same checks as of the adapter that a run starts from, their messages with the reference's flag."""
    as_policy = replace(options, adapters=options.ref_adapters, mcore_adapter=None)
    try:
        for note in check_base(as_policy, as_policy, model):
            yield note.replace("--adapters", "--ref_adapters")
        settings = settings_of(as_policy)
        if settings is not None and model is not None:
            check_fits(settings, model, as_policy, source_of(as_policy))
    except UsageError as error:
        raise UsageError(str(error).replace("--adapters", "--ref_adapters")) from None


def _reference_model(options: WithReference, layout: ProcessLayout, given: str) -> None:
    as_policy = replace(options, model=options.ref_model or "", mcore_model=options.mcore_ref_model)
    _another_model(as_policy, layout, given, "ref")


def _teacher(options: GkdOptions, layout: ProcessLayout) -> None:
    given = check_teacher(options, layout.world)
    if given is None:  # a server has it
        return
    apart = teacher_layout(options)
    own, layout = apart or options, ProcessLayout.of(apart, layout.world) if apart else layout
    as_policy = replace(own, model=options.teacher_model or "", mcore_model=options.mcore_teacher_model)
    try:
        _another_model(as_policy, layout, given, "teacher")
    except UsageError as error:
        raise UsageError(of_teacher(str(error)) if apart else str(error)) from None


def _another_model(as_policy: Any, layout: ProcessLayout, given: str, which: str) -> None:
    """The same checks as of the model that is trained, their messages with the flags of `which` model. `given`: as
    typed."""
    try:
        config = known_model(as_policy)
        _head(as_policy, config)
        if config is not None:
            dense = not any(_text(config).get(name) for name in EXPERTS)
            check_divisible(as_policy, replace(layout, expert=1, expert_tensor=1) if dense else layout, config)
    except UsageError as error:
        text = re.sub(
            r"--(mcore_)?(model|adapters)\b", lambda found: f"--{found[1] or ''}{which}_{found[2]}", str(error)
        )
        raise UsageError(text if text.startswith(given) else f"{given}: {text}") from None


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def _classes(options: SeqClsOptions, model: dict[str, Any] | None) -> None:
    labels, problem = options.num_labels, options.problem_type
    if labels is None and model is not None and count_labels(model) is None:
        raise UsageError(
            "--num_labels is needed: the model has no head yet. Give the number of classes (or of numbers)."
        )
    known = labels == 1 or problem or model is None or model.get("problem_type")
    if options.streaming and not known:
        raise UsageError(
            "--streaming true needs --problem_type, as in --problem_type single_label_classification: of a stream it "
            "is not known what its labels are."
        )
    if labels == 1 and problem == "single_label_classification":
        raise UsageError(
            "--num_labels 1 cannot be with --problem_type single_label_classification: there is nothing to choose. "
            "Give 2 or more, or --problem_type regression."
        )


def _dimensions(options: EmbeddingOptions, model: dict[str, Any] | None) -> None:
    dims, weights = options.mrl_dims, options.mrl_weights
    hidden = None if model is None else _text(model).get("hidden_size")
    for size in dims:
        if size < 1 or (hidden and size > hidden):
            raise UsageError(f"--mrl_dims {size}: a vector has {hidden or 'its own'} dimensions. Give 1 to so many.")
    if len({*dims}) < len(dims):
        raise UsageError(f"--mrl_dims {show(dims)}: give each once.")
    if weights and len(weights) != len(dims):
        raise UsageError(
            f"--mrl_weights {show(weights)}: {len(weights)} weights, and --mrl_dims names {len(dims)}. Give one for "
            "each."
        )


def _tokens(options: GenerativeRerankerOptions) -> None:
    for name in ("positive_token", "negative_token"):
        if not getattr(options, name):
            raise UsageError(f"--{name} is empty: give a token of the model, as in --{name} yes.")
    if options.positive_token == options.negative_token:
        raise UsageError(f"--positive_token, --negative_token {options.positive_token}: give two that differ.")
