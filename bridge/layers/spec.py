"""Layer specs: which module stands at each place of a transformer layer. Nothing of megatron-core is patched for it."""

from copy import copy
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from .attention import CoreAttention
from .experts import GroupedExperts
from .norm import Norm


def block_spec(
    config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (and virtual stage), dense or MoE as `config.moe_layer_freq` says."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        pattern = [False] * config.num_layers
    elif isinstance(frequency, int):
        pattern = [layer % frequency == 0 for layer in range(config.num_layers)]
    else:
        pattern = [bool(moe) for moe in frequency]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = pattern[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, moe, transformer_engine) for moe in here],
        layer_norm=_norm(transformer_engine),
    )


def _norm(transformer_engine: bool):
    if not transformer_engine:
        return Norm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer(config: TransformerConfig, moe: bool, transformer_engine: bool) -> ModuleSpec:
    norm = _norm(transformer_engine)
    column, row = ColumnParallelLinear, RowParallelLinear
    norm_column, norm_before = column, norm  # a norm of its own, then the matrix
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TELayerNormColumnParallelLinear,
            TERowParallelLinear,
        )

        column, row = _accumulating(config, TEColumnParallelLinear), _accumulating(config, TERowParallelLinear)
        # The norm lies inside the matrix's module.
        norm_column, norm_before = _accumulating(config, TELayerNormColumnParallelLinear), IdentityOp
    head_norm = norm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=norm_column,
            core_attention=CoreAttention,  # pyright: ignore[reportArgumentType]
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    if moe:
        shared = partial(_shared_experts, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
        mlp = partial(MoELayer, submodules=MoESubmodules(experts=GroupedExperts, shared_experts=shared))
    else:
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=norm_column, linear_fc2=row))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm if moe else norm_before,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )


def _accumulating(config: TransformerConfig, linear: type):
    """`linear`, adding its weight gradient to `main_grad` inside the matrix product where the builder chose that.

    The choice is not in `config.gradient_accumulation_fusion`: megatron-core's own output layer would ask for apex.
    """
    if not config.accumulate_in_matmul:  # type: ignore[attr-defined]
        return linear
    fused = copy(config)
    fused.gradient_accumulation_fusion = True

    def build(*args, config, **kwargs):
        return linear(*args, config=fused, **kwargs)

    return build


def _shared_experts(*, config, pg_collection, gate, submodules, name=None):
    return SharedExpertMLP(config=config, submodules=submodules, gate=gate, pg_collection=pg_collection, name=name)
