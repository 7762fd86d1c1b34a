"""What a task that generates cannot be: completions, rewards, engines."""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...tasks.options import GkdOptions, GrpoOptions
from ...tasks.options.groups import CompletionOptions, SamplingOptions
from ...tasks.options.rollout import EngineOptions, ServerOptions
from ...tasks.rollout.addresses import server_urls
from ..flags import UsageError, show
from .model import SAFETENSORS, experts_of, read_model_config

# flag -> (the flag that has it read, its values that do)
ONLY_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
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
OF_SERVERS = (
    "vllm_server_host", "vllm_server_base_url", "vllm_server_port", "vllm_server_api_key", "vllm_server_timeout",
    "server_reconnect_timeout",
)  # fmt: skip
IN_THE_PROCESS = (
    "vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_num_seqs", "vllm_enforce_eager",
    "vllm_enable_prefix_caching", "vllm_gpu_memory_utilization",
)  # fmt: skip


def check_generation(options: CompletionOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for what cannot be."""
    _lengths(options)
    if isinstance(options, SamplingOptions):
        _sizes(options)
    _sampling(options)
    _engine(options, sources)
    if isinstance(options, GkdOptions):
        _distillation(options)
    if isinstance(options, GrpoOptions):
        _unread(options, sources)
        _policy(options)
        _rewards(options)
        _turns(options, sources)


def _sizes(options: Any) -> None:
    batch, generated, each = options.global_batch_size, options.generation_batch_size, options.num_generations
    for name in ("num_generations_eval", "steps_per_generation", "num_iterations", "max_resample_times"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)}: must be at least 1.")
    if each < 2:
        raise UsageError(f"--num_generations {each}: must be at least 2, since completions of a prompt are compared.")
    if generated % batch:
        raise UsageError(f"--generation_batch_size {generated}: must be a multiple of --global_batch_size {batch}.")
    if generated != batch * options.steps_per_generation:
        raise UsageError(
            f"--generation_batch_size {generated}: must be --global_batch_size {batch} x --steps_per_generation "
            f"{options.steps_per_generation} = {batch * options.steps_per_generation}. Leave one of them out."
        )
    if generated % each:
        raise UsageError(
            f"--num_generations {each}: must divide the {generated} completions that are generated at a time "
            "(--global_batch_size x --steps_per_generation)."
        )


def _lengths(options: Any) -> None:
    kind = f"--rlhf_type {options.rlhf_type}"
    if options.max_completion_length < 1:
        raise UsageError(f"--max_completion_length {options.max_completion_length}: must be at least 1.")
    if options.streaming:
        raise UsageError(f"--streaming true cannot be with {kind}: prompts are few and short. Leave it out.")
    generates = not isinstance(options, GkdOptions) or options.lmbda > 0 or options.seq_kd
    if generates and options.truncation_strategy == "right":
        raise UsageError(
            f"--truncation_strategy right cannot be with {kind}: it cuts off the end of the question, and the model "
            "would go on with the user's words. Give left or delete."
        )
    if options.packing:
        needed = (options.max_length or 0) + options.max_completion_length * generates
        if not options.packing_length or options.packing_length < needed:
            raise UsageError(
                f"--packing true with {kind} needs --packing_length, of at least the longest prompt (--max_length) and "
                f"completion (--max_completion_length) together: {needed} tokens or more."
            )


def _sampling(options: CompletionOptions) -> None:
    if options.temperature <= 0:
        raise UsageError(f"--temperature {options.temperature}: must be above 0: the loss divides by it.")
    if not 0 < options.top_p <= 1:
        raise UsageError(f"--top_p {options.top_p}: must be above 0 and at most 1.")
    if options.top_k != -1 and options.top_k < 1:
        raise UsageError(f"--top_k {options.top_k}: must be at least 1, or -1 for all.")
    if options.repetition_penalty <= 0:
        raise UsageError(f"--repetition_penalty {options.repetition_penalty}: must be above 0.")


def _engine(options: Any, sources: Mapping[str, str]) -> None:
    given = _typed(OF_SERVERS, sources)
    _patience(options, given)
    if getattr(options, "teacher_model_server", None):
        given = [
            name for name in given if name not in ("vllm_server_timeout", "server_reconnect_timeout")
        ]  # of it as well
    addressed = bool(options.vllm_server_host or options.vllm_server_base_url) and options.use_vllm is not False
    served = options.vllm_mode == "server" or (options.vllm_mode is None and addressed)
    if given and not served:
        raise UsageError(f"{_flag(given[0], options)} is for --vllm_mode server. Leave it out.")
    if options.vllm_mode and options.use_vllm is False:
        raise UsageError(f"--vllm_mode {options.vllm_mode} cannot be with --use_vllm false. Leave one out.")
    if served:
        try:
            server_urls(options)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if getattr(options, "async_generate", False):
        _beside(options, served=served)
    check_vllm(options)
    check_key("vllm_server_api_key", options.vllm_server_api_key)
    if options.sleep_level not in (None, 0, 1, 2):
        raise UsageError(f"--sleep_level {options.sleep_level}: must be at least 0 and at most 2.")
    _memory(options)
    colocated = options.vllm_mode == "colocate" or bool(options.use_vllm and not served)
    if colocated and importlib.util.find_spec("vllm") is None:
        asked = f"--vllm_mode {options.vllm_mode}" if options.vllm_mode else "--use_vllm true"
        raise UsageError(
            f"{asked}: vLLM is not installed here. `pip install 'megaswift[vllm]'`, or give --use_vllm false, or "
            "--vllm_mode server with the address of a `swift rollout`."
        )
    _unread_by_engines(options, sources, served=served)


def _unread_by_engines(options: Any, sources: Mapping[str, str], *, served: bool) -> None:
    """Flags of vLLM in the training processes, where something else generates; a length that is too short there."""
    if isinstance(options, GkdOptions) and options.lmbda == 0:
        if given := _typed((*IN_THE_PROCESS, "sleep_level"), sources):
            raise UsageError(
                f"{_flag(given[0], options)} cannot be with --lmbda 0, with which the student generates nothing. Leave "
                "it out."
            )
    elif served:
        if given := _typed(IN_THE_PROCESS, sources):
            raise UsageError(
                f"{_flag(given[0], options)} is for vLLM in the training processes, and a server generates. Give it to "
                "`swift rollout`, and leave it out here."
            )
    elif options.use_vllm is False or importlib.util.find_spec("vllm") is None:
        if given := _typed((*IN_THE_PROCESS, "sleep_level"), sources):
            why = "--use_vllm false is given" if options.use_vllm is False else "it is not installed here"
            raise UsageError(f"{_flag(given[0], options)} is for vLLM, and {why}. Leave it out.")
    elif options.vllm_max_model_len is not None:
        needed = (options.max_length or 0) + options.max_completion_length
        if options.vllm_max_model_len < needed:
            raise UsageError(
                f"--vllm_max_model_len {options.vllm_max_model_len}: must be at least the longest prompt (--max_length"
                f") and completion (--max_completion_length) together: {needed} tokens or more."
            )


def _typed(names: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Those of the options that the user gave."""
    return [name for name in names if sources.get(name, "default") not in ("default", "derived")]


def _flag(name: str, options: Any) -> str:
    return f"--{name} {show(getattr(options, name))}"


def _patience(options: Any, given: list[str]) -> None:
    """Ranks that wait for the one that waits for a server have waited for too long then."""
    for name in ("vllm_server_timeout", "server_reconnect_timeout"):
        seconds, most = getattr(options, name), options.ddp_timeout
        if name in given and seconds >= most:
            raise UsageError(
                f"--{name} {show(seconds)}: must be below --ddp_timeout {most}, after which a run that waits is ended. "
                "Raise --ddp_timeout."
            )


def _beside(options: GrpoOptions, *, served: bool) -> None:
    if not served:
        raise UsageError(
            "--async_generate true is for --vllm_mode server: engines in the training processes generate while nothing "
            "is trained. Start a `swift rollout` and give its address, or leave it out."
        )
    if options.sleep_level:
        raise UsageError(
            f"--sleep_level {options.sleep_level} cannot be with --async_generate true: the servers generate while the "
            "model trains. Leave one out."
        )


def _memory(options: Any) -> None:
    """What waits on the host while completions are generated."""
    for name in ("offload_model", "offload_optimizer"):
        if not getattr(options, name):
            continue
        if isinstance(options, GkdOptions) and options.lmbda == 0:
            raise UsageError(
                f"--{name} true cannot be with --lmbda 0, with which the student generates nothing. Leave it out."
            )
        if getattr(options, "async_generate", False):
            raise UsageError(
                f"--{name} true cannot be with --async_generate true: the model trains while completions are "
                "generated. Leave one out."
            )
        if name == "offload_model" and options.fp8_param_gather:
            raise UsageError(
                "--offload_model true cannot be with --fp8_param_gather true, whose weights are in two parts. Leave "
                "one out."
            )


def check_vllm(options: ServerOptions | EngineOptions) -> None:
    """Raise UsageError for numbers that are too small or too large."""
    for name in ("vllm_tensor_parallel_size", "vllm_max_model_len", "vllm_max_num_seqs"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1.")
    share = options.vllm_gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--vllm_gpu_memory_utilization {share}: must be above 0 and at most 1.")


def check_key(name: str, key: str | None) -> None:
    """Raise UsageError for a key that everybody has."""
    if key == "":
        raise UsageError(f'--{name} "": is empty. Is the variable set that it comes from? Give a key, or leave it out.')


def _unread(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """A flag that was given and that nothing would read."""
    for name in _typed(ONLY_WITH, sources):
        by, values = ONLY_WITH[name]
        if getattr(options, by) not in values:
            wanted = " or ".join(show(value) for value in values)
            raise UsageError(
                f"{_flag(name, options)} is for --{by} {wanted}, not {show(getattr(options, by))}. Leave it out."
            )


def _policy(options: GrpoOptions) -> None:
    if options.beta < 0:
        raise UsageError(f"--beta {options.beta}: must not be below 0.")
    for name in ("epsilon", "epsilon_high"):
        if (value := getattr(options, name)) < 0:
            raise UsageError(f"--{name} {value}: must not be below 0.")
    for name in ("tau_pos", "tau_neg"):
        if (value := getattr(options, name)) <= 0:
            raise UsageError(f"--{name} {value}: must be above 0.")
    if not options.beta:
        for name in (
            "ref_model",
            "mcore_ref_model",
            "ref_adapters",
            "offload_ref_model",
            "kl_in_reward",
            "sync_ref_model",
        ):
            if value := getattr(options, name):
                raise UsageError(
                    f"--{name} {show(value)} cannot be with --beta 0, which has no reference. Leave one out."
                )
    if options.delta is not None and options.delta <= 1 + options.epsilon:
        raise UsageError(f"--delta {options.delta}: must be above 1 + --epsilon {options.epsilon}, to bound anything.")
    if not 0 < options.top_entropy_quantile <= 1:
        raise UsageError(
            f"--top_entropy_quantile {options.top_entropy_quantile}: must be above 0 and at most 1, which is all."
        )
    if options.rollout_importance_sampling_threshold <= 0:
        raise UsageError(
            f"--rollout_importance_sampling_threshold {options.rollout_importance_sampling_threshold}: must be above 0."
        )
    if (delta := options.off_policy_sequence_mask_delta) is not None and delta <= 0:
        raise UsageError(f"--off_policy_sequence_mask_delta {delta}: must be above 0.")


def check_replay(options: GrpoOptions, model: dict[str, Any] | None) -> None:
    """Raise UsageError where the choices of routers cannot be repeated. `model`: its config.json; None: a hub's."""
    mode = f"--router_replay_mode {options.router_replay_mode}"
    if options.router_replay_mode == "disabled":
        return
    if model is not None and not experts_of(model):
        raise UsageError(f"{mode}: the model has no experts. Leave it out.")
    if options.moe_router_load_balancing_type == "sinkhorn":
        raise UsageError(
            f"{mode} cannot be with --moe_router_load_balancing_type sinkhorn, by which the choice of a token hangs on "
            "all others. Leave one of them out."
        )


def _distillation(options: GkdOptions) -> None:
    for name in ("lmbda", "beta"):
        if not 0 <= (value := getattr(options, name)) <= 1:
            raise UsageError(f"--{name} {value}: must be at least 0 and at most 1.")
    if options.sft_alpha < 0:
        raise UsageError(f"--sft_alpha {options.sft_alpha}: must not be below 0.")
    if options.gkd_logits_topk is not None and options.gkd_logits_topk < 2:
        raise UsageError(f"--gkd_logits_topk {options.gkd_logits_topk}: must be at least 2: one token is always right.")
    for name in ("seq_kd", "sft_alpha"):
        if options.lmbda == 1 and (value := getattr(options, name)):
            raise UsageError(
                f"--{name} {show(value)} cannot be with --lmbda 1, with which the student writes all. Leave one out."
            )


def _rewards(options: GrpoOptions) -> None:
    from ...tasks.rewards.load import check_rewards

    try:
        check_rewards(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.reward_model:
        try:
            read_model_config(replace(options, model=options.reward_model), weights=SAFETENSORS)
        except UsageError as error:
            raise UsageError(re.sub(r"--model\b", "--reward_model", str(error))) from None


def _turns(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    from ...tasks.multi_turn.load import check_turns

    for name in ("max_turns", "turn_timeout"):
        value = getattr(options, name)
        if _typed([name], sources) and options.multi_turn_scheduler is None:
            raise UsageError(f"--{name} {show(value)} is for episodes of several turns: give a --multi_turn_scheduler.")
        if value is not None and value <= 0:
            raise UsageError(f"--{name} {show(value)}: must be above 0.")
    try:
        check_turns(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
