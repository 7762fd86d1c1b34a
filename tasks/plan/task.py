"""Work of a task beside training the model: a reference model, forward passes without gradients, a score head."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...bridge.option_groups import compose
from ..options import (
    CausalLmOptions,
    CpoOptions,
    DpoOptions,
    GrpoOptions,
    KtoOptions,
    OrpoOptions,
    PlanOptions,
    PtOptions,
    RerankerOptions,
    RmOptions,
    SeqClsOptions,
    SftOptions,
    SimpoOptions,
)
from ..options.further_models import PrecomputeOptions, ReferenceOptions
from ..options.rollout import engine_kind
from .parameters import ModelParameters, Parameters

NEXT_TOKENS = PtOptions, CausalLmOptions  # tasks that are planned on images too, and by measured activations
RLHF = DpoOptions, OrpoOptions, CpoOptions, SimpoOptions, KtoOptions, RmOptions, GrpoOptions
PLANNED = *NEXT_TOKENS, SeqClsOptions, RerankerOptions, *RLHF
OPTIONS_BY_TYPE = {task.__dataclass_fields__["rlhf_type"].default: task for task in RLHF}
PLANNED_REFERENCE = "offload_ref_model", "precompute_ref_log_probs"


@dataclass(frozen=True)
class TaskWork:
    """Work of a task in a step, beside training the model.

    reference: where the weights of a second model are during training
    forwards: forward passes over a micro batch beside the one of training
    """

    reference: Literal["none", "kept", "offloaded"] = "none"
    forwards: int = 0
    outputs: int | None = None  # size of a score head in place of the output layer
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
        outputs = 1 if options.scores_documents else None
        if isinstance(options, SeqClsOptions):
            outputs = options.num_labels or 1  # those of a checkpoint's head are as small
        is_padded = isinstance(options, GrpoOptions) and options.data.packing
        completions = options.training.global_batch_size if is_padded else None
        return cls(place, forwards, outputs, 2 if options.stage == "preference" else 1, completions)

    def of_parameters(self, parameters: ModelParameters, hidden_size: int) -> ModelParameters:
        """Return the parameters of a model of the task, of a language model's."""
        if self.outputs is None:
            return parameters
        output = Parameters(replicated=parameters.output.replicated + self.outputs * hidden_size)
        return replace(parameters, output=output, tied=False)


SFT = TaskWork()


def task_of(plan: PlanOptions) -> TaskWork:
    """Return the work of the task of `megatron plan`. Raises ValueError for a flag that it lacks."""
    if plan.beta is not None and plan.rlhf_type != "grpo":
        raise ValueError("--beta: planned for --rlhf_type grpo alone. Remove it, or set that")
    if plan.rlhf_type is None:
        return SFT
    flags = {} if plan.beta is None else {"beta": plan.beta}
    options = compose(OPTIONS_BY_TYPE[plan.rlhf_type], tuner_type=plan.tuner_type, **flags)
    return replace(TaskWork.of(options), completions=None)  # the plan's batch is of packs


def unplanned_task_flags(options: SftOptions) -> Iterator[str]:
    """Yield the flags of a task by which further models take memory that is not planned."""
    if isinstance(options, GrpoOptions):
        if options.teacher.teacher_model or options.teacher.mcore_teacher_model:
            yield "--teacher_model"
        kind = engine_kind(options.engine)
        if kind == "transformers":
            yield "generation by transformers (--use_vllm false)"
        if kind == "vllm" and options.engine.sleep_level == 0:
            yield "--sleep_level 0"
    if isinstance(options, RerankerOptions) and not options.data.packing:
        yield f"--task_type {options.task_type} without --packing true"  # the data has the number of documents
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
