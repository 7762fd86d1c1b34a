"""Checks of tasks that generate: completions, rewards, engines."""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...bridge.option_groups import flag_value
from ...tasks.options import GkdOptions, GrpoOptions
from ...tasks.rollout.addresses import server_urls
from ..flags import UsageError, show, usage_errors
from .model import SAFETENSORS, HfConfig, experts_of, read_model_config

type GeneratingOptions = GrpoOptions | GkdOptions

# flag -> (flag that decides whether it is read, values of that flag with which it is)
ONLY_WITH: dict[str, tuple[str, tuple[str | bool, ...]]] = {
    "tau_pos": ("loss_type", ("sapo",)),
    "tau_neg": ("loss_type", ("sapo",)),
    "delta": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo")),
    "epsilon": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo")),
    "epsilon_high": ("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")),
    "max_resample_times": ("dynamic_sample", (True,)),
    "rollout_importance_sampling_threshold": (
        "rollout_importance_sampling_mode",
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    ),
}
REFERENCES = ("ref_model", "mcore_ref_model", "ref_adapters")
OF_SERVERS = (
    "vllm_server_host", "vllm_server_base_url", "vllm_server_port", "vllm_server_api_key", "vllm_server_timeout",
    "server_reconnect_timeout",
)  # fmt: skip
IN_THE_PROCESS = (
    "vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_num_seqs", "vllm_enforce_eager",
    "vllm_enable_prefix_caching", "vllm_gpu_memory_utilization",
)  # fmt: skip


def check_generation(options: GeneratingOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options of generation that cannot be used together."""
    _lengths(options)
    if options.sampling.top_k == 0:
        raise UsageError("--top_k 0: keeps no token. Set at least 1, or -1 for all.")
    _engine(options, sources)
    if isinstance(options, GkdOptions):
        _distillation(options)
    if isinstance(options, GrpoOptions):
        _sizes(options)
        _unread(options, sources)
        _policy(options)
        _rewards(options)
        _turns(options, sources)


def _sizes(options: GrpoOptions) -> None:
    sampling = options.sampling
    batch, generated, each = (
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
    if generated % each:
        raise UsageError(
            f"--num_generations {each}: does not divide the {generated} completions of a rollout (--global_batch_size "
            "x --steps_per_generation). Set a divisor."
        )


def _lengths(options: GeneratingOptions) -> None:
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


def _engine(options: GeneratingOptions, sources: Mapping[str, str]) -> None:
    engine = options.engine
    typed = _typed(OF_SERVERS, sources)
    _timeouts(options, typed)
    if isinstance(options, GkdOptions) and options.teacher.teacher_model_server:
        shared = "vllm_server_timeout", "server_reconnect_timeout"  # also read for the teacher's server
        typed = [name for name in typed if name not in shared]
    has_address = bool(engine.vllm_server_host or engine.vllm_server_base_url) and engine.use_vllm is not False
    served = engine.vllm_mode == "server" or (engine.vllm_mode is None and has_address)
    if typed and not served:
        raise UsageError(f"{written(typed[0], options)}: only for --vllm_mode server. Remove it.")
    if engine.vllm_mode and engine.use_vllm is False:
        raise UsageError(f"--vllm_mode {engine.vllm_mode} cannot be used with --use_vllm false. Remove one of them.")
    if served:
        with usage_errors():
            server_urls(engine)
    if isinstance(options, GrpoOptions) and options.async_generate:
        _async(options, served=served)
    check_key("vllm_server_api_key", engine.vllm_server_api_key)
    _offload(options)
    colocated = engine.vllm_mode == "colocate" or bool(engine.use_vllm and not served)
    if colocated and importlib.util.find_spec("vllm") is None:
        flag = f"--vllm_mode {engine.vllm_mode}" if engine.vllm_mode else "--use_vllm true"
        raise UsageError(
            f"{flag}: vLLM is not installed here. Run `pip install 'megaswift[vllm]'`, or set --use_vllm false, or "
            "--vllm_mode server with the address of a `swift rollout`."
        )
    _unread_by_engines(options, sources, served=served)


def _unread_by_engines(options: GeneratingOptions, sources: Mapping[str, str], *, served: bool) -> None:
    """Raise UsageError for options of colocated vLLM that nothing reads, and for a length too short for the run."""
    engine = options.engine
    typed = _typed((*IN_THE_PROCESS, "sleep_level"), sources)
    if not options.rolls_out:
        if typed:
            raise UsageError(
                f"{written(typed[0], options)} cannot be used with --lmbda 0: the student generates nothing. Remove it."
            )
    elif served:
        if typed := _typed(IN_THE_PROCESS, sources):
            raise UsageError(
                f"{written(typed[0], options)}: only for vLLM in the training processes, and a server generates. Set "
                "it for `swift rollout`, and remove it here."
            )
    elif engine.use_vllm is False or importlib.util.find_spec("vllm") is None:
        if typed:
            reason = "--use_vllm false is set" if engine.use_vllm is False else "it is not installed here"
            raise UsageError(f"{written(typed[0], options)}: only for vLLM, and {reason}. Remove it.")
    elif engine.vllm_max_model_len is not None:
        needed = (options.data.max_length or 0) + options.sampling.max_completion_length
        if engine.vllm_max_model_len < needed:
            raise UsageError(
                f"--vllm_max_model_len {engine.vllm_max_model_len}: less than the longest prompt (--max_length) and "
                f"completion (--max_completion_length) together. Set {needed} or more."
            )


def _typed(names: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    return [name for name in names if is_typed(name, sources)]


def is_typed(name: str, sources: Mapping[str, str]) -> bool:
    """Return whether the user set an option."""
    return sources.get(name, "default") not in ("default", "derived")


def written(name: str, options: object) -> str:
    """Return an option as typed: --name value."""
    return f"--{name} {show(flag_value(options, name))}"


def _timeouts(options: GeneratingOptions, typed: list[str]) -> None:
    """Raise UsageError if ranks that wait for the rank which waits for a server would time out first."""
    for name in ("vllm_server_timeout", "server_reconnect_timeout"):
        if name in typed and flag_value(options, name) >= options.build.ddp_timeout:
            raise UsageError(
                f"{written(name, options)}: not below --ddp_timeout {options.build.ddp_timeout}, which ends a run that "
                "waits. Set a higher --ddp_timeout."
            )


def _async(options: GrpoOptions, *, served: bool) -> None:
    if not served:
        raise UsageError(
            "--async_generate true: only for --vllm_mode server, since engines in the training processes generate "
            "while nothing trains. Start a `swift rollout` and set its address, or remove it."
        )
    if options.engine.sleep_level:
        raise UsageError(
            f"--sleep_level {options.engine.sleep_level} cannot be used with --async_generate true: the servers "
            "generate while the model trains. Remove one of them."
        )


def _offload(options: GeneratingOptions) -> None:
    """Raise UsageError for offload of the trainer where it cannot be idle during generation."""
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


def _unread(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for an option that the chosen loss or mode does not read."""
    for name in _typed(ONLY_WITH, sources):
        by, values = ONLY_WITH[name]
        if flag_value(options, by) not in values:
            readers = " or ".join(show(value) for value in values)
            raise UsageError(
                f"{written(name, options)}: only for --{by} {readers}, not {show(flag_value(options, by))}. Remove it."
            )


def _policy(options: GrpoOptions) -> None:
    if not options.beta:
        for name in (*REFERENCES, "offload_ref_model", "kl_in_reward", "sync_ref_model"):
            if flag_value(options, name):
                raise UsageError(
                    f"{written(name, options)} cannot be used with --beta 0, which has no reference. Remove one of "
                    "them."
                )
    if options.delta is not None and options.delta <= 1 + options.epsilon:
        raise UsageError(f"--delta {options.delta}: bounds nothing. Set a value above 1 + --epsilon {options.epsilon}.")


def check_replay(options: GrpoOptions, model: HfConfig | None) -> None:
    """Raise UsageError if the routers' choices cannot be replayed."""
    mode = f"--router_replay_mode {options.router_replay_mode}"
    if options.router_replay_mode == "disabled":
        return
    if model is not None and not experts_of(model):
        raise UsageError(f"{mode}: the model has no experts. Remove it.")
    if options.build.moe_router_load_balancing_type == "sinkhorn":
        raise UsageError(
            f"{mode} cannot be used with --moe_router_load_balancing_type sinkhorn, which routes a token by all "
            "others. Remove one of them."
        )


def _distillation(options: GkdOptions) -> None:
    for name in ("seq_kd", "sft_alpha"):
        if options.lmbda == 1 and flag_value(options, name):
            raise UsageError(
                f"{written(name, options)} cannot be used with --lmbda 1: the student generates all answers. Remove "
                "one of them."
            )


def _rewards(options: GrpoOptions) -> None:
    from ...tasks.rewards.load import check_rewards

    with usage_errors():
        check_rewards(options.rewards)
    if options.rewards.reward_model:
        try:
            read_model_config(replace(options, model=options.rewards.reward_model), weights=SAFETENSORS)
        except UsageError as error:
            raise UsageError(re.sub(r"--model\b", "--reward_model", str(error))) from None


def _turns(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    from ...tasks.multi_turn.load import check_turns

    for name in ("max_turns", "turn_timeout"):
        if is_typed(name, sources) and options.multi_turn.multi_turn_scheduler is None:
            raise UsageError(
                f"{written(name, options)}: only for episodes of several turns. Set --multi_turn_scheduler, or remove "
                "it."
            )
    with usage_errors():
        check_turns(options)
