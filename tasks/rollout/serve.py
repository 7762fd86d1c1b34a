"""`swift rollout`: a generation server that loads new weights from training runs.

swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_tensor_parallel_size 2 --port 8000
"""

import importlib.util
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ...bridge.checkpoint.hub import get_max_positions, get_vocab_size, model_folder, read_config
from ...bridge.checkpoint.rope_scaling import scaled_folder
from ...bridge.checkpoint.safetensors_io import check_headers
from ..options.rollout import RolloutOptions, ServerOptions
from ..system.atomic_dir import loading
from .compatibility import turn_flags
from .keys import server_key

if TYPE_CHECKING:
    from .audio_bodies import AudioReader
    from .image_bodies import ImageReader
    from .video_bodies import VideoReader

LOOPBACK = ("127.0.0.1", "localhost", "::1")
VLLM_FLAGS = (
    "vllm_max_model_len", "vllm_max_num_seqs", "vllm_enforce_eager", "vllm_enable_prefix_caching",
    "vllm_gpu_memory_utilization", "vllm_engine_kwargs", "vllm_quantization",
    "vllm_limit_mm_per_prompt", "vllm_mm_processor_cache_gb",
)  # fmt: skip


def run(options: RolloutOptions, _sources: dict[str, str] | None = None) -> None:
    """Serve until the process is terminated. Raises ValueError, FileNotFoundError or ImportError."""
    kind = choose_backend(options)
    folder = model_folder(options)
    check_headers(folder)
    folder = scaled_folder(folder, options)
    sock = bind(options.host, options.port)  # fails before the model is loaded, which can take minutes
    url = f"http://{options.host}:{sock.getsockname()[1]}"
    key, key_note = server_key(options.api_key)

    import uvicorn

    from ..run.context import dtype_of
    from .connections import connection_settings
    from .server import Server
    from .vllm_images import check_model

    hf_config = read_config(folder)
    dtype = dtype_of(options, hf_config)
    if kind == "vllm":
        check_model("--infer_backend vllm", hf_config)
        from .vllm_async import VllmBackend

        backend = VllmBackend(folder, options, dtype)
    else:
        from .in_process import InProcessBackend
        from .transformers_engine import TransformersEngine

        with loading(folder, has_progress_bar=True):
            backend = InProcessBackend(TransformersEngine(folder, dtype=dtype), kind)
    images, videos, audios = _media_readers(folder, kind, options)
    server = Server(
        backend,
        options.model,
        key,
        vocab_size=get_vocab_size(hf_config),
        positions=options.vllm_max_model_len or get_max_positions(hf_config),
        hosts=hosts_of(options.host),
        turns=turn_flags(options),
        images=images,
        videos=videos,
        audios=audios,
        most_images=options.vllm_limit_mm_per_prompt.get("image"),
    )
    _enable_log(options.log_level)
    config = uvicorn.Config(
        server.app,
        **connection_settings(),
        # uvicorn's own lines of its start and end say less than those of this function.
        log_level="warning" if options.log_level == "info" else options.log_level,
        access_log=options.log_level == "debug",
        timeout_keep_alive=75,  # longer than the clients' limit
        timeout_graceful_shutdown=5,
    )
    if turns := [*turn_flags(options), *(f"--external_plugins {file}" for file in options.external_plugins)]:
        print(f"note: {' '.join(turns)}: the training run plays the turns. It must have these flags, too.")
    print(key_note)
    print(f"Rollout server: {options.model} by {kind} on {url}", flush=True)
    uvicorn.Server(config).run(sockets=[sock])


def _media_readers(
    folder: Path, kind: str, options: RolloutOptions
) -> "tuple[ImageReader | None, VideoReader | None, AudioReader | None]":
    """Return the readers of media in requests; None for what the model does not take. Raises ValueError."""
    from ...bridge.checkpoint.pretrained import load_tokenizer
    from ...templates.media.processor import VisionProcessor
    from ...templates.options import MediaOptions
    from .audio_bodies import AudioReader
    from .image_bodies import ImageReader
    from .video_bodies import VideoReader
    from .vllm_images import takes_images, takes_videos

    allowed, limits = options.allowed_local_media_path, options.vllm_limit_mm_per_prompt
    vision = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    if allowed and vision is None:
        raise ValueError(f"--allowed_local_media_path {allowed}: the model takes no images or audios. Remove it.")
    if allowed and not Path(allowed).expanduser().is_dir():
        raise ValueError(f"--allowed_local_media_path {allowed}: no such folder. Set one that exists.")
    if vision is None:
        return None, None, None
    allowed_folder = Path(allowed).expanduser() if allowed else None
    audios = AudioReader(vision, allowed_folder, limits.get("audio")) if vision.audio is not None else None
    images = ImageReader(vision, allowed_folder) if vision.family.image is not None else None
    if kind == "vllm" and not takes_images(vision.model_type):
        images = None
    if vision.family.video is None:
        return images, None, audios
    if kind == "transformers":
        return images, VideoReader(vision), audios
    # vLLM reserves memory for the longest video where it takes any.
    most = limits.get("video", 0)
    if most and not takes_videos(vision):
        raise ValueError(
            f"--vllm_limit_mm_per_prompt {limits}: vLLM takes videos of Qwen3-VL and Qwen3.5 alone. Set "
            "--infer_backend transformers, or remove video."
        )
    return images, VideoReader(vision, most), audios


def choose_backend(options: RolloutOptions) -> str:
    """Return transformers or vllm. Raises ImportError or ValueError for inconsistent options."""
    is_installed = importlib.util.find_spec("vllm") is not None
    kind = options.infer_backend or ("vllm" if is_installed else "transformers")
    if kind == "vllm" and not is_installed:
        raise ImportError(
            "--infer_backend vllm: vLLM is not installed. Install it (on NVIDIA GPUs: pip install 'megaswift[vllm]'), "
            "or use --infer_backend transformers."
        )
    if kind == "transformers":
        if options.vllm_enable_lora:
            raise ValueError(
                "--vllm_enable_lora true: transformers cannot load adapters separately. Remove the flag, also from the "
                "training, or install vLLM."
            )
        for flag in ("vllm_tensor_parallel_size", "vllm_data_parallel_size"):
            if getattr(options, flag) != 1:
                raise ValueError(
                    f"--{flag} {getattr(options, flag)}: with --infer_backend transformers the server is one process. "
                    "Remove the flag, or install vLLM."
                )
        for flag in VLLM_FLAGS:
            if (value := getattr(options, flag)) != getattr(ServerOptions(), flag):
                raise ValueError(f"--{flag} {value}: only vLLM reads it, not transformers. Remove it, or install vLLM.")
        if options.vllm_enable_return_routed_experts:
            raise ValueError(
                "--vllm_enable_return_routed_experts true: --infer_backend transformers always returns experts on "
                "request. Remove the flag."
            )
    return kind


def hosts_of(host: str) -> list[str] | None:
    """Return the host names of a server on the loopback interface; None (any name) where other machines reach it."""
    if host not in LOOPBACK and not host.startswith("127."):
        return None
    return sorted({"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host.lower()})


def _enable_log(level: str) -> None:
    """Print the server's log, such as the claims of runs."""
    log = logging.getLogger("megaswift.rollout")
    log.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port (0: any free port), not listening yet. Raises ValueError where binding fails."""
    if not 0 <= port <= 65535:  # getaddrinfo takes a port modulo 65536
        raise ValueError(f"--port {port}: not a port. Set one from 1 to 65535, or 0 for any free one.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port} cannot listen there ({error.strerror}). Set another --port, or end the "
            "process that uses it."
        ) from error
    return sock
