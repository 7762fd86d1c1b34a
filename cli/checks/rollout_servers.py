"""Checks of --rollout_num_gpus, whose servers the command itself starts."""

from collections.abc import Mapping

from ...tasks.options import GkdOptions, GrpoOptions
from ...tasks.rollout.addresses import started_servers
from ..flags import UsageError, show

# Flags of servers that others have started.
ADDRESS_FLAGS = (
    "vllm_server_host", "vllm_server_base_url", "vllm_server_port", "vllm_server_api_key", "server_reconnect_timeout",
)  # fmt: skip
TIMEOUT_SHARE = 0.8  # share of --ddp_timeout to wait for servers, whose end would be noticed at once


def check_rollout_servers(options: GrpoOptions | GkdOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for flags that --rollout_num_gpus contradicts. Set those that it implies."""
    engine = options.engine
    if not engine.rollout_num_gpus:
        return
    flag = f"--rollout_num_gpus {engine.rollout_num_gpus}"
    if not options.rolls_out:
        raise UsageError(f"{flag} cannot be used with --lmbda 0: the student generates nothing. Remove it.")
    if engine.vllm_mode == "colocate":
        raise UsageError(
            f"{flag} cannot be used with --vllm_mode colocate, which generates in the training processes. Remove one "
            "of them."
        )
    for name in ADDRESS_FLAGS:
        if sources.get(name, "default") not in ("default", "derived"):
            value = "..." if name.endswith("api_key") else show(getattr(engine, name))
            raise UsageError(
                f"{flag} cannot be used with --{name} {value}: the command starts servers of its own. Remove one of "
                "them."
            )
    if options.mcore_model:
        raise UsageError(
            f"{flag} cannot be used with --mcore_model {options.mcore_model}: servers read a Hugging Face folder. Make "
            "one with `swift export --to_hf true` and set it as --model."
        )
    if engine.rollout_num_gpus % engine.vllm_tensor_parallel_size:
        raise UsageError(
            f"{flag}: not a multiple of --vllm_tensor_parallel_size {engine.vllm_tensor_parallel_size}, the GPUs of a "
            "server. Set a multiple."
        )
    engine.vllm_mode = "server"
    if sources.get("vllm_server_timeout", "default") in ("default", "derived"):
        engine.vllm_server_timeout = max(engine.vllm_server_timeout, TIMEOUT_SHARE * options.build.ddp_timeout)
    if servers := started_servers():
        engine.vllm_server_base_url, engine.vllm_server_api_key = servers.urls, servers.api_key
