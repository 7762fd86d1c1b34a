"""What a teacher cannot be: which one it is, behind a server or in a layout of its own."""

import re
from math import lcm

from ...tasks.options import GkdOptions
from ...tasks.rollout.addresses import check_address
from ...tasks.run.planning import ProcessLayout, length_multiple, teacher_layout
from ..flags import UsageError, show
from .generation import check_key

SIZES = "tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"  # teacher_<size>_parallel_size


def check_teacher(options: GkdOptions, processes: int) -> str | None:
    """The flag that names the teacher's folder, as typed; None of one behind a server. Raises UsageError."""
    names = "teacher_model", "mcore_teacher_model", "teacher_model_server"
    models = [f"--{name} {value}" for name in names if (value := getattr(options, name))]
    if not models:
        raise UsageError(
            "--teacher_model is needed: the folder, or the hub id, of the model that the student learns from. Or give "
            "the address of a server that has it, as --teacher_model_server."
        )
    if len(models) > 1:
        raise UsageError(f"{models[0]} and {models[1]}: give one of them.")
    if options.teacher_model_server:
        _server(options, models[0])
        return None
    if options.teacher_model_server_api_key:
        raise UsageError("--teacher_model_server_api_key is for --teacher_model_server. Leave it out.")
    if options.seq_kd and options.mcore_teacher_model:
        raise UsageError(
            f"--seq_kd true cannot be with {models[0]}, from which nothing generates. Give --teacher_model."
        )
    _layout(options, processes)
    return models[0]


def of_teacher(text: str) -> str:
    """A text of flags of the layout, as one of the teacher's."""
    return re.sub(rf"--({'|'.join(SIZES)})_parallel_size", r"--teacher_\1_parallel_size", text)


def _server(options: GkdOptions, given: str) -> None:
    check_key("teacher_model_server_api_key", options.teacher_model_server_api_key)
    try:
        check_address("--teacher_model_server", options.teacher_model_server or "")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.gkd_logits_topk is None:
        raise UsageError(
            f"{given} needs --gkd_logits_topk: a server tells of the likeliest tokens alone. Give as many as are to be "
            "compared, 64 say."
        )
    for name in ("offload_teacher_model", *(f"teacher_{size}_parallel_size" for size in SIZES)):
        if value := getattr(options, name):
            raise UsageError(f"--{name} {show(value)} cannot be with {given}, where the teacher is. Leave it out.")


def _layout(options: GkdOptions, processes: int) -> None:
    for size in SIZES:
        if (value := getattr(options, f"teacher_{size}_parallel_size")) is not None and value < 1:
            raise UsageError(f"--teacher_{size}_parallel_size {value}: must be at least 1.")
    own = teacher_layout(options)
    if own is None:
        return
    layout = ProcessLayout.of(own, processes)
    for product, sizes in (
        (layout.tensor * layout.pipeline * layout.context, ("tensor_model", "pipeline_model", "context")),
        (layout.expert * layout.expert_tensor * layout.pipeline, ("expert_model", "expert_tensor", "pipeline_model")),
    ):
        if processes % product:
            flags = " x ".join(f"--teacher_{size}_parallel_size" for size in sizes)
            raise UsageError(
                f"{flags} = {product}: does not divide the number of processes, {processes}. What is left out is the "
                "student's: give sizes that divide."
            )
    unit = lcm(2 * layout.context if layout.context > 1 else 1, layout.context * length_multiple(own))
    if options.packing and options.packing_length and options.packing_length % unit:
        raise UsageError(
            f"--packing_length {options.packing_length}: does not divide by {unit}, over which the teacher's processes "
            f"(--teacher_tensor_model_parallel_size, --teacher_context_parallel_size) split a pack. Give a multiple."
        )
