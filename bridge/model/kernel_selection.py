"""Flags that choose kernels are preferences: here the nearest that this machine has is found, and named."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from megatron.core.transformer.enums import AttnBackend

from .. import runtime
from ..kernels import usable
from ..mapping import fp8
from ..mapping.param_mapping import Architecture
from ..options import BuildOptions, KernelOptions, ParallelOptions


@dataclass(frozen=True)
class Kernels:
    """The kernels that run on this machine."""

    transformer_engine: bool
    attention: str  # "transformer_engine", "varlen" or "sdpa": see layers/attention.py
    dispatcher: str | None = None  # how tokens reach their experts; None: the model has none
    permutation: str | None = None  # of tokens for their experts: "own", "transformer_engine" or "plain"
    fp8: str | None = None  # its format and scaling; None: nothing is computed in it

    def attention_backend(self, options: KernelOptions) -> AttnBackend:
        """Transformer Engine's kernel: flash only where the flash-attn package is there, else its own choice."""
        name = options.attention_backend
        if name in ("unfused", "fused"):
            return AttnBackend[name]
        return AttnBackend.flash if name.startswith("flash") and find_spec("flash_attn") else AttnBackend.auto

    def context_exchange(self, options: ParallelOptions) -> str:
        """Return the exchange of context parallelism: ours gathers keys and values; `a2a+p2p` needs more groups."""
        if self.attention != "transformer_engine":
            return "all_gather"
        return options.cp_comm_type if options.cp_comm_type in ("all_gather", "a2a") else "p2p"

    def __str__(self) -> str:
        layers = "Transformer Engine" if self.transformer_engine else "built-in"
        attention = {
            "transformer_engine": "Transformer Engine (cuDNN or flash-attn)",
            "varlen": "built-in kernel for packed documents, or PyTorch's flash attention",
            "sdpa": "PyTorch's scaled_dot_product_attention, one document at a time",
        }[self.attention]
        text = f"layers: {layers}; attention: {attention}"
        if self.fp8:
            text += f"; FP8 ({self.fp8}): matrices of attention and dense MLPs; bf16: all else, experts too"
        if self.dispatcher is None:
            return text
        permutation = {"own": "fused", "transformer_engine": "Transformer Engine's", "plain": "plain", None: "no"}
        return f"{text}; experts: {self.dispatcher} dispatcher, {permutation[self.permutation]} permutation"


def choose_kernels(options: BuildOptions, architecture: Architecture, dtype: torch.dtype) -> Kernels:
    """Return the nearest to the options that this machine has, for a model of `architecture` in `dtype`.

    Raises ValueError where Transformer Engine is asked for by name, or FP8, and cannot be used.
    """
    on_gpu = torch.cuda.is_available()
    installed = on_gpu and find_spec("transformer_engine_torch") is not None
    by_name = options.transformer_impl == "transformer_engine"
    if by_name and not installed:
        missing = "it is not installed: pip install 'megaswift[gpu]'" if on_gpu else "no GPU is visible"
        raise ValueError(f"--transformer_impl transformer_engine: {missing} (or use --transformer_impl local)")
    # By itself for FP8 alone: its other layers are no faster than ours and take more of the host's time (and in fp32
    # its products are in TF32, with a thousandth of error).
    engine = by_name or (options.transformer_impl == "auto" and installed and bool(options.fp8_format))
    fp8.check(options, dtype, transformer_engine=engine)
    precision = f"{options.fp8_format}, {options.fp8_recipe}" if options.fp8_format else None
    # Flash kernels are for half precision, and heads in multiples of eight.
    if dtype == torch.float32 or not on_gpu or any(size % 8 for size in _head_sizes(architecture)):
        attention = "sdpa"
    elif installed and "local" not in (options.transformer_impl, options.attention_backend) and not architecture.sinks:
        # It has no sinks for packed documents.
        attention = "transformer_engine"
    else:
        attention = "sdpa" if options.attention_backend == "unfused" else "varlen"
    if "num_moe_experts" not in architecture.transformer:
        return Kernels(engine, attention, fp8=precision)
    dispatcher = options.moe_token_dispatcher_type
    spread = options.tensor_model_parallel_size * options.expert_model_parallel_size > 1
    if dispatcher == "flex" and not (spread and find_spec("deep_ep")):
        dispatcher = "alltoall"
    return Kernels(
        engine, attention, dispatcher, _permutation(options, dispatcher, transformer_engine=installed), precision
    )


def _permutation(options: BuildOptions, dispatcher: str, *, transformer_engine: bool) -> str:
    if not options.moe_permute_fusion:
        return "plain"
    # Ours is for tokens that each have all of their experts.
    has_all_experts = (
        options.moe_expert_capacity_factor is None and options.moe_router_load_balancing_type != "sinkhorn"
    )
    if dispatcher == "alltoall" and has_all_experts and usable(torch.empty(0, device=runtime.device())):
        return "own"
    return "transformer_engine" if transformer_engine else "plain"


def _head_sizes(architecture: Architecture) -> tuple[int, ...]:
    """Return the head sizes of keys and of values."""
    about = architecture.transformer
    if about.get("multi_latent_attention"):
        return about["qk_head_dim"] + about["qk_pos_emb_head_dim"], about["v_head_dim"]
    return (about["kv_channels"],)
