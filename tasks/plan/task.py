"""Work of a task beside training the model: other models, forward passes without gradients, a score head."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...bridge.option_groups import compose
from ..options import (
    CausalLmOptions,
    CpoOptions,
    DpoOptions,
    EmbeddingOptions,
    GenerativeRerankerOptions,
    GkdOptions,
    GrpoOptions,
    KtoOptions,
    OrpoOptions,
    PlanOptions,
    PpoOptions,
    PtOptions,
    RerankerOptions,
    RmOptions,
    SeqClsOptions,
    SftOptions,
    SimpoOptions,
)
from ..options.further_models import CriticOptions, PrecomputeOptions, ReferenceOptions, TeacherOptions
from ..options.rollout import engine_kind
from .parameters import ModelParameters, Parameters

NEXT_TOKENS = PtOptions, CausalLmOptions  # tasks that are planned on images too, and by measured activations
RLHF = DpoOptions, OrpoOptions, CpoOptions, SimpoOptions, KtoOptions, RmOptions, GrpoOptions, PpoOptions, GkdOptions
GROUPED = EmbeddingOptions, RerankerOptions, GenerativeRerankerOptions  # tasks whose samples have several documents
OPTIONS_BY_TYPE = {task.__dataclass_fields__["rlhf_type"].default: task for task in RLHF}
PLANNED_REFERENCE = "offload_ref_model", "precompute_ref_log_probs"


@dataclass(frozen=True)
class Distillation:
    """Comparison of the model's distributions with a teacher's."""

    top: int | None = None  # likeliest tokens of the teacher, which are compared; None: all tokens
    adds_likelihood: bool = False  # the loss has the cross entropy of answers too


@dataclass(frozen=True)
class TaskWork:
    """Work of a task in a step, beside training the model.

    reference: where the weights of a reference model are during training
    forwards: forward passes over a micro batch beside the one of training
    """

    reference: Literal["none", "kept", "offloaded"] = "none"
    forwards: int = 0
    outputs: int | None = None  # size of a score head in place of the output layer
    scores_tokens: bool = True  # computes log-probabilities of all tokens
    distillation: Distillation | None = None
    documents: int = 1  # the number in a sample that is not packed
    completions: int | None = None  # number in a step whose packs a run pads to its layout; None: nothing is padded

    @classmethod
    def of(cls, options: SftOptions) -> "TaskWork":
        """Return the work of a run's task."""
        reference: ReferenceOptions | None = getattr(options, "reference", None)
        forwards, place = 1, "kept"
        if reference is None or getattr(options, "reference_free", False) or not getattr(options, "beta", True):
            forwards = 0
        elif isinstance(reference, PrecomputeOptions) and reference.precompute_ref_log_probs:
            forwards = 0  # it is released before gradients and the optimizer's state exist
        elif reference.offload_ref_model:
            place = "offloaded"
        if not forwards or (options.tuner.has_adapters and not (reference and reference.is_separate)):
            place = "none"  # otherwise adapters are switched off
        if isinstance(options, KtoOptions) and options.loss_type == "kto":
            forwards = 2 * forwards + 1  # mismatched answers too, by the reference and by the model
        if isinstance(options, GrpoOptions):
            forwards += options.records_old_log_probs + (options.policy.loss_type == "real")
            forwards += options.policy.top_entropy_quantile < 1
        outputs = 1 if options.scores_documents else None
        if isinstance(options, SeqClsOptions):
            outputs = options.num_labels or 1  # those of a checkpoint's head are as small
        distillation = None
        if isinstance(options, GkdOptions):
            distillation = Distillation(options.teacher.gkd_logits_topk, options.sft_alpha > 0)
        is_padded = counts_documents(options) and options.data.packing
        return cls(
            place,
            forwards,
            outputs,
            outputs is None and not isinstance(options, GROUPED),
            distillation,
            2 if options.stage == "preference" else 1,
            options.training.global_batch_size if is_padded else None,
        )

    def of_parameters(self, parameters: ModelParameters, hidden_size: int) -> ModelParameters:
        """Return the parameters of a model of the task, of a language model's."""
        if self.outputs is None:
            return parameters
        output = Parameters(replicated=parameters.output.replicated + self.outputs * hidden_size)
        return replace(parameters, output=output, tied=False)


SFT = TaskWork()
CRITIC = TaskWork(forwards=1, outputs=1, scores_tokens=False)  # its forward pass is of the values
TEACHER = TaskWork()


def counts_documents(options: SftOptions) -> bool:
    """Return whether --global_batch_size counts documents, such as completions, with packing too."""
    return isinstance(options, GrpoOptions | GkdOptions)


def task_of(plan: PlanOptions) -> TaskWork:
    """Return the work of the task of `megatron plan`. Raises ValueError for a flag that it lacks."""
    if plan.beta is not None and plan.rlhf_type not in ("grpo", "ppo"):
        raise ValueError("--beta: planned for --rlhf_type grpo and ppo alone. Remove it, or set one of them")
    if (plan.rlhf_type == "gkd") != (plan.teacher_model is not None):
        raise ValueError("--rlhf_type gkd and --teacher_model need each other. Set or remove both")
    if plan.rlhf_type is None:
        return SFT
    flags = {} if plan.beta is None else {"beta": plan.beta}
    options = compose(OPTIONS_BY_TYPE[plan.rlhf_type], tuner_type=plan.tuner_type, **flags)
    return replace(TaskWork.of(options), completions=None)  # the plan's batch is of packs


def unplanned_task_flags(options: SftOptions) -> Iterator[str]:
    """Yield the flags of a task by which further models take memory that is not planned."""
    if isinstance(options, GrpoOptions | GkdOptions) and options.rolls_out:
        kind = engine_kind(options.engine)
        if kind == "transformers":
            yield "generation by transformers (--use_vllm false)"
        if kind == "vllm" and options.engine.sleep_level == 0:
            yield "--sleep_level 0"
    if isinstance(options, GROUPED) and not options.data.packing:
        yield f"--task_type {options.task_type} without --packing true"  # the data has the number of documents
    if isinstance(options, GrpoOptions) and (options.teacher.teacher_model or options.teacher.mcore_teacher_model):
        yield "--teacher_model"
    if isinstance(options, PpoOptions):
        yield from _layout_flags(options.critic)
    if isinstance(options, GkdOptions):
        yield from _unplanned_of_teacher(options)
    reference: ReferenceOptions | None = getattr(options, "reference", None)
    if reference is None or getattr(options, "reference_free", False) or not getattr(options, "beta", True):
        return
    default, trained = type(reference)(), {"ref_model": options.model, "mcore_ref_model": options.mcore_model}
    for name, value in vars(reference).items():
        if value != getattr(default, name) and name not in PLANNED_REFERENCE and value != trained.get(name):
            yield f"--{name}"
    is_precomputed = isinstance(reference, PrecomputeOptions) and reference.precompute_ref_log_probs
    if is_precomputed and reference.is_separate and options.tuner.has_adapters:
        yield "--precompute_ref_log_probs with adapters beside a reference model"
    if TaskWork.of(options).reference != "none" and options.build.fp8_format:
        yield "--fp8_format beside a reference model"


def _unplanned_of_teacher(options: GkdOptions) -> Iterator[str]:
    is_server = bool(options.teacher.teacher_model_server)
    yield from _layout_flags(options.teacher)
    if options.seq_kd and not is_server:
        yield "--seq_kd true with a teacher that generates in the processes"
    if options.build.fp8_format and not is_server:
        yield "--fp8_format beside a teacher"


def _layout_flags(role: CriticOptions | TeacherOptions) -> Iterator[str]:
    """Yield the flags that are set of a layout of a role's own."""
    yield from (f"--{name}" for name, value in vars(role).items() if "_parallel_size" in name and value is not None)
