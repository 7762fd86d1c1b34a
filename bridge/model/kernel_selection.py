"""Choice of kernels: flags are preferences, and the closest available kernels are selected and reported."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from .. import cudnn_library, runtime
from ..kernels import flash_attention, usable
from ..layers.fla_kernels import mixer_kernels
from ..mapping import fp8
from ..mapping.architecture import MIXERS, Architecture
from ..options import BuildOptions, KernelOptions, ParallelOptions

MIXER_KERNELS = {
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
    "torch": "plain PyTorch",
    "missing": "plain PyTorch, since flash-linear-attention is NOT INSTALLED",
}


@dataclass(frozen=True)
class Kernels:
    """Kernels selected for this machine."""

    transformer_engine: bool
    attention: str  # "flash", "transformer_engine", "varlen" or "sdpa": see layers/attention.py
    dispatcher: str | None = None  # token dispatcher; None: no experts
    permutation: str | None = None  # token permutation: "own", "transformer_engine" or "plain"
    fp8: str | None = None  # format and recipe; None: no FP8
    mixers: tuple[tuple[str, str], ...] = ()  # for each kind of mixer but attention, its noun and its `mixer_kernels`
    reads_peers: bool = False  # GPUs read their experts' tokens from each other's memory; known of a built model
    selected_keys: int | None = None  # keys that a lightning indexer selects for a query; None: there is no indexer
    cudnn_fault: str | None = None  # the reason for which Transformer Engine's attention is not used

    @property
    def warnings(self) -> list[str]:
        """Return a line per package that is missing or wrong and makes this model slow, with its cure."""
        lines = []
        if self.cudnn_fault:
            lines.append(
                f"warning: Transformer Engine is not used: {self.cudnn_fault}. Take the folder of the other cuDNN out "
                "of LD_LIBRARY_PATH, or install PyTorch's: pip install nvidia-cudnn-cu13 (cu12 for CUDA 12)"
            )
        if missing := [noun for noun, kernels in self.mixers if kernels == "missing"]:
            lines.append(
                f"warning: flash-linear-attention is not installed: this model's {' and '.join(missing)} run in plain "
                "PyTorch, much slower than by its kernels. Install it: pip install flash-linear-attention"
            )
        return lines

    def attention_backend(self, options: KernelOptions) -> AttnBackend:
        """Return Transformer Engine's backend: flash only if flash-attn 2 is installed, else its automatic choice."""
        name = options.attention_backend
        if name in ("unfused", "fused"):
            return AttnBackend[name]
        return AttnBackend.flash if name.startswith("flash") and find_spec("flash_attn_2_cuda") else AttnBackend.auto

    def context_exchange(self, options: ParallelOptions) -> str:
        """Return context parallelism's cp_comm_type: ours gathers keys and values; `a2a+p2p` needs more groups."""
        if self.attention != "transformer_engine":
            return "all_gather"
        return options.cp_comm_type if options.cp_comm_type in ("all_gather", "a2a") else "p2p"

    def __str__(self) -> str:
        layers = "Transformer Engine" if self.transformer_engine else "built-in"
        attention = {
            "flash": "FlashAttention-4",
            "transformer_engine": "Transformer Engine (cuDNN or flash-attn)",
            "varlen": "built-in kernel for packed documents, or PyTorch's flash attention",
            "sdpa": "PyTorch's scaled_dot_product_attention, one document at a time",
        }[self.attention]
        text = f"layers: {layers}; attention: {attention}"
        if self.selected_keys:
            text += f"; of documents beyond {self.selected_keys} tokens: plain PyTorch, to selected keys"
        for noun, kernels in self.mixers:
            text += f"; {noun}: {MIXER_KERNELS[kernels]}"
        if self.fp8:
            text += f"; FP8 ({self.fp8}): matrices of attention and dense MLPs; bf16: all else, experts too"
        if self.dispatcher is None:
            return text
        permutation = {"own": "fused", "transformer_engine": "Transformer Engine's", "plain": "plain", None: "no"}
        dispatcher = "peer memory" if self.reads_peers else self.dispatcher
        return f"{text}; experts: {dispatcher} dispatcher, {permutation[self.permutation]} permutation"


def choose_kernels(options: BuildOptions, architecture: Architecture, dtype: torch.dtype) -> Kernels:
    """Select the available kernels closest to the options, for a model of `architecture` in `dtype`.

    Raises ValueError if Transformer Engine or FP8 is requested explicitly and cannot be used.
    """
    on_gpu = torch.cuda.is_available()
    is_installed = on_gpu and find_spec("transformer_engine_torch") is not None
    cudnn_fault = cudnn_library.fault() if is_installed else None
    has_engine = is_installed and cudnn_fault is None
    is_explicit = options.transformer_impl == "transformer_engine"
    if is_explicit and not has_engine:
        reason = "it is not installed: pip install 'megaswift[gpu]'" if on_gpu else "no GPU is visible"
        reason = cudnn_fault or reason
        raise ValueError(f"--transformer_impl transformer_engine: {reason} (or use --transformer_impl local)")
    # "auto" uses it for FP8 only: otherwise its layers are no faster than ours and take more host time (and in fp32 its
    # products are in TF32, with an error of a thousandth).
    use_engine = is_explicit or (options.transformer_impl == "auto" and has_engine and bool(options.fp8_format))
    fp8.check(options, dtype, transformer_engine=use_engine)
    precision = f"{options.fp8_format}, {options.fp8_recipe}" if options.fp8_format else None
    # Flash kernels need half precision and head sizes that are multiples of eight.
    if dtype == torch.float32 or not on_gpu or any(size % 8 for size in _head_sizes(architecture)):
        attention = "sdpa"
    elif _uses_flash(options, architecture):
        attention = "flash"
    elif (
        has_engine
        and "local" not in (options.transformer_impl, options.attention_backend)
        and not architecture.sinks  # it supports no sinks for packed documents, and no caps on scores
        and architecture.score_cap is None
    ):
        attention = "transformer_engine"
    else:
        # Only the built-in kernel caps scores.
        has_kernel = architecture.score_cap is None or usable(torch.empty(0, device=runtime.device()))
        attention = "varlen" if has_kernel and options.attention_backend != "unfused" else "sdpa"
    selected_keys = architecture.sparse.topk if architecture.sparse else None
    mixers = _mixers(architecture, dtype, on_gpu=on_gpu, deterministic=options.deterministic_mode)
    kinds: dict[str, Any] = {"mixers": mixers, "selected_keys": selected_keys, "cudnn_fault": cudnn_fault}
    if "num_moe_experts" not in architecture.transformer:
        return Kernels(use_engine, attention, fp8=precision, **kinds)
    dispatcher = options.moe_token_dispatcher_type
    is_distributed = options.tensor_model_parallel_size * options.expert_model_parallel_size > 1
    if dispatcher == "flex" and not (is_distributed and find_spec("deep_ep")):
        dispatcher = "alltoall"
    permutation = _permutation(options, dispatcher, transformer_engine=has_engine)
    return Kernels(use_engine, attention, dispatcher, permutation, precision, **kinds)


def _mixers(
    architecture: Architecture, dtype: torch.dtype, *, on_gpu: bool, deterministic: bool
) -> tuple[tuple[str, str], ...]:
    nouns = dict.fromkeys(MIXERS[layer.mixer] for layer in architecture.layers if layer.mixer in MIXERS)
    choose = partial(mixer_kernels, dtype, on_gpu=on_gpu, deterministic=deterministic)
    return tuple((noun, choose(has_mamba_kernel=noun == MIXERS["mamba"])) for noun in nouns)


def _uses_flash(options: BuildOptions, architecture: Architecture) -> bool:
    """Return whether attention runs by FlashAttention-4, where it is installed.

    With context parallelism it needs gathered keys and values.
    """
    return (
        flash_attention.is_usable()
        and options.attention_backend in ("auto", "flash", "flash_4")
        and (options.context_parallel_size == 1 or prefers_gathered_keys(options.cp_comm_type, architecture))
        and not options.attention_dropout
        and architecture.score_cap is None
        and _head_sizes(architecture) in flash_attention.HEAD_SIZES
    )


def prefers_gathered_keys(cp_comm_type: str | None, architecture: Architecture) -> bool:
    """Return whether context parallelism gathers keys and values if a kernel is there that can use them.

    Latent attention has them for each head: by default Transformer Engine sends them in a ring.
    """
    is_latent = bool(architecture.transformer.get("multi_latent_attention"))
    return cp_comm_type == "all_gather" if cp_comm_type else not is_latent


def _permutation(options: BuildOptions, dispatcher: str, *, transformer_engine: bool) -> str:
    if not options.moe_permute_fusion:
        return "plain"
    # Ours needs tokens that keep all their experts.
    has_all_experts = (
        options.moe_expert_capacity_factor is None and options.moe_router_load_balancing_type != "sinkhorn"
    )
    if dispatcher == "alltoall" and has_all_experts and usable(torch.empty(0, device=runtime.device())):
        return "own"
    return "transformer_engine" if transformer_engine else "plain"


def _head_sizes(architecture: Architecture) -> tuple[int, int]:
    """Return the head sizes of keys and of values."""
    arguments = architecture.transformer
    if arguments.get("multi_latent_attention"):
        return arguments["qk_head_dim"] + arguments["qk_pos_emb_head_dim"], arguments["v_head_dim"]
    return arguments["kv_channels"], arguments["kv_channels"]
