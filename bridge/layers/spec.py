"""Layer specs: which module stands at each place of a transformer layer. Nothing of megatron-core is patched for it."""

from copy import copy
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from ..kernels import usable
from ..mapping.param_mapping import Architecture
from .attention import CoreAttention
from .experts import GroupedExperts, SharedExperts
from .gated_delta import GatedDeltaNet
from .mla import LatentAttention, LatentAttentionSubmodules
from .mlp import SwiGLU
from .moe import ExpertLayer
from .norm import Norm, NormBuilder, WideNorm
from .residual import BranchEnd
from .router import Router
from .self_attention import FusedSelfAttention, fuses


def block_spec(
    config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage (and virtual stage), dense or MoE as `config.moe_layer_freq` says."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        pattern = [False] * config.num_layers
    elif isinstance(frequency, int):
        pattern = [layer % frequency == 0 for layer in range(config.num_layers)]
    else:
        pattern = [bool(moe) for moe in frequency]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    last = first + get_num_layers_to_build(config, vp_stage=vp_stage)
    mixers = [layer.mixer for layer in config.architecture.layers]  # type: ignore[attr-defined]
    here = zip(pattern[first:last], mixers[first:last], strict=True)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, moe, transformer_engine, mixer) for moe, mixer in here],
        layer_norm=_norm(config, transformer_engine),
    )


def mtp_spec(config: TransformerConfig, *, transformer_engine: bool) -> tuple[ModuleSpec, NormBuilder]:
    """Return a layer of multi-token prediction, with experts where the model has any, and the norm to go with it."""
    norm = _norm(config, transformer_engine)
    return _layer(config, config.num_moe_experts is not None, transformer_engine), norm


def _engine_norms(config: TransformerConfig, transformer_engine: bool) -> bool:
    """Return whether to use Transformer Engine's norms: in FP8 they output the matrix's input. Else ours are faster."""
    if config.norms_apart:  # type: ignore[attr-defined]
        return False
    return transformer_engine and bool(config.fp8 or config.normalization != "RMSNorm" or not usable())


def _norm(config: TransformerConfig, transformer_engine: bool):
    if not _engine_norms(config, transformer_engine):
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer(config: TransformerConfig, moe: bool, transformer_engine: bool, mixer: str = "attention") -> ModuleSpec:
    norm = branch_norm = _norm(config, transformer_engine)
    recomputed = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or [])
    if norm is Norm and not recomputed:  # which frees all that a norm returns
        branch_norm = partial(Norm, has_residual=True)
    column, row = ColumnParallelLinear, RowParallelLinear
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column, row = TEColumnParallelLinear, TERowParallelLinear
    column, row = _accumulating(config, column), _accumulating(config, row)
    norm_column, norm_before = column, branch_norm  # a norm of its own, then the matrix
    if _engine_norms(config, transformer_engine):
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        # The norm lies inside the matrix's module.
        norm_column, norm_before = _accumulating(config, TELayerNormColumnParallelLinear), IdentityOp
    architecture: Architecture = config.architecture  # type: ignore[attr-defined]
    # megatron-core has one switch for the biases of all these; here each is set by itself.
    output = _biased(row, architecture.output_bias)
    fc1, fc2 = (_biased(linear, architecture.mlp_bias) for linear in (norm_column, row))
    q_norm, k_norm = _head_norms(config, norm)
    end = get_bias_dropout_add
    if architecture.post_norms or architecture.residual_scale != 1.0:
        end = ModuleSpec(
            module=BranchEnd,
            params={
                "config": config,
                "norm": norm if architecture.post_norms else None,
                "scale": architecture.residual_scale,
            },
        )
    attention = ModuleSpec(
        module=FusedSelfAttention if fuses(config) else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=norm_column,
            core_attention=CoreAttention,  # pyright: ignore[reportArgumentType]
            linear_proj=output,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )
    norm_input = norm_before
    if config.multi_latent_attention:
        # Two matrices follow the norm.
        attention = ModuleSpec(module=LatentAttention, submodules=LatentAttentionSubmodules(column, row, norm))
        norm_input = branch_norm
    elif mixer == "gated_delta_net":
        attention = ModuleSpec(module=GatedDeltaNet, params={"in_proj": norm_column, "out_proj": row})
    if moe:
        shared = partial(SharedExperts, submodules=MLPSubmodules(column, row, SwiGLU))
        mlp = partial(
            ExpertLayer, submodules=MoESubmodules(router=Router, experts=GroupedExperts, shared_experts=shared)
        )
    else:
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(fc1, fc2, SwiGLU))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_input,
            self_attention=attention,
            self_attn_bda=end,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=branch_norm if moe else norm_before,
            mlp=mlp,
            mlp_bda=end,  # pyright: ignore[reportArgumentType]
        ),
    )


def _head_norms(config: TransformerConfig, norm: NormBuilder) -> tuple[NormBuilder, NormBuilder]:
    """Return the norms of queries and of keys."""
    if not config.qk_layernorm:
        return IdentityOp, IdentityOp
    if config.architecture.qk_norm == "head":  # type: ignore[attr-defined]
        return norm, norm
    assert config.num_query_groups is not None
    return partial(WideNorm, config.num_attention_heads), partial(WideNorm, config.num_query_groups)


def _biased(linear, bias: bool):
    """`linear`, with a bias or without, whatever it is asked for."""

    def build(*args, **kwargs):
        return linear(*args, **kwargs | {"bias": bias})

    return build


def _accumulating(config: TransformerConfig, linear: type):
    """`linear`, adding its weight gradient to `main_grad` inside the matrix product where the builder chose that.

    The choice is not in `config.gradient_accumulation_fusion`, for megatron-core's own output layer would read it.
    """
    if not config.accumulate_in_matmul:  # type: ignore[attr-defined]
        return linear
    fused = copy(config)
    fused.gradient_accumulation_fusion = True

    def build(*args, config, **kwargs):
        return linear(*args, config=fused, **kwargs)

    return build
