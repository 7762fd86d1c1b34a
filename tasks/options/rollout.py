"""Options of `swift rollout`, and of a run that generates to reach its engine. No torch: the command line
imports this."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...bridge.options import ModelOptions


@dataclass
class VllmOptions:
    """vLLM"""

    vllm_tensor_parallel_size: Annotated[int, "GPUs that share an engine.", "[1, inf)"] = 1
    vllm_max_model_len: Annotated[
        int | None, "Longest prompt and completion together, in tokens; left out: the model's.", "[1, inf)"
    ] = None
    vllm_max_num_seqs: Annotated[int | None, "Completions at a time; left out: vLLM's own choice.", "[1, inf)"] = None
    vllm_enforce_eager: Annotated[bool, "No CUDA graphs and no compilation: starts sooner, generates slower."] = False
    vllm_enable_prefix_caching: Annotated[bool, "Compute the beginning that prompts share only once."] = True
    vllm_enable_lora: Annotated[
        bool,
        "vLLM has the adapter that is trained beside the weights that it loaded, and is sent the adapter alone; false: "
        "it is sent all weights, with the adapter in them.",
    ] = False
    vllm_max_lora_rank: Annotated[
        int | None,
        "Highest rank of an adapter that vLLM makes room for; left out: the run's rank, and 16 in a server.",
        "[1, 512]",
    ] = None


@dataclass
class ServerOptions(VllmOptions):
    """Rollout server"""

    vllm_gpu_memory_utilization: Annotated[float, "Share of a GPU's memory that vLLM may take.", "(0, 1]"] = 0.9
    host: Annotated[str, "Address to listen on; 0.0.0.0 lets other machines in."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0: one that is free.", "[0, 65535]"] = 8000
    api_key: Annotated[
        str | None,
        "Only who has this key is answered; left out: MEGASWIFT_API_KEY, else a key in the user's "
        "~/.config/megaswift/rollout.key, which is made where it is missing and which runs of the user read.",
    ] = None
    infer_backend: Annotated[
        Literal["transformers", "vllm"] | None, "What generates; left out: vLLM where it is installed."
    ] = None
    vllm_enable_return_routed_experts: Annotated[
        bool, "Of a mixture of experts: say which ones tokens went to, for trainings with --router_replay_mode R3."
    ] = False
    vllm_data_parallel_size: Annotated[
        int, "Engines side by side: a request goes to the one that has least to do.", "[1, inf)"
    ] = 1
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], "What the server prints."] = "info"


@dataclass
class EngineOptions(VllmOptions):
    """Generation"""

    use_vllm: Annotated[bool | None, "Generate by vLLM, else by transformers; left out: where it is installed."] = None
    vllm_mode: Annotated[
        Literal["colocate", "server"] | None,
        "vLLM in the training processes, or in a `swift rollout`; left out: server where an address of one is given.",
    ] = None
    vllm_server_host: Annotated[list[str], "Hosts of the servers; left out: 127.0.0.1."] = field(default_factory=list)
    vllm_server_port: Annotated[list[int], "The port of each of them, or one for all.", "[1, 65535]"] = field(
        default_factory=lambda: [8000]
    )
    vllm_server_base_url: Annotated[
        list[str], "Addresses of the servers (http://host:port), in place of hosts and ports."
    ] = field(default_factory=list)
    vllm_server_api_key: Annotated[str | None, "The key of the servers; left out: as --api_key of `swift rollout`."] = (
        None
    )
    vllm_server_timeout: Annotated[
        float,
        "Seconds to wait for the servers when the run begins, also for another run to let go of them.",
        "(0, 1e9]",
    ] = 240.0
    server_reconnect_timeout: Annotated[
        float,
        "Seconds, fewer than --ddp_timeout, to wait for a server that was lost while training; 0: the run ends with an "
        "error.",
        "[0, 1e9]",
    ] = 0.0
    vllm_gpu_memory_utilization: Annotated[
        float | None,
        "Share of a GPU's memory that vLLM in the training processes may take; left out: what these leave it.",
        "(0, 1]",
    ] = None
    sleep_level: Annotated[
        int | None,
        "What vLLM frees while the model trains: 0 nothing; 1 its cache, and its weights move to host memory; 2 both. "
        "Default: 0 in a server; in the training processes 2, or 1 with --vllm_enable_lora true.",
        "[0, 2]",
    ] = None
    offload_model: Annotated[
        bool | None,
        "Keep the trained model in the host's memory while completions are generated; left out: where vLLM in the "
        "training processes has not enough room else.",
    ] = None
    offload_optimizer: Annotated[
        bool | None, "The same for the optimizer's state, which also makes room for the weights' way to the engine."
    ] = None


@dataclass
class RolloutOptions(ModelOptions, ServerOptions):
    """swift rollout"""
