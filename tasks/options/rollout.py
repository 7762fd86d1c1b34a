"""Options of `swift rollout`, and of a training run's rollout engine. No torch: the command line imports this."""

import importlib.util
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...bridge.options import ModelOptions


@dataclass
class VllmOptions:
    """vLLM"""

    vllm_tensor_parallel_size: Annotated[int, "GPUs over which an engine is split.", "[1, inf)"] = 1
    vllm_max_model_len: Annotated[
        int | None, "Longest prompt and completion together, in tokens. Default: the model's limit.", "[1, inf)"
    ] = None
    vllm_max_num_seqs: Annotated[int | None, "Concurrent completions. Default: vLLM's.", "[1, inf)"] = None
    vllm_quantization: Annotated[
        Literal["fp8"] | None,
        "Precision of vLLM's linear layers, which it quantizes at each weight update: faster, less exact. GPUs and "
        "models without experts only. Default: --torch_dtype.",
    ] = None
    vllm_enforce_eager: Annotated[bool, "No CUDA graphs and no compilation: starts faster, generates slower."] = False
    vllm_enable_prefix_caching: Annotated[bool, "Reuse the computation of shared prompt prefixes."] = True
    vllm_enable_lora: Annotated[
        bool,
        "Send vLLM only the trained adapter, which it applies to the base weights; false: send all weights, merged.",
    ] = False
    vllm_max_lora_rank: Annotated[
        int | None,
        "Largest adapter rank in vLLM. Default: the run's rank; 16 in a server.",
        "[1, 512]",
    ] = None
    vllm_limit_mm_per_prompt: Annotated[
        dict[str, int],
        "Most images of a prompt, as JSON: '{\"image\": 4}'. Default: those of the data; vLLM's limit in a server.",
    ] = field(default_factory=dict)
    vllm_mm_processor_cache_gb: Annotated[
        float | None, "Host memory for images that vLLM has resized, in GiB. Default: vLLM's.", "[0, inf)"
    ] = None
    vllm_engine_kwargs: Annotated[
        dict[str, Any], "More fields of vLLM's EngineArgs, as JSON: '{\"max_num_batched_tokens\": 8192}'."
    ] = field(default_factory=dict)


@dataclass
class ServerOptions(VllmOptions):
    """Rollout server"""

    vllm_gpu_memory_utilization: Annotated[float, "Share of GPU memory for vLLM.", "(0, 1]"] = 0.9
    host: Annotated[str, "Address to listen on; 0.0.0.0: all network interfaces."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0: a free one.", "[0, 65535]"] = 8000
    api_key: Annotated[
        str | None,
        "API key that requests must have. Default: MEGASWIFT_API_KEY, else the key in "
        "~/.config/megaswift/rollout.key, which is created if missing and read by the user's runs.",
    ] = None
    infer_backend: Annotated[
        Literal["transformers", "vllm"] | None, "Inference engine. Default: vllm if it is installed."
    ] = None
    vllm_enable_return_routed_experts: Annotated[
        bool, "MoE: return the chosen experts, for --router_replay_mode R3."
    ] = False
    vllm_data_parallel_size: Annotated[int, "Number of engines; a request goes to the least busy one.", "[1, inf)"] = 1
    allowed_local_media_path: Annotated[
        str | None, "Folder whose images and audios requests may name by `path`. Default: none; they send them."
    ] = None
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], "Log level of the server."] = "info"


@dataclass
class EngineOptions(VllmOptions):
    """Generation"""

    use_vllm: Annotated[
        bool | None, "Generate with vLLM, else with transformers. Default: true if vLLM is installed."
    ] = None
    vllm_mode: Annotated[
        Literal["colocate", "server"] | None,
        "vLLM in the training processes, or in a `swift rollout`. Default: server if an address is set.",
    ] = None
    rollout_num_gpus: Annotated[
        int,
        "GPUs of this node that serve rollouts: the command starts one `swift rollout` server for each "
        "--vllm_tensor_parallel_size of them, and ends with them. Without GPUs: processes. 0: no servers.",
        "[0, inf)",
    ] = 0
    vllm_server_host: Annotated[list[str], "Hosts of the servers. Default: 127.0.0.1."] = field(default_factory=list)
    vllm_server_port: Annotated[list[int], "Port of each server, or one for all.", "[1, 65535]"] = field(
        default_factory=lambda: [8000]
    )
    vllm_server_base_url: Annotated[
        list[str], "Addresses of the servers (http://host:port), instead of hosts and ports."
    ] = field(default_factory=list)
    vllm_server_api_key: Annotated[
        str | None, "API key of the servers. Default: that of `swift rollout` on this machine."
    ] = None
    vllm_server_timeout: Annotated[
        float,
        "Seconds to wait for the servers at the start, and for another run to release them.",
        "(0, 1e9]",
    ] = 240.0
    server_reconnect_timeout: Annotated[
        float,
        "Seconds to wait for a lost server during training, below --ddp_timeout; 0: the run fails.",
        "[0, 1e9]",
    ] = 0.0
    vllm_gpu_memory_utilization: Annotated[
        float | None,
        "Share of GPU memory for vLLM in the training processes. Default: what training leaves.",
        "(0, 1]",
    ] = None
    sleep_level: Annotated[
        int | None,
        "What vLLM frees during training. 0: nothing; 1: its cache, and its weights move to host memory; 2: "
        "both. Default: 0 in a server, and where GRPO's training and vLLM are known to fit at once; else 2, or 1 with "
        "--vllm_enable_lora true.",
        "[0, 2]",
    ] = None
    offload_model: Annotated[
        bool | None,
        "Keep the trained model in host memory during generation. Default: true if vLLM in the training "
        "processes needs the room.",
    ] = None
    offload_optimizer: Annotated[
        bool | None, "Keep the optimizer's state in host memory during generation and weight sync."
    ] = None


def engine_kind(options: EngineOptions) -> str:
    """Return what generates: server, vllm (in the training processes) or transformers (likewise)."""
    if options.vllm_mode == "server" or options.vllm_server_host or options.vllm_server_base_url:
        return "server"
    is_installed = importlib.util.find_spec("vllm") is not None
    uses_vllm = is_installed if options.use_vllm is None else options.use_vllm
    return "vllm" if uses_vllm or options.vllm_mode == "colocate" else "transformers"


@dataclass
class TrainerTurnOptions:
    """Turns, which the training run plays: it is refused if its own flags differ"""

    external_plugins: Annotated[list[str], "Python files of the run's plugins. The server does not read them."] = field(
        default_factory=list
    )
    multi_turn_scheduler: Annotated[str | None, "Scheduler that a training run must have."] = None
    max_turns: Annotated[int | None, "Maximum turns that a training run must have.", "(0, inf)"] = None
    gym_env: Annotated[str | None, "Environment that a training run must have."] = None
    use_gym_env: Annotated[bool | None, "Whether a training run must use the rewards of environments."] = None


@dataclass
class RolloutOptions(ModelOptions, ServerOptions, TrainerTurnOptions):
    """swift rollout"""
