"""Translation of architecture and options into megatron-core's TransformerConfig."""

import functools
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from .. import runtime
from ..kernels import usable
from ..layers.mlp import XIELU
from ..mapping import fp8
from ..mapping.architecture import Architecture, SparseAttention, TransformerArgs
from ..options import BuildOptions
from ..pipeline_layout import decoder_layout, divide_layers, virtual_pipeline_size
from .kernel_selection import Kernels

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu2": squared_relu,
    "xielu": XIELU,  # a module in each layer: see layers/spec.py
}


def transformer_config(
    architecture: Architecture, options: BuildOptions, kernels: Kernels, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron-core's config for an architecture, its parallel layout, kernels and numerics."""
    on_gpu = torch.cuda.is_available()
    is_pipelined = options.pipeline_model_parallel_size > 1
    virtual_pipeline = virtual_pipeline_size(options)
    overlap_p2p = options.overlap_p2p_comm and virtual_pipeline is not None
    # Its errors name flags; megatron-core asserts.
    layer_counts = divide_layers(options, architecture.transformer["num_layers"])
    recomputes_mlp = _recomputes_mlp(options)
    if architecture.sparse:
        _check_selections(architecture.sparse, layer_counts)
    if is_pipelined and architecture.is_one_stage:
        raise ValueError(
            f"--pipeline_model_parallel_size {options.pipeline_model_parallel_size}: layers of this model read the "
            "embeddings or other layers' keys (hidden_size_per_layer_input, num_kv_shared_layers). Set 1"
        )
    last_stage = options.decoder_last_pipeline_num_layers
    if options.pipeline_model_parallel_size == 2 and options.decoder_first_pipeline_num_layers is not None:
        last_stage = None  # follows from the first; with VPP megatron-core would divide by the stages between them
    settings: TransformerArgs = {
        **architecture.transformer,
        "activation_func": _activation(architecture),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,  # every weight comes from the checkpoint
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "sequence_parallel": options.sequence_parallel,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_pipeline,
        "num_layers_in_first_pipeline_stage": options.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": last_stage,
        "account_for_embedding_in_pipeline_split": options.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": options.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": decoder_layout(options),
        "microbatch_group_size_per_vp_stage": options.microbatch_group_size_per_vp_stage,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p if options.batch_p2p_comm is None else options.batch_p2p_comm,
        "batch_p2p_sync": False,  # only PyTorch before 1.13 needs it (pytorch#82450)
        "deallocate_pipeline_outputs": is_pipelined,
        "context_parallel_size": options.context_parallel_size,
        "cp_comm_type": kernels.context_exchange(options),
        "attention_dropout": options.attention_dropout,
        "hidden_dropout": options.hidden_dropout,
        # It uses torch.compile, which is slow to start; a single addition is as fast without it.
        "bias_dropout_fusion": options.bias_dropout_fusion
        and on_gpu
        and (architecture.output_bias or architecture.mlp_bias or options.hidden_dropout > 0),
        # megatron-core's fused GELU is the tanh approximation.
        "bias_activation_fusion": options.bias_activation_fusion
        and on_gpu
        and architecture.transformer["activation_func"] == "silu"
        and architecture.gate_scale == 1.0,
        # Transformer Engine's kernel, for heads that ours (kernels/qkv.py) does not support.
        "apply_rope_fusion": options.apply_rope_fusion and kernels.attention == "transformer_engine",
        "gradient_accumulation_fusion": False,  # see layers/spec.py
        "cross_entropy_loss_fusion": False,  # we compute the loss: see layers/logprobs.py
        "deterministic_mode": options.deterministic_mode,
        **fp8.transformer_args(options),
        **_recompute_settings(options, kernels, recomputes_mlp=recomputes_mlp),
    }
    if architecture.sparse and options.dsa_indexer_loss_coeff:
        settings |= {
            "dsa_indexer_loss_coeff": options.dsa_indexer_loss_coeff,
            "dsa_indexer_use_sparse_loss": options.dsa_indexer_use_sparse_loss,
            "experimental_attention_variant_loss_scale_func": DSAIndexerLossAutoScaler.set_loss_scale,
        }
    if "num_moe_experts" in settings:
        settings |= _moe_settings(options, kernels, settings)
        balancing, rule = settings["moe_router_load_balancing_type"], architecture.routing
        if balancing == "sinkhorn" and rule is not None and rule.expert_factors:
            raise ValueError(
                "--moe_router_load_balancing_type sinkhorn: it leaves out this model's factors on experts' weights. "
                "Remove it"
            )
        differs = architecture.expert_norms or architecture.expert_latent is not None
        if differs and settings["moe_shared_expert_overlap"]:
            raise ValueError(
                "--moe_shared_expert_overlap true: the shared expert of this model has another input than the experts "
                "to which tokens are dispatched. Remove it"
            )
    if kernels.attention == "transformer_engine":
        settings["attention_backend"] = kernels.attention_backend(options)
    settings |= options.megatron_extra_kwargs  # pyright: ignore[reportAssignmentType]
    config = (MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig)(**settings)
    # Attributes of our own, for layers/.
    config.architecture = architecture  # type: ignore[attr-defined]
    config.attention_kernel = kernels.attention  # type: ignore[attr-defined]
    config.recomputes_mlp = recomputes_mlp  # type: ignore[attr-defined]
    config.fuses_permutation = kernels.permutation == "own"  # type: ignore[attr-defined]
    has_fused_kernels = usable(torch.empty(0, device=runtime.device()))
    config.fuse_expert_activation = options.bias_activation_fusion and on_gpu  # type: ignore[attr-defined]
    config.fuse_heads = options.apply_rope_fusion and has_fused_kernels  # type: ignore[attr-defined]
    config.accumulate_in_experts = options.gradient_accumulation_fusion and has_fused_kernels  # type: ignore[attr-defined]
    config.accumulate_in_matmul = options.gradient_accumulation_fusion and on_gpu  # type: ignore[attr-defined]
    # megatron-core's fused SwiGLU uses torch.compile. Ours (layers/mlp.py) replaces Transformer Engine's.
    is_fused = config.bias_activation_fusion and config.gated_linear_unit
    config.use_te_activation_func = is_fused or config.activation_func is XIELU
    return config


def _activation(architecture: Architecture) -> Callable[[torch.Tensor], torch.Tensor]:
    activation, scale = ACTIVATIONS[architecture.transformer["activation_func"]], architecture.gate_scale
    return activation if scale == 1.0 else functools.partial(_scaled, activation, scale)


def _scaled(activation: Callable[[torch.Tensor], torch.Tensor], scale: float, gate: torch.Tensor) -> torch.Tensor:
    return activation(gate * scale)


def _check_selections(sparse: SparseAttention, layer_counts: list[int]) -> None:
    """Raise ValueError if a pipeline stage begins with a layer that attends to the keys selected in another stage."""
    for first in accumulate(layer_counts[:-1]):
        if first < len(sparse.sources) and sparse.sources[first] != first:
            selecting = sorted(set(sparse.sources))
            raise ValueError(
                f"--pipeline_model_parallel_size: a stage begins with layer {first}, which attends to the keys that "
                f"layer {sparse.sources[first]} selects, in another stage. Divide the layers so that stages begin with "
                f"any of {selecting}, by --pipeline_model_parallel_layout or --decoder_first_pipeline_num_layers"
            )


def _recomputes_mlp(options: BuildOptions) -> bool:
    """Return whether MLPs recompute their activations themselves (layers/mlp.py), in place of megatron-core.

    Products in FP8 keep copies of their inputs, activations that move to the host must not be discarded before, and
    norms that are recomputed too come only after it.
    """
    modules = options.recompute_modules if options.recompute_granularity == "selective" else []
    is_alone = "layernorm" not in modules and options.fp8_format is None and not options.cpu_offloading
    return "mlp" in modules and is_alone


def _recompute_settings(options: BuildOptions, kernels: Kernels, *, recomputes_mlp: bool) -> TransformerArgs:
    if options.recompute_granularity == "none":
        return {}
    if options.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method,
            "recompute_num_layers": options.recompute_num_layers,
        }
    # Flash kernels recompute the scores themselves, so recomputing core attention would save nothing.
    keeps_scores = kernels.attention == "transformer_engine" and options.attention_backend == "unfused"
    skipped = {"core_attn": not keeps_scores, "mlp": recomputes_mlp}
    modules = [module for module in options.recompute_modules if not skipped.get(module)]
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _moe_settings(options: BuildOptions, kernels: Kernels, settings: TransformerArgs) -> TransformerArgs:
    has_shared_expert = settings.get("moe_shared_expert_intermediate_size") is not None
    balancing = settings.get("moe_router_load_balancing_type", "aux_loss")
    return {
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_parallel_size,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        "moe_permute_fusion": kernels.permutation == "transformer_engine",
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap and has_shared_expert,
        "moe_token_dispatcher_type": kernels.dispatcher,
        "moe_router_dtype": None if options.moe_router_dtype == "none" else options.moe_router_dtype,
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type or balancing,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_z_loss_coeff": options.moe_z_loss_coeff,
        "moe_expert_capacity_factor": options.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": options.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": options.moe_token_drop_policy,
    }
