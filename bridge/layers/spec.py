"""Layer specs: the modules of each transformer layer. They need no patches of megatron-core."""

from copy import copy
from functools import partial
from typing import cast

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
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
from ..mapping.architecture import Architecture, Layer
from .attention import CoreAttention
from .deepstack import DeepStackLayer
from .experts import GroupedExperts, SharedExperts
from .gated_delta import GatedDeltaNet
from .kimi_delta import KimiDeltaAttention
from .layer_inputs import ScaledInputLayer
from .lightning import LightningAttention
from .mamba import Mamba2
from .mla import LatentAttention, LatentAttentionSubmodules
from .mlp import XIELU, RecomputedMLP, SwiGLU
from .moe import ExpertLayer
from .norm import Norm, NormBuilder, WideNorm
from .normed_experts import NormedExpertLayer
from .parallel_block import ParallelLayer, ParallelMixers
from .residual import NormedResidualLayer, ResidualAdd, ScaledLayer
from .router import Router
from .self_attention import FusedSelfAttention, LayerSelfAttention, heads_config, supports_fused_heads
from .shared_keys import KeySourceAttention, SharedKeyAttention
from .short_conv import ShortConv
from .sparse_attention import SparseLatentAttention


def block_spec(
    config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage (and virtual stage), dense or MoE by `config.moe_layer_freq`."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        pattern = [False] * config.num_layers
    elif isinstance(frequency, int):
        pattern = [layer % frequency == 0 for layer in range(config.num_layers)]
    else:
        pattern = [bool(moe) for moe in frequency]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    last = first + get_num_layers_to_build(config, vp_stage=vp_stage)
    layers: tuple[Layer, ...] = config.architecture.layers  # type: ignore[attr-defined]
    local_layers = zip(pattern[first:last], layers[first:last], strict=True)
    specs = [_layer_spec(config, moe, transformer_engine, layer) for moe, layer in local_layers]
    vision = config.architecture.vision  # type: ignore[attr-defined]
    for number, spec in enumerate(specs, first):
        if vision and number < len(vision.deep_layers):
            spec.module = DeepStackLayer
    return TransformerBlockSubmodules(
        layer_specs=specs,
        layer_norm=_norm_builder(config, transformer_engine),
    )


def mtp_spec(config: TransformerConfig, *, transformer_engine: bool) -> tuple[ModuleSpec, NormBuilder]:
    """Return the spec of a multi-token prediction layer, MoE if the model has experts, and its norm."""
    norm = _norm_builder(config, transformer_engine)
    return _layer_spec(config, config.num_moe_experts is not None, transformer_engine, Layer()), norm


def _uses_engine_norms(config: TransformerConfig, transformer_engine: bool) -> bool:
    """Return whether to use Transformer Engine's norms: with FP8 they output FP8, else megaswift's are faster."""
    architecture: Architecture = config.architecture  # type: ignore[attr-defined]
    is_centred = config.normalization != "RMSNorm"
    if config.separates_norms or (is_centred and not architecture.norm_bias):  # type: ignore[attr-defined]
        return False
    return transformer_engine and bool(config.fp8 or is_centred or not usable())


def _norm_builder(config: TransformerConfig, transformer_engine: bool):
    if not _uses_engine_norms(config, transformer_engine):
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer_spec(config: TransformerConfig, moe: bool, transformer_engine: bool, layer: Layer) -> ModuleSpec:
    norm = branch_norm = _norm_builder(config, transformer_engine)
    recomputes_norms = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or [])
    if norm is Norm and not recomputes_norms:  # recomputation frees all outputs of a norm
        branch_norm = partial(Norm, has_residual=True)
    column, row = ColumnParallelLinear, RowParallelLinear
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column, row = TEColumnParallelLinear, TERowParallelLinear
    column, row = _with_accumulation(config, column), _with_accumulation(config, row)
    norm_column, separate_norm = column, branch_norm  # a separate norm before the linear
    if _uses_engine_norms(config, transformer_engine):
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        # The linear's module includes the norm.
        norm_column, separate_norm = _with_accumulation(config, TELayerNormColumnParallelLinear), IdentityOp
    architecture: Architecture = config.architecture  # type: ignore[attr-defined]
    if not architecture.pre_norms:
        norm_column, separate_norm, branch_norm = column, IdentityOp, IdentityOp
    norm_input = separate_norm
    if architecture.parallel_block:  # two linears follow the norm, so it is separate
        norm_input, norm_column, separate_norm = branch_norm, column, IdentityOp
    if layer.mixer == "attention_and_mamba":
        norm_input, norm_column = branch_norm, column
    if layer.factors:  # the norm's output is the residual
        norm_input, norm_column, separate_norm, branch_norm = norm, column, norm, norm
    # megatron-core has one setting for the biases of all these linears; here each has its own.
    output = _with_bias(row, architecture.output_bias)
    fc1, fc2 = (_with_bias(linear, architecture.mlp_bias) for linear in (norm_column, row))
    q_norm, k_norm = _head_norms(config, norm)
    scale = architecture.residual_scale
    scales = scale, scale * architecture.mlp_scale
    scales = (layer.factors.mixer_output, layer.factors.mlp_output) if layer.factors else scales
    add_mixer, add_mlp = (_residual_add(config, norm, each) for each in scales)
    heads = heads_config(config, layer)
    has_keys = layer.kv_source is None
    k_norm = k_norm if has_keys else IdentityOp
    absent = 1 - layer.has_values if has_keys else 2  # projections of keys and values
    attention = ModuleSpec(
        module=_attention_class(layer, heads),
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_without_projections(norm_column, heads, absent) if absent else norm_column,
            core_attention=CoreAttention,  # pyright: ignore[reportArgumentType]
            linear_proj=output,
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )
    if config.multi_latent_attention and layer.mixer == "attention":
        # Two linears follow the norm, so it is separate.
        latent = SparseLatentAttention if architecture.sparse else LatentAttention
        attention = ModuleSpec(module=latent, submodules=LatentAttentionSubmodules(column, row, norm))
        norm_input = branch_norm
    elif layer.mixer == "kimi_delta":
        # Further linears follow the norm, so it is separate.
        attention = ModuleSpec(module=KimiDeltaAttention, params={"in_proj": column, "out_proj": row, "column": column})
        norm_input = branch_norm
    elif layer.mixer == "gated_delta_net":
        attention = ModuleSpec(module=GatedDeltaNet, params={"in_proj": norm_column, "out_proj": row})
    elif layer.mixer == "mamba":
        attention = ModuleSpec(module=Mamba2, params={"in_proj": norm_column, "out_proj": row})
    elif layer.mixer == "attention_and_mamba":
        mamba = ModuleSpec(module=Mamba2, params={"in_proj": column, "out_proj": row})
        attention = ModuleSpec(module=ParallelMixers, params={"attention": attention, "mamba": mamba})
    elif layer.mixer == "lightning_attention":
        attention = ModuleSpec(module=LightningAttention, params={"in_proj": norm_column, "out_proj": row})
    elif layer.mixer == "short_conv":
        attention = ModuleSpec(module=ShortConv, params={"in_proj": norm_column, "out_proj": row})
    norm_mlp = branch_norm if moe and not architecture.parallel_block else separate_norm
    if moe:
        norm_mlp = IdentityOp if architecture.expert_norms else norm_mlp
        shared = partial(SharedExperts, submodules=MLPSubmodules(column, row, SwiGLU))
        kind = partial(NormedExpertLayer, norm=norm) if architecture.expert_norms else ExpertLayer
        mlp = partial(kind, submodules=MoESubmodules(router=Router, experts=GroupedExperts, shared_experts=shared))
    else:
        activation = XIELU if config.activation_func is XIELU else SwiGLU
        kind = RecomputedMLP if config.recomputes_mlp else MLP  # type: ignore[attr-defined]
        mlp = partial(kind.as_mlp_submodule, submodules=MLPSubmodules(fc1, fc2, activation))
        mlp = mlp if layer.ffn_hidden_size is None else _with_width(mlp, layer.ffn_hidden_size)
    spec = ModuleSpec(
        module=NormedResidualLayer if layer.factors else _layer_class(architecture),
        params={"factors": layer.factors} if layer.factors else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_input,
            self_attention=attention,
            self_attn_bda=add_mixer,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm_mlp,
            mlp=mlp,
            mlp_bda=add_mlp,  # pyright: ignore[reportArgumentType]
        ),
    )
    return _without_absent_part(spec, layer)


def _residual_add(config: TransformerConfig, norm: NormBuilder, scale: float):
    architecture: Architecture = config.architecture  # type: ignore[attr-defined]
    is_plain = scale == 1.0 and not architecture.post_norms
    if is_plain and (config.hidden_dropout or config.bias_dropout_fusion):
        return get_bias_dropout_add
    params = {"config": config, "norm": norm if architecture.post_norms else None, "scale": scale}
    return ModuleSpec(module=ResidualAdd, params=params)


def _without_absent_part(spec: ModuleSpec, layer: Layer) -> ModuleSpec:
    """Return the spec without the modules of the mixer or of the MLP, if the layer has none."""
    parts = cast(TransformerLayerSubmodules, spec.submodules)
    if layer.mixer == "none":
        parts.input_layernorm, parts.self_attention, parts.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
    if not layer.has_mlp:
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
    return spec


def _layer_class(architecture: Architecture) -> type[TransformerLayer]:
    if architecture.parallel_block:
        return ParallelLayer
    if architecture.layer_input_size:
        return ScaledInputLayer
    return ScaledLayer if architecture.layer_scalar else TransformerLayer


def _attention_class(layer: Layer, heads: TransformerConfig) -> type[LayerSelfAttention]:
    if layer.kv_source is not None:
        return SharedKeyAttention
    if layer.gives_keys:
        return KeySourceAttention
    return FusedSelfAttention if layer.has_values and supports_fused_heads(heads) else LayerSelfAttention


def _without_projections(linear, heads: TransformerConfig, absent: int):
    """Return a builder of `linear` without the outputs of so many projections of keys and values."""

    def build(inputs: int, outputs: int, **kwargs):
        return linear(inputs, outputs - absent * (heads.num_query_groups or 0) * (heads.kv_channels or 0), **kwargs)

    return build


def _head_norms(config: TransformerConfig, norm: NormBuilder) -> tuple[NormBuilder, NormBuilder]:
    """Return the builders of the queries' and the keys' norm."""
    qk_norm: str = config.architecture.qk_norm  # type: ignore[attr-defined]
    if not config.qk_layernorm or qk_norm == "rotated":  # core attention has norms of rotated heads
        return IdentityOp, IdentityOp
    if qk_norm == "head":
        return norm, norm
    assert config.num_query_groups is not None
    return partial(WideNorm, config.num_attention_heads), partial(WideNorm, config.num_query_groups)


def _with_width(mlp, width: int):
    """Return a builder of `mlp` with this width: megatron-core's second matrix reads it from the config."""

    def build(*args, config: TransformerConfig, **kwargs):
        config = copy(config)
        config.ffn_hidden_size = width
        return mlp(*args, config=config, **kwargs)

    return build


def _with_bias(linear, bias: bool):
    """Return a builder of `linear` that overrides the `bias` argument."""

    def build(*args, **kwargs):
        return linear(*args, **kwargs | {"bias": bias})

    return build


def _with_accumulation(config: TransformerConfig, linear: type):
    """Return a builder of `linear` with fused weight gradient accumulation, if the model builder chose that.

    The choice is not in `config.gradient_accumulation_fusion`, since megatron-core's output layer would read it.
    """
    if not config.accumulate_in_matmul:  # type: ignore[attr-defined]
        return linear
    fused_config = copy(config)
    fused_config.gradient_accumulation_fusion = True

    def build(*args, config, **kwargs):
        return linear(*args, config=fused_config, **kwargs)

    return build
