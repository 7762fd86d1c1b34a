"""Checks of a teacher: its model, server and layout."""

from ...tasks.options import GkdOptions, GrpoOptions
from ...tasks.rollout.addresses import check_address
from ...tasks.run.planning import SIZES
from ..flags import UsageError, show, usage_errors
from .generation import check_key
from .roles import check_role_layout


def check_teacher(options: GkdOptions | GrpoOptions, processes: int) -> str | None:
    """Return the flag of the teacher's folder with its value; None for a server. Raises UsageError."""
    names = "teacher_model", "mcore_teacher_model", "teacher_model_server"
    models = [f"--{name} {value}" for name in names if (value := getattr(options.teacher, name, None))]
    if isinstance(options, GrpoOptions):
        if len(models) > 1:
            raise UsageError(f"{models[0]} and {models[1]}: set one of them.")
        check_token_advantages(options, models[0])
        if options.dynamic_sample and not (options.rewards.reward_funcs or options.rewards.reward_model):
            raise UsageError("--dynamic_sample true: compares rewards. Set --reward_funcs, or remove it.")
        check_role_layout(options, "teacher", processes)
        return models[0]
    if not models:
        raise UsageError(
            "--teacher_model: missing. Set the folder or the hub id of the model to distill, or the address of its "
            "server as --teacher_model_server."
        )
    if len(models) > 1:
        raise UsageError(f"{models[0]} and {models[1]}: set one of them.")
    if options.teacher.teacher_model_server:
        _check_server(options, models[0])
        return None
    if options.teacher.teacher_model_server_api_key:
        raise UsageError("--teacher_model_server_api_key: only for --teacher_model_server. Remove it.")
    if options.seq_kd and options.teacher.mcore_teacher_model:
        raise UsageError(f"--seq_kd true cannot be used with {models[0]}, which cannot generate. Set --teacher_model.")
    check_role_layout(options, "teacher", processes)
    return models[0]


def check_token_advantages(options: GrpoOptions, flag: str) -> None:
    """Raise UsageError for options that need one advantage for a completion; with `flag` each token has its own."""
    policy, problem = options.policy, "needs one advantage for all tokens of a completion"
    if policy.loss_type in ("real", "fipo"):
        raise UsageError(
            f"--loss_type {policy.loss_type} cannot be used with {flag}: it {problem}. Remove one of them."
        )
    if policy.off_policy_sequence_mask_delta is not None:
        raise UsageError(
            f"--off_policy_sequence_mask_delta {policy.off_policy_sequence_mask_delta} cannot be used with {flag}: it "
            f"{problem}. Remove one of them."
        )


def _check_server(options: GkdOptions, flag: str) -> None:
    check_key("teacher_model_server_api_key", options.teacher.teacher_model_server_api_key)
    with usage_errors():
        check_address("--teacher_model_server", options.teacher.teacher_model_server or "")
    if options.teacher.gkd_logits_topk is None:
        raise UsageError(
            f"{flag} needs --gkd_logits_topk: a server returns the likeliest tokens only. Set their number, such as 64."
        )
    for name in ("offload_teacher_model", *(f"teacher_{size}_parallel_size" for size in SIZES)):
        if value := getattr(options.teacher, name):
            raise UsageError(f"--{name} {show(value)} cannot be used with {flag}: the teacher runs there. Remove it.")
