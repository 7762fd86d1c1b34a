"""Checks of tasks that generate: completions, rewards, engines."""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ...bridge.option_groups import flag_value
from ...tasks.options import GkdOptions, GrpoOptions, PpoOptions, TeacherOptions
from ...tasks.rollout.addresses import server_urls
from ..flags import UsageError, flags_of, show, usage_errors
from .model import SAFETENSORS, HfConfig, count_experts, read_model_config
from .rollout_servers import check_rollout_servers

type GeneratingOptions = GrpoOptions | GkdOptions

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "fipo")
# PPO takes its advantages from a critic, not from a comparison of completions or a teacher.
GRPO_ONLY = (
    "advantage_estimator", "scale_rewards", "dynamic_sample", "teacher_kl_coef", *TeacherOptions.__dataclass_fields__,
)  # fmt: skip
# flag -> (flag that selects it, values of that flag with which it is read)
ONLY_WITH: dict[str, tuple[str, tuple[str | bool, ...]]] = {
    "tau_pos": ("loss_type", ("sapo",)),
    "tau_neg": ("loss_type", ("sapo",)),
    "real_tau": ("loss_type", ("real",)),
    "fipo_decay_rate": ("loss_type", ("fipo",)),
    "fipo_clip_range": ("loss_type", ("fipo",)),
    "fipo_clip_high_only": ("loss_type", ("fipo",)),
    "fipo_safety_threshold": ("loss_type", ("fipo",)),
    "delta": ("loss_type", CLIPPED_LOSSES),
    "dual_clip": ("loss_type", CLIPPED_LOSSES),
    "max_resample_times": ("dynamic_sample", (True,)),
    **dict.fromkeys(GRPO_ONLY, ("rlhf_type", ("grpo",))),
    "rollout_importance_sampling_threshold": (
        "rollout_importance_sampling_mode",
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    ),
}
# Accepted without effect, since ms-swift's scripts set them with every loss.
NOTED_UNLESS = {
    "epsilon": ("loss_type", CLIPPED_LOSSES),
    "epsilon_high": ("loss_type", (*CLIPPED_LOSSES, "cispo")),
    "scale_rewards": ("loss_type", (*CLIPPED_LOSSES, "cispo", "sapo")),
}
UNGROUPED_ESTIMATORS = ("reinforce_plus_plus", "reinforce")  # estimators that need no other completions of a prompt
REFERENCE_FLAGS = ("ref_model", "mcore_ref_model", "ref_adapters")
TEACHER_FLAGS = "teacher_model", "mcore_teacher_model", "teacher_model_server"
SERVER_FLAGS = (
    "vllm_server_host", "vllm_server_base_url", "vllm_server_port", "vllm_server_api_key", "vllm_server_timeout",
    "server_reconnect_timeout",
)  # fmt: skip
VLLM_FLAGS = (
    "vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_num_seqs", "vllm_enforce_eager",
    "vllm_enable_prefix_caching", "vllm_gpu_memory_utilization", "vllm_engine_kwargs", "vllm_quantization",
    "vllm_limit_mm_per_prompt", "vllm_mm_processor_cache_gb",
)  # fmt: skip


def check_generation(options: GeneratingOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options of generation that cannot be used together."""
    _check_lengths(options)
    check_rollout_servers(options, sources)
    _check_engine(options, sources)
    if isinstance(options, GkdOptions):
        _check_distillation(options)
        _check_turns(options, sources)
    if isinstance(options, GrpoOptions):
        _check_sizes(options)
        _check_unread(options, sources)
        _check_policy(options, sources)
        _check_rewards(options)
        _check_turns(options, sources)


def _check_sizes(options: GrpoOptions) -> None:
    sampling = options.sampling
    batch, generated, group = (
        options.training.global_batch_size,
        sampling.generation_batch_size or 0,
        sampling.num_generations,
    )
    if generated % batch:
        raise UsageError(
            f"--generation_batch_size {generated}: not a multiple of --global_batch_size {batch}. Set a multiple."
        )
    if generated != batch * sampling.steps_per_generation:
        raise UsageError(
            f"--generation_batch_size {generated}: not --global_batch_size {batch} x --steps_per_generation "
            f"{sampling.steps_per_generation} = {batch * sampling.steps_per_generation}. Remove one of them."
        )
    if generated % group:
        raise UsageError(
            f"--num_generations {group}: does not divide the {generated} completions of a rollout (--global_batch_size "
            "x --steps_per_generation). Set a divisor."
        )
    if group == 1 and not isinstance(options, PpoOptions):
        _check_single_completions(options)


def has_teacher(options: GrpoOptions) -> bool:
    """Return whether a teacher's log-probabilities are part of the advantages."""
    return any(flag_value(options, name, None) for name in TEACHER_FLAGS)


def _check_single_completions(options: GrpoOptions) -> None:
    """Raise UsageError if the advantage needs several completions of a prompt."""
    if options.advantage_estimator not in UNGROUPED_ESTIMATORS and not has_teacher(options):
        raise UsageError(
            f"--num_generations 1: --advantage_estimator {options.advantage_estimator} compares completions of one "
            "prompt, so every advantage would be 0. Set 2 or more, or --advantage_estimator "
            f"{' or '.join(UNGROUPED_ESTIMATORS)}."
        )
    if options.dynamic_sample:
        raise UsageError(
            "--num_generations 1 cannot be used with --dynamic_sample true, which replaces prompts whose completions "
            "all have the same reward. Remove one of them."
        )


def _check_lengths(options: GeneratingOptions) -> None:
    data = options.data
    kind = f"--rlhf_type {options.rlhf_type}"
    if data.streaming:
        raise UsageError(f"--streaming true cannot be used with {kind}: prompts are few and short. Remove it.")
    if options.generates and data.truncation_strategy == "right":
        raise UsageError(
            f"--truncation_strategy right cannot be used with {kind}: it cuts off the end of the question, and the "
            "model would continue the user's words. Set left or delete."
        )
    if data.packing:
        needed = (data.max_length or 0) + options.sampling.max_completion_length * options.generates
        if not data.packing_length or data.packing_length < needed:
            raise UsageError(
                f"--packing true with {kind} needs --packing_length, at least the longest prompt (--max_length) and "
                f"completion (--max_completion_length) together. Set {needed} or more."
            )


def _check_engine(options: GeneratingOptions, sources: Mapping[str, str]) -> None:
    engine = options.engine
    flags = _set_by_user(SERVER_FLAGS, sources)
    _check_timeouts(options, flags)
    if isinstance(options, GkdOptions) and options.teacher.teacher_model_server:
        teacher_flags = "vllm_server_timeout", "server_reconnect_timeout"  # also read for the teacher's server
        flags = [name for name in flags if name not in teacher_flags]
    starts_servers = engine.rollout_num_gpus > 0
    has_address = bool(engine.vllm_server_host or engine.vllm_server_base_url) and engine.use_vllm is not False
    uses_server = engine.vllm_mode == "server" or (engine.vllm_mode is None and has_address)
    if flags and not uses_server:
        raise UsageError(f"{as_flag(flags[0], options)}: only for --vllm_mode server. Remove it.")
    if engine.vllm_mode and engine.use_vllm is False and not starts_servers:
        raise UsageError(f"--vllm_mode {engine.vllm_mode} cannot be used with --use_vllm false. Remove one of them.")
    if uses_server and not starts_servers:
        with usage_errors():
            server_urls(engine)
    if isinstance(options, GrpoOptions) and options.async_generate:
        _check_async(options, uses_server=uses_server)
    check_key("vllm_server_api_key", engine.vllm_server_api_key)
    _check_offload(options)
    is_colocated = engine.vllm_mode == "colocate"
    needs_vllm = is_colocated or bool(engine.use_vllm and (starts_servers or not uses_server))
    if needs_vllm and importlib.util.find_spec("vllm") is None:
        flag = "--vllm_mode colocate" if is_colocated else "--use_vllm true"
        raise UsageError(
            f"{flag}: vLLM is not installed here. Run `pip install 'megaswift[vllm]'`, or set --use_vllm false, or "
            "--vllm_mode server with the address of a `swift rollout`."
        )
    _check_vllm(options, sources, uses_server=uses_server and not starts_servers)


def _check_vllm(options: GeneratingOptions, sources: Mapping[str, str], *, uses_server: bool) -> None:
    """Raise UsageError for unread options of vLLM, and for a --vllm_max_model_len too short for the run.

    uses_server: whether a server generates that the user has started
    """
    engine = options.engine
    flags = _set_by_user((*VLLM_FLAGS, "sleep_level"), sources)
    if not options.rolls_out:
        if flags:
            raise UsageError(
                f"{as_flag(flags[0], options)} cannot be used with --lmbda 0: the student generates nothing. Remove it."
            )
    elif uses_server:
        if flags := _set_by_user(VLLM_FLAGS, sources):
            raise UsageError(
                f"{as_flag(flags[0], options)}: only for vLLM in the training processes, and a server generates. Set "
                "it for `swift rollout`, and remove it here."
            )
    elif engine.use_vllm is False or importlib.util.find_spec("vllm") is None:
        if flags:
            reason = "--use_vllm false is set" if engine.use_vllm is False else "it is not installed here"
            raise UsageError(f"{as_flag(flags[0], options)}: only for vLLM, and {reason}. Remove it.")
    elif engine.vllm_max_model_len is not None:
        needed = (options.data.max_length or 0) + options.sampling.max_completion_length
        if engine.vllm_max_model_len < needed:
            raise UsageError(
                f"--vllm_max_model_len {engine.vllm_max_model_len}: less than the longest prompt (--max_length) and "
                f"completion (--max_completion_length) together. Set {needed} or more."
            )


def _set_by_user(names: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    return [name for name in names if is_set_by_user(name, sources)]


def is_set_by_user(name: str, sources: Mapping[str, str]) -> bool:
    """Return whether the user set an option."""
    return sources.get(name, "default") not in ("default", "derived")


def as_flag(name: str, options: object) -> str:
    """Return an option with its value: --name value."""
    return f"--{name} {show(flag_value(options, name))}"


def _check_timeouts(options: GeneratingOptions, flags: list[str]) -> None:
    """Raise UsageError for a server timeout of --ddp_timeout or more: the other ranks would time out first."""
    for name in ("vllm_server_timeout", "server_reconnect_timeout"):
        if name in flags and flag_value(options, name) >= options.build.ddp_timeout:
            raise UsageError(
                f"{as_flag(name, options)}: not below --ddp_timeout {options.build.ddp_timeout}, which ends a run that "
                "waits. Set a higher --ddp_timeout."
            )


def _check_async(options: GrpoOptions, *, uses_server: bool) -> None:
    if not uses_server:
        raise UsageError(
            "--async_generate true: only for --vllm_mode server, since engines in the training processes generate "
            "while nothing trains. Start a `swift rollout` and set its address, or remove it."
        )
    if options.engine.sleep_level:
        raise UsageError(
            f"--sleep_level {options.engine.sleep_level} cannot be used with --async_generate true: the servers "
            "generate while the model trains. Remove one of them."
        )


def _check_offload(options: GeneratingOptions) -> None:
    """Raise UsageError for offload if the trainer is not idle during generation."""
    for name in ("offload_model", "offload_optimizer"):
        if not flag_value(options, name):
            continue
        if not options.rolls_out:
            raise UsageError(f"--{name} true cannot be used with --lmbda 0: the student generates nothing. Remove it.")
        if isinstance(options, GrpoOptions) and options.async_generate:
            raise UsageError(
                f"--{name} true cannot be used with --async_generate true: the model trains during generation. Remove "
                "one of them."
            )
        if name == "offload_model" and options.build.fp8_param_gather:
            raise UsageError(
                "--offload_model true cannot be used with --fp8_param_gather true, whose weights are in two parts. "
                "Remove one of them."
            )


def check_key(name: str, key: str | None) -> None:
    """Raise UsageError for an empty key."""
    if key == "":
        raise UsageError(f'--{name} "": is empty. Set the variable that it comes from, or remove it.')


def _check_unread(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for an option that the chosen loss or mode does not read."""
    for name in _set_by_user(ONLY_WITH, sources):
        mode, values = ONLY_WITH[name]
        if flag_value(options, mode) not in values:
            text = " or ".join(show(value) for value in values)
            raise UsageError(
                f"{as_flag(name, options)}: only for --{mode} {text}, not {show(flag_value(options, mode))}. Remove it."
            )


def unread_flags(options: GrpoOptions, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each option that the chosen loss does not read."""
    for name in _set_by_user(NOTED_UNLESS, sources):
        mode, values = NOTED_UNLESS[name]
        if flag_value(options, mode) not in values:
            yield f"{as_flag(name, options)} has no effect with {as_flag(mode, options)}."


def _check_policy(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    if not has_teacher(options):
        for field in ("teacher_kl_coef", *vars(options.teacher)):
            if is_set_by_user(field, sources):
                raise UsageError(f"{as_flag(field, options)}: no teacher. Set --teacher_model, or remove it.")
    if not options.beta:
        for name in (*REFERENCE_FLAGS, "offload_ref_model", "kl_in_reward", "sync_ref_model", "kl_estimator"):
            if flag_value(options, name) and (is_set_by_user(name, sources) or not isinstance(options, PpoOptions)):
                raise UsageError(
                    f"{as_flag(name, options)} cannot be used with --beta 0, which has no reference. Remove one of "
                    "them."
                )
    policy = options.policy
    if policy.loss_type == "real":
        _check_real(options)
    if policy.delta is not None and policy.delta <= 1 + policy.epsilon:
        raise UsageError(f"--delta {policy.delta}: bounds nothing. Set a value above 1 + --epsilon {policy.epsilon}.")


def _check_real(options: GrpoOptions) -> None:
    """Raise UsageError for options of losses per token, and for groups in several steps."""
    flags = flags_of(type(options))
    names = (
        "importance_sampling_level", "rollout_importance_sampling_mode", "off_policy_sequence_mask_delta",
        "top_entropy_quantile", "loss_agg_mode", "whiten_advantages", "advantage_clip",
    )  # fmt: skip
    for name in names:
        if flag_value(options, name) != flags[name].default:
            raise UsageError(
                f"{as_flag(name, options)} cannot be used with --loss_type real, whose loss is of a prompt's "
                "completions. Remove one of them."
            )
    batch, group = options.training.global_batch_size, options.sampling.num_generations
    if batch % group:
        raise UsageError(
            f"--num_generations {group}: does not divide --global_batch_size {batch}, and --loss_type real compares a "
            "prompt's completions in one step. Set a divisor."
        )
    if group == 1:
        raise UsageError("--num_generations 1 cannot be used with --loss_type real: it compares completions. Set more.")


def check_replay(options: GrpoOptions, model: HfConfig | None) -> None:
    """Raise UsageError if the model's routing cannot be replayed."""
    mode = f"--router_replay_mode {options.router_replay_mode}"
    if options.router_replay_mode == "disabled":
        return
    if model is not None and not count_experts(model):
        raise UsageError(f"{mode}: the model has no experts. Remove it.")
    if options.build.moe_router_load_balancing_type == "sinkhorn":
        raise UsageError(
            f"{mode} cannot be used with --moe_router_load_balancing_type sinkhorn, which routes a token by all "
            "others. Remove one of them."
        )


def _check_distillation(options: GkdOptions) -> None:
    for name in ("seq_kd", "sft_alpha"):
        if options.lmbda == 1 and flag_value(options, name):
            raise UsageError(
                f"{as_flag(name, options)} cannot be used with --lmbda 1: the student generates all answers. Remove "
                "one of them."
            )


def _check_rewards(options: GrpoOptions) -> None:
    from ...tasks.rewards.load import check_rewards, reward_names

    if has_teacher(options) and not reward_names(options.rewards):
        return
    with usage_errors():
        check_rewards(options.rewards)
    if options.rewards.reward_model:
        try:
            read_model_config(replace(options, model=options.rewards.reward_model), weights=SAFETENSORS)
        except UsageError as error:
            raise UsageError(re.sub(r"--model\b", "--reward_model", str(error))) from None


def _check_turns(options: GeneratingOptions, sources: Mapping[str, str]) -> None:
    from ...tasks.multi_turn.load import check_turns

    for name in ("max_turns", "turn_images", "turn_timeout", "gym_env"):
        if is_set_by_user(name, sources) and options.multi_turn.multi_turn_scheduler is None:
            raise UsageError(
                f"{as_flag(name, options)}: only for episodes of several turns. Set --multi_turn_scheduler, or remove "
                "it."
            )
    if isinstance(options, GkdOptions) and (name := options.multi_turn.multi_turn_scheduler):
        if not options.rolls_out:
            raise UsageError(
                f"--multi_turn_scheduler {name}: with --lmbda 0 the student generates nothing. Remove one."
            )
        if options.seq_kd:
            raise UsageError(
                f"--multi_turn_scheduler {name}: a teacher's completions (--seq_kd) have one turn. Remove one."
            )
    with usage_errors():
        check_turns(options)
