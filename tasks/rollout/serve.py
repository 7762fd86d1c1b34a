"""`swift rollout`: a model that generates for trainings, which give it their new weights as they learn.

swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_tensor_parallel_size 2 --port 8000
"""

import importlib.util
import logging
import socket

from ...bridge.checkpoint.hub import model_folder, positions_of, read_config, vocab_size_of
from ...bridge.checkpoint.safetensors_io import check_headers
from ..options.rollout import RolloutOptions, ServerOptions
from ..system.atomic_dir import loading
from .keys import server_key

LOCAL = ("127.0.0.1", "localhost", "::1")
OF_VLLM = (
    "vllm_max_model_len", "vllm_max_num_seqs", "vllm_enforce_eager", "vllm_enable_prefix_caching",
    "vllm_gpu_memory_utilization",
)  # fmt: skip


def run(options: RolloutOptions, _sources: dict[str, str] | None = None) -> None:
    """Serve until the process is told to end. Raises ValueError, FileNotFoundError or ImportError, with its cure."""
    kind = checked_backend(options)
    folder = model_folder(options)
    check_headers(folder)
    sock = bound(options.host, options.port)  # before the model is read, which may take minutes
    at = f"http://{options.host}:{sock.getsockname()[1]}"
    key, about_key = server_key(options.api_key)

    import uvicorn

    from ..run.context import dtype_of
    from .connections import connection_settings
    from .server import Server

    described = read_config(folder)
    dtype = dtype_of(options, described)
    if kind == "vllm":
        from .vllm_async import VllmBackend

        backend = VllmBackend(folder, options, dtype)
    else:
        from .in_process import InProcess
        from .transformers_engine import TransformersEngine

        with loading(folder, by_bar=True):
            backend = InProcess(TransformersEngine(folder, dtype=dtype), kind)
    server = Server(
        backend,
        options.model,
        key,
        vocab_size=vocab_size_of(described),
        positions=options.vllm_max_model_len or positions_of(described),
        hosts=hosts_of(options.host),
    )
    _show_log(options.log_level)
    config = uvicorn.Config(
        server.app,
        **connection_settings(),
        log_level=options.log_level,
        access_log=options.log_level == "debug",
        timeout_keep_alive=75,  # longer than clients keep idle connections
        timeout_graceful_shutdown=5,
    )
    print(about_key)
    print(f"Rollout server: {options.model} by {kind} on {at}", flush=True)
    uvicorn.Server(config).run(sockets=[sock])


def checked_backend(options: RolloutOptions) -> str:
    """transformers or vllm. Raises ImportError or ValueError for what cannot be."""
    there = importlib.util.find_spec("vllm") is not None
    kind = options.infer_backend or ("vllm" if there else "transformers")
    if kind == "vllm" and not there:
        raise ImportError(
            "--infer_backend vllm: vLLM is not installed. Install it (on NVIDIA GPUs: pip install 'megaswift[vllm]'), "
            "or use --infer_backend transformers."
        )
    if kind == "transformers":
        if options.vllm_enable_lora:
            raise ValueError(
                "--vllm_enable_lora true: only vLLM takes adapters alone, and transformers generates here. Leave it "
                "out, here and in the training, or install vLLM."
            )
        for flag in ("vllm_tensor_parallel_size", "vllm_data_parallel_size"):
            if getattr(options, flag) != 1:
                raise ValueError(
                    f"--{flag} {getattr(options, flag)}: with --infer_backend transformers the server is one process. "
                    "Leave it out, or install vLLM."
                )
        for flag in OF_VLLM:
            if (value := getattr(options, flag)) != getattr(ServerOptions(), flag):
                raise ValueError(
                    f"--{flag} {value}: is for vLLM, and transformers generates here. Leave it out, or install vLLM."
                )
        if options.vllm_enable_return_routed_experts:
            raise ValueError(
                "--vllm_enable_return_routed_experts true: with --infer_backend transformers the server says it "
                "whenever it is asked. Leave it out."
            )
    return kind


def hosts_of(host: str) -> list[str] | None:
    """Names by which clients on this machine call a server that listens at `host`; None where others reach it, who may
    call it by any name."""
    if host not in LOCAL and not host.startswith("127."):
        return None
    return sorted({"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host.lower()})


def _show_log(level: str) -> None:
    """Print what the server's own logger says, such as which run has claimed it."""
    log = logging.getLogger("megaswift.rollout")
    log.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False


def bound(host: str, port: int) -> socket.socket:
    """A socket on the port (0: on one that is free); it takes no connection yet. Raises ValueError where it cannot be
    had."""
    if not 0 <= port <= 65535:  # getaddrinfo takes the rest of a division by 65536
        raise ValueError(f"--port {port}: a port is from 0, for any that is free, to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port} cannot be listened on ({error.strerror}). Give another --port, or end what "
            "has it."
        ) from error
    return sock
